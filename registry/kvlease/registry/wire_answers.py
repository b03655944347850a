"""Answers to resolves as bytes, put together from what a lease has already: the hot path of a registry.

Edge code: the one place that writes protobuf by hand. The parts of a serialised message may stand in any order and
simply follow each other, so an answer is the lease's head (made once, kept with the lease), the record's own bytes,
and a tail with the three things that differ from answer to answer. No message object is built, and the record is
copied once; built from messages, 8k tokens of it are copied three times and the answer costs twice as much.
Invariant: parsed, the bytes equal the message that `wire_resolve.encode_answer` makes of the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlease.registry.errors import InvalidRequest
from kvlease.registry.table_leases import HeldLease
from kvlease.registry.table_search import Found
from kvlease.registry.values import LeaseState, Miss, MissReason, ResolveQuery
from kvlease.registry.wire_checks import STATE_OUT, check_batch
from kvlease.registry.wire_resolve import decode_query, encode_answer
from kvlease.v1 import registry_pb2 as pb

Resolve = Callable[[Sequence[ResolveQuery]], Sequence[Found | Miss]]

# A field begins with its tag, number << 3 | wire type: 0 for a varint, 2 for what has a length. Those in here:
#   0a  ResolveStreamResponse.answers, ResolveResponse.hit, Record.digests
#   08, 12  CorrelatedAnswer.correlation_id, .response; 12 is Record.body too
#   22, 28, 30, 38  Hit.record, .matched_strides, .state, .remaining_ms

_LIVE = bytes((STATE_OUT[LeaseState.LIVE],))
_LAPSED = bytes((STATE_OUT[LeaseState.LAPSED],))

_SHORT = 0x4000
_VARINTS = tuple(bytes((n,)) if n < 0x80 else bytes((n & 0x7F | 0x80, n >> 7)) for n in range(_SHORT))
"""All of one and two bytes, for half a megabyte: an answer needs five."""
_LOW = tuple(bytes((n & 0x7F | 0x80, n >> 7 | 0x80)) for n in range(_SHORT))
"""The first two bytes of those that go on, for as much: times and large records need them."""

_INVALID = encode_answer(Miss(reason=MissReason.INVALID)).SerializeToString()
_OVERLOADED = encode_answer(Miss(reason=MissReason.OVERLOADED)).SerializeToString()


def answer_bytes(answer: Found | Miss) -> bytes:
    """A serialised ResolveResponse."""
    if not isinstance(answer, Found):
        return encode_answer(answer).SerializeToString()
    hit = _hit(answer)
    return b"".join((b"\x0a", varint(hit[0]), *hit[1:]))


def batch_bytes(resolve: Resolve, message: pb.ResolveStreamRequest) -> bytes:
    """A serialised ResolveStreamResponse: an answer to each item. A bad item is answered by a miss.

    Raises InvalidRequest unless there are 1 to MAX_BATCH items.
    """
    check_batch("requests", len(message.requests))
    pieces: list[bytes] = []
    queries: list[ResolveQuery] = []
    ids: list[bytes] = []
    for item in message.requests:
        correlation_id = varint(item.correlation_id)
        try:
            queries.append(decode_query(item.request))
        except InvalidRequest:
            pieces.append(_correlated(correlation_id, _INVALID))
        else:
            ids.append(correlation_id)
    for correlation_id, answer in zip(ids, resolve(queries), strict=True):
        if not isinstance(answer, Found):
            pieces.append(_correlated(correlation_id, encode_answer(answer).SerializeToString()))
            continue
        # From the inside out, because each length counts the lengths within it.
        hit = _hit(answer)
        size = hit[0]
        hit_bytes = varint(size)
        size += 1 + len(hit_bytes)
        response_bytes = varint(size)
        size += 2 + len(response_bytes) + len(correlation_id)
        pieces += (b"\x0a", varint(size), b"\x08", correlation_id, b"\x12", response_bytes, b"\x0a", hit_bytes)
        pieces += hit[1:]
    return b"".join(pieces)


def shed_bytes(message: pb.ResolveStreamRequest) -> bytes:
    """A serialised ResolveStreamResponse in which every item is overloaded: nothing is looked at but its number."""
    return b"".join(_correlated(varint(item.correlation_id), _OVERLOADED) for item in message.requests)


def varint(number: int) -> bytes:
    """`number` >= 0 in base 128, least significant group first, a bit in each byte but the last set."""
    if number < _SHORT:
        return _VARINTS[number]
    return _LOW[number & _SHORT - 1] + varint(number >> 14)


def _hit(found: Found) -> tuple[int, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]:
    """The size of a serialised Hit, and its pieces: what changes, the head, the digests, what is between, the body."""
    lease, matched_strides, remaining_ms = found
    record = lease.publication.record
    digests, body = record.digests, record.body
    head, between, size = lease.head or _make_head(lease)
    matched = _VARINTS[matched_strides]
    # A negative number travels as its two's complement in 64 bits.
    remaining = varint(remaining_ms if remaining_ms >= 0 else remaining_ms + 2**64)
    state = _LAPSED if lease.lapsed or remaining_ms <= 0 else _LIVE
    size += 4 + len(matched) + len(remaining)
    return size, b"\x28", matched, b"\x30", state, b"\x38", remaining, head, digests, between, body


def _make_head(lease: HeldLease) -> tuple[bytes, bytes, int]:
    """What never changes while the lease is held: up to the digests, between them and the body, the size of it all."""
    publication, engine = lease.publication, lease.holder.engine
    hit = pb.Hit(
        lease_id=publication.lease_id,
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        conversation=publication.conversation or "",
        traceparent=publication.traceparent,
    )
    record = publication.record
    digests, between = b"\x0a" + varint(len(record.digests)), b"\x12" + varint(len(record.body))
    size = len(digests) + len(record.digests) + len(between) + len(record.body)
    head = hit.SerializeToString() + b"\x22" + varint(size)
    lease.head = head + digests, between, len(head) + size
    return lease.head


def _correlated(correlation_id: bytes, response: bytes) -> bytes:
    answer = b"\x08%b\x12%b%b" % (correlation_id, varint(len(response)), response)
    return b"\x0a" + varint(len(answer)) + answer
