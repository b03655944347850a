"""Errors over gRPC: an error becomes a status with google.rpc details, and a failed call becomes an error again.

Edge code: the only place that knows both `errors.py` and grpc. No decisions here; status, reason and retry hint
come from the table in `errors.py`.
Invariant: what `encode_details` writes, `from_rpc_error` reads back as the same type with the same details.
"""

from __future__ import annotations

from typing import Final, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from kvlease.registry.errors import (
    ERROR_DOMAIN,
    TABLE,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvleaseError,
    LimitReached,
    PermissionDenied,
    Reason,
    RegistryUnavailable,
    Unauthenticated,
    retry_hint_ms,
)

Request = TypeVar("Request")
Response = TypeVar("Response")

DETAILS_KEY: Final = "grpc-status-details-bin"
"""Trailing metadata that carries a serialised google.rpc.Status, by gRPC's convention for rich errors."""

_BARE_CODES: Final[dict[grpc.StatusCode, type[KvleaseError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: RegistryUnavailable,
    grpc.StatusCode.CANCELLED: RegistryUnavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitReached,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}
"""What a status without our details means: a proxy, a message over the size limit, a peer that is no registry."""


def status_code(error: KvleaseError) -> grpc.StatusCode:
    """The gRPC status that `error` travels under."""
    return grpc.StatusCode[TABLE[error.reason].status.name]


def encode_details(error: KvleaseError) -> bytes:
    """A serialised google.rpc.Status with ErrorInfo, and RetryInfo where a retry is safe and useful."""
    code: int = status_code(error).value[0]
    status = status_pb2.Status(code=code, message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=ERROR_DOMAIN, metadata=dict(error.details))
    status.details.append(_packed(info))
    wait_ms = retry_hint_ms(error)
    if wait_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(wait_ms)
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return bytes(status.SerializeToString())


async def abort(context: grpc.aio.ServicerContext[Request, Response], error: KvleaseError) -> NoReturn:
    """End the call with `error`. Raises grpc.aio.AbortError, which the servicer must let pass."""
    await context.abort(status_code(error), error.message, trailing_metadata=((DETAILS_KEY, encode_details(error)),))
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.aio.AioRpcError) -> KvleaseError:
    """The typed error that a failed call stands for; chain it with `raise from_rpc_error(e) from e`."""
    message = error.details() or error.code().name
    details = _details(error)
    if details is None:
        return _BARE_CODES.get(error.code(), InternalError)(message)
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    wait_ms: int | None = None
    try:
        status = status_pb2.Status.FromString(details)
        for detail in status.details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                detail.Unpack(info)
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                detail.Unpack(retry)
                wait_ms = retry.retry_delay.ToMilliseconds()
    except DecodeError:
        return _BARE_CODES.get(error.code(), InternalError)(message)
    if info.domain != ERROR_DOMAIN:
        return _BARE_CODES.get(error.code(), InternalError)(message)
    try:
        row = TABLE[Reason(info.reason)]
    except ValueError:  # a reason of a newer registry: the status still says what kind it is
        return _BARE_CODES.get(error.code(), InternalError)(message, retry_after_ms=wait_ms)
    return row.error.restore(status.message or message, dict(info.metadata), wait_ms)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _details(error: grpc.aio.AioRpcError) -> bytes | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            return value if isinstance(value, bytes) else value.encode()
    return None
