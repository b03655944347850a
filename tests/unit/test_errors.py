"""The error table is total, and an error survives the way over gRPC: type, message, details, retry hint.

No server here: status details are made and read back. `tests/integration/test_client.py` does it over a socket.
"""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from kvlease.registry import errors
from kvlease.registry.errors import (
    TABLE,
    Compacted,
    DeadlineExceeded,
    EngineIdInUse,
    InternalError,
    InvalidRequest,
    KvleaseError,
    Limit,
    LimitReached,
    Overloaded,
    Reason,
    RegistryUnavailable,
    SessionGap,
    retry_hint_ms,
)
from kvlease.registry.errors_grpc import DETAILS_KEY, encode_details, from_rpc_error, status_code


def rpc_error(code: grpc.StatusCode, message: str, details: bytes | None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata() if details is None else grpc.aio.Metadata((DETAILS_KEY, details))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=message)


def travelled(error: KvleaseError) -> KvleaseError:
    return from_rpc_error(rpc_error(status_code(error), error.message, encode_details(error)))


def concrete_errors() -> set[type[KvleaseError]]:
    return {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, KvleaseError) and value is not KvleaseError
    }


def test_each_reason_and_each_error_has_exactly_one_row() -> None:
    assert set(TABLE) == set(Reason)
    assert {row.error for row in TABLE.values()} == concrete_errors()
    assert all(row.error.reason is reason for reason, row in TABLE.items())


def test_reasons_and_codes_that_the_contract_names() -> None:
    named = {
        Reason.SESSION_GAP: grpc.StatusCode.FAILED_PRECONDITION,
        Reason.SESSION_REPLACED: grpc.StatusCode.ABORTED,
        Reason.ENGINE_ID_IN_USE: grpc.StatusCode.ALREADY_EXISTS,
        Reason.NO_SESSION: grpc.StatusCode.FAILED_PRECONDITION,
        Reason.LENDER_SILENT: grpc.StatusCode.UNAVAILABLE,
        Reason.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.COMPACTED: grpc.StatusCode.OUT_OF_RANGE,
        Reason.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    }
    assert {reason: status_code(TABLE[reason].error("x")) for reason in named} == named


@pytest.mark.parametrize("reason", list(Reason))
def test_an_error_comes_back_as_itself(reason: Reason) -> None:
    error = TABLE[reason].error("what happened: naïve ✓")
    back = travelled(error)
    assert type(back) is type(error)
    assert back.message == error.message
    assert retry_hint_ms(back) == retry_hint_ms(error)


def test_details_come_back() -> None:
    invalid = travelled(InvalidRequest("too many", field="digests", limit=Limit.DIGESTS))
    assert isinstance(invalid, InvalidRequest)
    assert (invalid.field, invalid.limit) == ("digests", "max_digests")
    limit = travelled(LimitReached("no more sessions", limit="max_sessions"))
    assert isinstance(limit, LimitReached)
    assert limit.limit == "max_sessions"


def test_a_hint_of_its_own_goes_before_the_tables() -> None:
    assert travelled(Overloaded("busy", retry_after_ms=1_234)).retry_after_ms == 1_234
    assert travelled(Overloaded("busy")).retry_after_ms == TABLE[Reason.OVERLOADED].retry_after_ms
    assert travelled(Compacted("list again")).retry_after_ms is None


def test_a_status_without_our_details_is_still_typed() -> None:
    bare = {
        grpc.StatusCode.UNAVAILABLE: RegistryUnavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.CANCELLED: RegistryUnavailable,
        grpc.StatusCode.UNIMPLEMENTED: InternalError,
    }
    assert {code: type(from_rpc_error(rpc_error(code, "m", None))) for code in bare} == bare


def test_garbage_in_the_details_is_ignored() -> None:
    back = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "gone", b"\xff\xff\xff"))
    assert type(back) is RegistryUnavailable
    assert back.message == "gone"


def test_a_reason_of_a_newer_registry_keeps_its_kind_and_hint() -> None:
    details = encode_details(SessionGap("new", retry_after_ms=700)).replace(b"SESSION_GAP", b"SESSION_NEW")
    back = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "new", details))
    assert type(back) is RegistryUnavailable
    assert back.retry_after_ms == 700


def test_details_of_another_domain_are_not_ours() -> None:
    details = encode_details(EngineIdInUse("x")).replace(b"kvlease", b"another")
    assert type(from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "x", details))) is RegistryUnavailable


@pytest.mark.parametrize("reason", list(Reason))
def test_again_is_equal_and_fresh(reason: Reason) -> None:
    error = TABLE[reason].error("m", retry_after_ms=5)
    again = error.again()
    assert again is not error
    assert (type(again), again.message, again.details, again.retry_after_ms) == (type(error), "m", error.details, 5)
