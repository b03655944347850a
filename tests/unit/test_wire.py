"""The codec: every legal value survives the wire, every illegal message is refused by name.

Values are generated over the whole of what `values.py` allows. Serialisation is included: bytes out, bytes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from kvlease.registry import wire, wire_resolve
from kvlease.registry.errors import InvalidRequest, Limit
from kvlease.registry.values import (
    DIGEST_BYTES,
    MAX_ALIASES,
    MAX_BLOCKS,
    MAX_DIGESTS,
    MAX_RECORD_BYTES,
    ConversationId,
    EndOrder,
    EndReason,
    EndScope,
    Engine,
    EngineId,
    EngineStatus,
    Fingerprint,
    Hit,
    Incarnation,
    LeaseEvent,
    LeaseEventType,
    LeaseFilter,
    LeaseId,
    LeaseState,
    LeaseView,
    Located,
    Miss,
    MissReason,
    OnDeadline,
    Publication,
    PublishResult,
    PublishStatus,
    Record,
    RenewStatus,
    ResolveQuery,
    TenantId,
)
from kvlease.v1 import registry_pb2 as pb

Value = TypeVar("Value")
M = TypeVar("M", bound=Message)

IDS = st.text("abcXYZ019._:@/+=-", min_size=1, max_size=128)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
URLS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=40)
PAIRS = st.dictionaries(TEXTS, TEXTS, max_size=16).map(lambda pairs: tuple(sorted(pairs.items())))
SIXTEEN = st.binary(min_size=16, max_size=16)
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
INSTANTS = st.integers(0, 2**53 - 1)
TRACEPARENTS = st.sampled_from(("", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
CONVERSATIONS = st.none() | IDS.map(ConversationId)
DIGESTS = st.integers(1, 6).flatmap(lambda n: st.binary(min_size=n * DIGEST_BYTES, max_size=n * DIGEST_BYTES))
RECORDS = st.builds(Record, digests=DIGESTS, body=st.binary(max_size=64))
FINGERPRINTS = st.builds(Fingerprint, hash=st.just(b"") | SIXTEEN, fields=PAIRS)
ENGINES = st.builds(
    Engine,
    engine_id=IDS.map(EngineId),
    incarnation=SIXTEEN.map(Incarnation),
    api_url=URLS,
    version=st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=40),
    fingerprint=FINGERPRINTS,
    labels=PAIRS,
)
PUBLICATIONS = st.builds(
    Publication,
    lease_id=IDS.map(LeaseId),
    tenant=IDS.map(TenantId),
    conversation=CONVERSATIONS,
    stride_tokens=st.integers(1, (2**32 - 1) // 6),
    block_count=st.integers(0, MAX_BLOCKS),
    size_bytes=st.integers(0, 2**53 - 1),
    deadline_ms=INSTANTS,
    on_deadline=st.sampled_from(OnDeadline),
    fingerprint_hash=SIXTEEN,
    record=RECORDS,
    traceparent=TRACEPARENTS,
    lapsed=st.booleans(),
)
LEASES = st.builds(
    LeaseView,
    lease_id=IDS.map(LeaseId),
    tenant=IDS.map(TenantId),
    conversation=CONVERSATIONS,
    engine_id=IDS.map(EngineId),
    incarnation=SIXTEEN.map(Incarnation),
    tokens=UINT32,
    stride_tokens=UINT32,
    blocks=UINT32,
    size_bytes=UINT64,
    state=st.sampled_from(LeaseState),
    remaining_ms=INT64,
    end_reason=st.none() | st.sampled_from(EndReason),
    suspect=st.booleans(),
    traceparent=TRACEPARENTS,
    api_url=URLS,
)
QUERIES = st.builds(
    ResolveQuery,
    tenant=IDS.map(TenantId),
    lease_id=st.none() | IDS.map(LeaseId),
    conversation=CONVERSATIONS,
    digests=DIGESTS,
    stride_tokens=st.integers(1, 2**32 - 1),
    fingerprint_hash=st.just(b"") | SIXTEEN,
)
HITS = st.builds(
    Hit,
    lease_id=IDS.map(LeaseId),
    engine_id=IDS.map(EngineId),
    incarnation=SIXTEEN.map(Incarnation),
    conversation=CONVERSATIONS,
    record=RECORDS,
    matched_strides=st.integers(0, 1),
    state=st.sampled_from(LeaseState),
    remaining_ms=INT64,
    traceparent=TRACEPARENTS,
)
MISSES = st.builds(
    Miss,
    reason=st.sampled_from(MissReason),
    end_reason=st.none() | st.sampled_from(EndReason),
    lender_fingerprint=st.none() | FINGERPRINTS,
)
FOUND = st.builds(
    Located, conversation=CONVERSATIONS, lease=LEASES, api_url=st.sampled_from(("", "http://127.0.0.1:8001"))
)
NOT_FOUND = st.builds(
    Located, conversation=CONVERSATIONS, lease=st.none(), reason=st.sampled_from(MissReason), api_url=st.just("")
)


def survives(value: Value, encode: Callable[[Value], M], decode: Callable[[M], Value]) -> None:
    message = encode(value)
    assert decode(type(message).FromString(message.SerializeToString())) == value


@given(ENGINES)
def test_engine(value: Engine) -> None:
    survives(value, wire.encode_engine, wire.decode_engine)


@given(PUBLICATIONS)
def test_publication(value: Publication) -> None:
    survives(value, wire.encode_publication, wire.decode_publication)


@given(LEASES, UINT64, st.sampled_from(LeaseEventType))
def test_lease_and_event(value: LeaseView, revision: int, kind: LeaseEventType) -> None:
    survives(value, wire.encode_lease, wire.decode_lease)
    survives(LeaseEvent(revision=revision, type=kind, lease=value), wire.encode_event, wire.decode_event)


@given(QUERIES)
def test_query(value: ResolveQuery) -> None:
    survives(value, wire_resolve.encode_query, wire_resolve.decode_query)
    wire_resolve.check_query(value)


@given(HITS | MISSES)
def test_answer(value: Hit | Miss) -> None:
    survives(value, wire_resolve.encode_answer, wire_resolve.decode_answer)


@given(FOUND | NOT_FOUND)
def test_located(value: Located) -> None:
    survives(value, wire_resolve.encode_located, wire_resolve.decode_located)


@given(ENGINES, UINT32, UINT64, st.booleans())
def test_engine_status(engine: Engine, small: int, big: int, flag: bool) -> None:
    value = EngineStatus(
        engine=engine,
        connected=flag,
        suspect=not flag,
        silent_ms=small,
        leases=small,
        leased_blocks=big,
        free_blocks=small,
        total_blocks=small,
    )
    survives(value, wire.encode_engine_status, wire.decode_engine_status)


@given(IDS, st.sampled_from(PublishStatus), TEXTS, st.lists(IDS.map(LeaseId), max_size=4).map(tuple))
def test_publish_result(lease: str, status: PublishStatus, text: str, superseded: tuple[LeaseId, ...]) -> None:
    value = PublishResult(lease_id=LeaseId(lease), status=status, message=text, superseded=superseded)
    survives(value, wire.encode_publish_result, wire.decode_publish_result)


@given(IDS.map(LeaseId), st.sampled_from(EndReason), st.sampled_from(RenewStatus), INSTANTS)
def test_what_a_session_carries(lease_id: LeaseId, reason: EndReason, status: RenewStatus, at_ms: int) -> None:
    assert wire.decode_ended(wire.encode_ended(lease_id, reason)) == (lease_id, reason)
    assert wire.decode_renewed(wire.encode_renewed(lease_id, at_ms)) == (lease_id, at_ms)
    assert wire.decode_renew_refused(wire.encode_renew_refused(lease_id, status)) == (lease_id, status)


@pytest.mark.parametrize("scope", list(EndScope))
@pytest.mark.parametrize("reason", list(EndReason))
def test_end_order(scope: EndScope, reason: EndReason) -> None:
    target = "" if scope is EndScope.TENANT else "target-1"
    order = EndOrder(tenant=TenantId("t"), scope=scope, target=target, reason=reason)
    survives(order, wire.encode_end, wire.decode_end)


def test_a_drain_needs_no_tenant_and_an_end_without_reason_is_a_release() -> None:
    order = wire.decode_end(pb.EndRequest(engine_id="d-1"))
    assert order == EndOrder(tenant=TenantId(""), scope=EndScope.ENGINE, target="d-1", reason=EndReason.RELEASED)


@given(
    st.builds(
        LeaseFilter,
        tenant=st.none() | IDS.map(TenantId),
        engine_id=st.none() | IDS.map(EngineId),
        conversation=CONVERSATIONS,
    )
)
def test_filter(value: LeaseFilter) -> None:
    assert wire.decode_filter(wire.encode_watch(value, 7)) == value
    assert wire.decode_filter(wire.encode_list(value, 10)) == value


def test_absent_on_deadline_means_lapse() -> None:
    item = good_item()
    item.on_deadline = pb.ON_DEADLINE_UNSPECIFIED
    assert wire.decode_publication(item).on_deadline is OnDeadline.LAPSE


# --- refusals ---


def good_item() -> pb.PublishItem:
    return pb.PublishItem(
        lease_id="l-1",
        tenant="t",
        stride_tokens=64,
        block_count=4,
        deadline_lender_ms=1_000,
        fingerprint_hash=b"f" * 16,
        record=pb.Record(digests=b"d" * 32, body=b"body"),
    )


def good_query() -> pb.ResolveRequest:
    return pb.ResolveRequest(tenant="t", conversation="c", digests=b"d" * 32, stride_tokens=64)


def good_hit() -> pb.ResolveResponse:
    hit = Hit(
        lease_id=LeaseId("l"),
        engine_id=EngineId("d"),
        incarnation=Incarnation(b"i" * 16),
        conversation=None,
        record=Record(digests=b"d" * 32, body=b""),
        matched_strides=2,
        state=LeaseState.LIVE,
        remaining_ms=1,
    )
    return wire_resolve.encode_answer(hit)


ITEM_FAULTS: dict[str, tuple[Callable[[pb.PublishItem], None], str, str]] = {
    "empty lease id": (lambda m: setattr(m, "lease_id", ""), "lease_id", Limit.ID),
    "long lease id": (lambda m: setattr(m, "lease_id", "x" * 129), "lease_id", Limit.ID),
    "control character": (lambda m: setattr(m, "tenant", "a\nb"), "tenant", Limit.ID),
    "trailing newline": (lambda m: setattr(m, "tenant", "a\n"), "tenant", Limit.ID),
    "space in conversation": (lambda m: setattr(m, "conversation", "a b"), "conversation", Limit.ID),
    "no stride": (lambda m: setattr(m, "stride_tokens", 0), "stride_tokens", ""),
    "negative deadline": (lambda m: setattr(m, "deadline_lender_ms", -1), "deadline_lender_ms", ""),
    "deadline past all clocks": (lambda m: setattr(m, "deadline_lender_ms", 2**53), "deadline_lender_ms", ""),
    "unknown on_deadline": (lambda m: setattr(m, "on_deadline", 99), "on_deadline", ""),
    "short fingerprint": (lambda m: setattr(m, "fingerprint_hash", b"f"), "fingerprint_hash", ""),
    "no digests": (lambda m: setattr(m.record, "digests", b""), "record.digests", ""),
    "truncated digest": (lambda m: setattr(m.record, "digests", b"d" * 17), "record.digests", ""),
    "too many digests": (
        lambda m: setattr(m.record, "digests", bytes((MAX_DIGESTS + 1) * DIGEST_BYTES)),
        "record.digests",
        Limit.DIGESTS,
    ),
    "record too large": (lambda m: setattr(m.record, "body", bytes(MAX_RECORD_BYTES)), "record", Limit.RECORD_BYTES),
    "long traceparent": (lambda m: setattr(m, "traceparent", "0" * 56), "traceparent", Limit.TRACEPARENT),
}


@pytest.mark.parametrize("fault", ITEM_FAULTS)
def test_a_bad_publication_is_refused_by_name(fault: str) -> None:
    wire.decode_publication(good_item())
    spoil, field, limit = ITEM_FAULTS[fault]
    item = good_item()
    spoil(item)
    with pytest.raises(InvalidRequest) as caught:
        wire.decode_publication(item)
    assert (caught.value.field, caught.value.limit) == (field, limit)


def test_the_largest_legal_record_passes() -> None:
    item = good_item()
    item.record.digests = bytes(MAX_DIGESTS * DIGEST_BYTES)
    item.record.body = bytes(MAX_RECORD_BYTES - MAX_DIGESTS * DIGEST_BYTES)
    assert wire.decode_publication(item).strides == MAX_DIGESTS


QUERY_FAULTS: dict[str, tuple[Callable[[pb.ResolveRequest], None], str]] = {
    "no tenant": (lambda m: setattr(m, "tenant", ""), "tenant"),
    "bad lease id": (lambda m: setattr(m, "lease_id", "\x00"), "lease_id"),
    "bad conversation": (lambda m: setattr(m, "conversation", "é"), "conversation"),
    "truncated digest": (lambda m: setattr(m, "digests", b"d" * 31), "digests"),
    "too many digests": (lambda m: setattr(m, "digests", bytes((MAX_DIGESTS + 1) * DIGEST_BYTES)), "digests"),
    "digests without stride": (lambda m: setattr(m, "stride_tokens", 0), "stride_tokens"),
    "short fingerprint": (lambda m: setattr(m, "fingerprint_hash", b"f" * 15), "fingerprint_hash"),
    "nothing asked": (lambda m: m.CopyFrom(pb.ResolveRequest(tenant="t")), "digests"),
}


@pytest.mark.parametrize("fault", QUERY_FAULTS)
def test_a_bad_query_is_refused_by_name_on_both_sides(fault: str) -> None:
    good = wire_resolve.decode_query(good_query())
    spoil, field = QUERY_FAULTS[fault]
    message = good_query()
    spoil(message)
    with pytest.raises(InvalidRequest) as caught:
        wire_resolve.decode_query(message)
    assert caught.value.field == field
    spoiled = good._replace(
        tenant=TenantId(message.tenant),
        lease_id=LeaseId(message.lease_id) or None,
        conversation=ConversationId(message.conversation) or None,
        digests=message.digests,
        stride_tokens=message.stride_tokens,
        fingerprint_hash=message.fingerprint_hash,
    )
    with pytest.raises(InvalidRequest) as caught:
        wire_resolve.check_query(spoiled)
    assert caught.value.field == field


ANSWER_FAULTS: dict[str, Callable[[pb.ResolveResponse], None]] = {
    "neither": lambda m: m.Clear(),
    "matches more than the record has": lambda m: setattr(m.hit, "matched_strides", 3),
    "no record": lambda m: m.hit.ClearField("record"),
    "short incarnation": lambda m: setattr(m.hit, "incarnation", b"i"),
    "no engine": lambda m: setattr(m.hit, "engine_id", ""),
    "unknown state": lambda m: setattr(m.hit, "state", 99),
}


@pytest.mark.parametrize("fault", ANSWER_FAULTS)
def test_a_bad_answer_is_refused(fault: str) -> None:
    message = good_hit()
    wire_resolve.decode_answer(message)
    ANSWER_FAULTS[fault](message)
    with pytest.raises(InvalidRequest):
        wire_resolve.decode_answer(message)


def test_a_miss_of_a_newer_registry_is_a_plain_miss() -> None:
    message = pb.ResolveResponse(miss=pb.Miss(reason=99, end_reason=99))  # type: ignore[arg-type]
    assert wire_resolve.decode_answer(message) == Miss(reason=MissReason.UNKNOWN)


def test_an_error_does_not_repeat_what_was_sent() -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire_resolve.decode_query(pb.ResolveRequest(tenant="my secret prompt", conversation="c"))
    assert "secret" not in caught.value.message


def test_locate_and_naming() -> None:
    aliases = [bytes([n]) * 16 for n in range(MAX_ALIASES)]
    tenant, conversation, back = wire_resolve.decode_locate(pb.LocateRequest(tenant="t", aliases=aliases))
    assert (tenant, conversation, list(back)) == ("t", None, aliases)
    naming = pb.NameConversationRequest(tenant="t", conversation="c", aliases=aliases, ttl_ms=5)
    assert wire_resolve.decode_naming(naming)[3] == 5
    with pytest.raises(InvalidRequest, match="at most"):
        wire_resolve.decode_locate(pb.LocateRequest(tenant="t", aliases=[*aliases, b"x" * 16]))
    with pytest.raises(InvalidRequest, match="16 bytes"):
        wire_resolve.decode_locate(pb.LocateRequest(tenant="t", aliases=[b"x" * 15]))
    with pytest.raises(InvalidRequest, match="one of"):
        wire_resolve.decode_locate(pb.LocateRequest(tenant="t"))


def test_page_size() -> None:
    assert wire.decode_page_size(pb.ListLeasesRequest()) == 1_000
    assert wire.decode_page_size(pb.ListLeasesRequest(page_size=10_000)) == 10_000
    with pytest.raises(InvalidRequest):
        wire.decode_page_size(pb.ListLeasesRequest(page_size=10_001))
