"""Answers put together by hand are the messages they stand for: held against protobuf's own encoder.

For every size at which a length or a number needs another byte, and whatever the batch is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlease.registry.engines import EngineState
from kvlease.registry.errors import InvalidRequest
from kvlease.registry.table_leases import HeldLease
from kvlease.registry.table_search import Found
from kvlease.registry.values import (
    DIGEST_BYTES,
    MAX_BATCH,
    ConversationId,
    EndReason,
    Engine,
    EngineId,
    Fingerprint,
    Incarnation,
    LeaseId,
    Miss,
    MissReason,
    OnDeadline,
    Publication,
    Record,
    ResolveQuery,
    TenantId,
)
from kvlease.registry.wire_answers import answer_bytes, batch_bytes, shed_bytes, varint
from kvlease.registry.wire_resolve import encode_answer
from kvlease.v1 import registry_pb2 as pb

ENGINE = EngineState(Engine(engine_id=EngineId("decode-1"), incarnation=Incarnation(b"i" * 16)))


def found(
    *, strides: int = 2, body: bytes = b"body", conversation: str = "", trace: str = "", remaining_ms: int = 5
) -> Found:
    publication = Publication(
        lease_id=LeaseId("lease-1"),
        tenant=TenantId("t"),
        conversation=ConversationId(conversation) if conversation else None,
        stride_tokens=64,
        block_count=4,
        size_bytes=0,
        deadline_ms=0,
        on_deadline=OnDeadline.LAPSE,
        fingerprint_hash=b"f" * 16,
        record=Record(digests=bytes(range(16)) * strides, body=body),
        traceparent=trace,
    )
    return Found(HeldLease(publication, ENGINE, used_ms=0), strides, remaining_ms)


def message_of(answer: Found | Miss) -> pb.ResolveResponse:
    return encode_answer(answer.hit() if isinstance(answer, Found) else answer)


SIZES = st.sampled_from([0, 1, 60, 100, 127, 128, 129, 16_000, 16_300, 16_383, 16_384, 20_000])
HITS = st.builds(
    found,
    strides=st.sampled_from([1, 7, 8, 127, 128, 1_023, 1_024, 4_096]),
    body=SIZES.map(bytes),
    conversation=st.sampled_from(["", "c", "c" * 128]),
    trace=st.sampled_from(["", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"]),
    remaining_ms=st.integers(-(2**63), 2**63 - 1),
)
MISSES = st.sampled_from(
    [
        Miss(reason=MissReason.UNKNOWN),
        Miss(reason=MissReason.ENDED, end_reason=EndReason.REUSED),
        Miss(reason=MissReason.FINGERPRINT, lender_fingerprint=Fingerprint(hash=b"f" * 16, fields=(("a", "b"),))),
    ]
)


@given(answer=HITS | MISSES)
def test_an_answer_is_the_message_it_stands_for(answer: Found | Miss) -> None:
    assert pb.ResolveResponse.FromString(answer_bytes(answer)) == message_of(answer)
    assert pb.ResolveResponse.FromString(answer_bytes(answer)) == message_of(answer), "with the head made before"


@given(
    items=st.lists(st.tuples(st.integers(0, 2**64 - 1), HITS | MISSES | st.none()), min_size=1, max_size=5),
)
def test_every_item_of_a_batch_is_answered_under_its_own_number(items: list[tuple[int, Found | Miss | None]]) -> None:
    """None stands for a question that breaks the contract."""
    message = pb.ResolveStreamRequest()
    for number, answer in items:
        request = message.requests.add(correlation_id=number).request
        request.tenant, request.conversation = "t" if answer is not None else "not an id", "c"
    good = [answer for _, answer in items if answer is not None]

    def resolve(queries: Sequence[ResolveQuery]) -> list[Found | Miss]:
        assert queries == [ResolveQuery(tenant=TenantId("t"), conversation=ConversationId("c"))] * len(good)
        return good

    response = pb.ResolveStreamResponse.FromString(batch_bytes(resolve, message))
    given_answers = sorted((x.correlation_id, x.response.SerializeToString()) for x in response.answers)
    invalid = Miss(reason=MissReason.INVALID)
    expected = sorted((n, message_of(a if a is not None else invalid).SerializeToString()) for n, a in items)
    assert given_answers == expected


def test_what_is_shed_is_answered_as_overloaded() -> None:
    message = pb.ResolveStreamRequest()
    for number in (0, 7, 2**64 - 1):
        message.requests.add(correlation_id=number)
    response = pb.ResolveStreamResponse.FromString(shed_bytes(message))
    assert [x.correlation_id for x in response.answers] == [0, 7, 2**64 - 1]
    assert {x.response.miss.reason for x in response.answers} == {pb.MISS_REASON_OVERLOADED}


@pytest.mark.parametrize("count", [0, MAX_BATCH + 1])
def test_a_batch_of_the_wrong_size_is_refused(count: int) -> None:
    message = pb.ResolveStreamRequest(requests=[pb.CorrelatedResolve()] * count)
    with pytest.raises(InvalidRequest):
        batch_bytes(lambda queries: [], message)


@given(number=st.integers(0, 2**64 - 1) | st.sampled_from([2**k + d for k in range(7, 64, 7) for d in (-1, 0, 1)]))
def test_varint(number: int) -> None:
    expected = pb.CorrelatedAnswer(correlation_id=number).SerializeToString()[1:] or b"\0"
    assert varint(number) == expected


def test_digests_are_forwarded_byte_for_byte() -> None:
    answer = found(strides=3)
    record = pb.ResolveResponse.FromString(answer_bytes(answer)).hit.record
    assert record.digests == answer.lease.publication.record.digests
    assert len(record.digests) == 3 * DIGEST_BYTES
