"""The largest answers that a registry puts together by count stay below the message limit, with every value at its
longest; what could be longer than its characters say is refused, and so is what would not fit into an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from kvlease.registry import wire, wire_resolve
from kvlease.registry.errors import InvalidRequest
from kvlease.registry.servicer import PAGE_LEASES
from kvlease.registry.values import (
    DIGEST_BYTES,
    INCARNATION_BYTES,
    MAX_DIGESTS,
    MAX_ID_CHARS,
    MAX_MESSAGE_BYTES,
    MAX_SIZE_BYTES,
    MAX_TEXT_CHARS,
    MAX_TOKENS,
    MAX_TRACEPARENT_CHARS,
    ConversationId,
    EndReason,
    EngineId,
    Incarnation,
    LeaseEvent,
    LeaseEventType,
    LeaseFilter,
    LeaseId,
    LeaseState,
    LeaseView,
    ResolveQuery,
    TenantId,
)
from kvlease.registry.watch import EVENTS_PER_MESSAGE
from kvlease.v1 import registry_pb2 as pb

ID = "i" * MAX_ID_CHARS
UINT32, UINT64 = 2**32 - 1, 2**64 - 1
LONGEST = LeaseView(
    lease_id=LeaseId(ID),
    tenant=TenantId(ID),
    conversation=ConversationId(ID),
    engine_id=EngineId(ID),
    incarnation=Incarnation(b"i" * INCARNATION_BYTES),
    tokens=UINT32,
    stride_tokens=UINT32,
    blocks=UINT32,
    size_bytes=UINT64,
    state=LeaseState.ENDED,
    remaining_ms=-1,
    end_reason=EndReason.QUOTA,
    suspect=True,
    traceparent="0" * MAX_TRACEPARENT_CHARS,
    api_url="u" * MAX_TEXT_CHARS,
)


def test_a_page_of_the_longest_leases_is_one_message() -> None:
    lease = wire.encode_lease(LONGEST)
    page = pb.ListLeasesResponse(leases=[lease] * PAGE_LEASES, revision=UINT64, next_page_token=ID)
    assert page.ByteSize() <= MAX_MESSAGE_BYTES


def test_a_message_of_the_longest_events_is_one_message() -> None:
    event = wire.encode_event(LeaseEvent(revision=UINT64, type=LeaseEventType.ENDED, lease=LONGEST))
    news = pb.WatchResponse(revision=UINT64, events=[event] * EVENTS_PER_MESSAGE, newest_revision=UINT64)
    assert news.ByteSize() <= MAX_MESSAGE_BYTES


@pytest.mark.parametrize("url", ["http://ü", "u" * (MAX_TEXT_CHARS + 1)])
def test_a_url_takes_no_more_bytes_than_characters(url: str) -> None:
    with pytest.raises(InvalidRequest, match="api_url"):
        wire.decode_engine(pb.Engine(engine_id="d", incarnation=b"i" * INCARNATION_BYTES, api_url=url))


@pytest.mark.parametrize("field", ["api_url", "version"])
@pytest.mark.parametrize("character", ["\n", "\r", "\t", "\x00", "\x1b", "\x7f", "\x9b"])
def test_what_operators_see_of_an_engine_is_one_line(field: str, character: str) -> None:
    message = pb.Engine(engine_id="d", incarnation=b"i" * INCARNATION_BYTES)
    setattr(message, field, f"a{character}b")
    with pytest.raises(InvalidRequest, match=field):
        wire.decode_engine(message)


def item(*, strides: int = 1, **fields: int) -> pb.PublishItem:
    record = pb.Record(digests=b"d" * strides * DIGEST_BYTES)
    good = pb.PublishItem(lease_id="l", tenant="t", stride_tokens=64, fingerprint_hash=b"f" * 16, record=record)
    good.MergeFrom(pb.PublishItem(**fields))  # type: ignore[arg-type]
    return good


@pytest.mark.parametrize(
    ("field", "publication"),
    [
        ("stride_tokens", item(strides=2, stride_tokens=MAX_TOKENS)),
        ("stride_tokens", item(strides=MAX_DIGESTS, stride_tokens=MAX_TOKENS // MAX_DIGESTS + 1)),
        ("size_bytes", item(size_bytes=MAX_SIZE_BYTES + 1)),
    ],
)
def test_a_lease_that_no_answer_could_tell_of_is_refused(field: str, publication: pb.PublishItem) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.decode_publication(publication)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "publication",
    [
        item(stride_tokens=MAX_TOKENS, size_bytes=MAX_SIZE_BYTES),
        item(strides=MAX_DIGESTS, stride_tokens=MAX_TOKENS // MAX_DIGESTS),
    ],
)
def test_the_largest_lease_can_be_told_of(publication: pb.PublishItem) -> None:
    value = wire.decode_publication(publication)
    wire.encode_lease(replace(LONGEST, tokens=value.tokens, size_bytes=value.size_bytes))


QUERY = ResolveQuery(tenant=TenantId("t"), lease_id=LeaseId("l"))
TENANT, LEASE, CHAT = TenantId("t"), LeaseId("l"), ConversationId("c")


@pytest.mark.parametrize(
    ("field", "most", "send"),
    [
        ("from_revision", UINT64, lambda number: wire.encode_watch(LeaseFilter(), number)),
        ("ttl_ms", UINT32, lambda number: wire.encode_renew(TENANT, LEASE, number)),
        ("ttl_ms", UINT32, lambda number: wire_resolve.encode_naming(TENANT, CHAT, (), number)),
        ("stride_tokens", UINT32, lambda number: wire_resolve.check_query(QUERY._replace(stride_tokens=number))),
    ],
)
def test_a_number_that_no_request_can_hold_is_refused_by_name(
    field: str, most: int, send: Callable[[int], object]
) -> None:
    send(most)
    for number in (-1, most + 1):
        with pytest.raises(InvalidRequest) as caught:
            send(number)
        assert caught.value.field == field
