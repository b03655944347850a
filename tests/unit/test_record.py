"""Records: what a lender wrote comes back as it was, and nothing else comes back at all.

Whatever bytes arrive, `decode` answers with a consistent content or raises RecordInvalid, and nothing else.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlease.connector.record import VERSION, RecordContent, RecordInvalid, decode, encode, record_hash
from kvlease.connector.seal import HASH_BYTES, SealRef
from kvlease.registry.values import DIGEST_BYTES, EngineId, Incarnation, LeaseId, Record, TenantId
from kvlease.v1 import registry_pb2 as pb

words = st.integers(1, (1 << 64) - 1)
seal_refs = st.builds(SealRef, pp_rank=st.integers(0, 7), tp_rank=st.integers(0, 7), address=words, value=words)


@st.composite
def contents(draw: st.DrawFn) -> tuple[RecordContent, bytes]:
    strides = draw(st.integers(1, 6))
    block_tokens = draw(st.sampled_from([1, 16, 32]))
    stride_tokens = block_tokens * draw(st.integers(1, 4))
    blocks = strides * stride_tokens // block_tokens
    group = st.lists(st.integers(0, (1 << 32) - 1), min_size=blocks, max_size=blocks).map(tuple)
    content = RecordContent(
        lease_id=LeaseId(draw(st.text(max_size=20))),
        engine_id=EngineId(draw(st.text(max_size=20))),
        incarnation=Incarnation(draw(st.binary(min_size=16, max_size=16))),
        fingerprint_hash=draw(st.binary(min_size=16, max_size=16)),
        tenant=TenantId(draw(st.text(max_size=20))),
        stride_tokens=stride_tokens,
        block_tokens=block_tokens,
        tokens=strides * stride_tokens,
        block_ids=tuple(draw(st.lists(group, min_size=1, max_size=3))),
        seals=tuple(draw(st.lists(seal_refs, min_size=1, max_size=4))),
        engine_params=draw(st.binary(max_size=40)),
    )
    return content, draw(st.binary(min_size=strides * DIGEST_BYTES, max_size=strides * DIGEST_BYTES))


CONTENT = RecordContent(
    lease_id=LeaseId("lease"),
    engine_id=EngineId("engine"),
    incarnation=Incarnation(b"i" * 16),
    fingerprint_hash=b"f" * 16,
    tenant=TenantId("t"),
    stride_tokens=32,
    block_tokens=16,
    tokens=64,
    block_ids=((1, 2, 3, 4),),
    seals=(SealRef(pp_rank=0, tp_rank=0, address=4096, value=9),),
    engine_params=b'{"remote_port": 1}',
)
DIGESTS = bytes(2 * DIGEST_BYTES)


@given(contents())
def test_what_is_encoded_comes_back(given: tuple[RecordContent, bytes]) -> None:
    content, digests = given
    record = encode(content, digests)
    assert record.digests == digests
    assert decode(record) == content
    assert encode(content, digests) == record, "the same content must have the same bytes, or its hash is nothing"


@given(st.binary(max_size=300), st.binary(max_size=80))
def test_garbage_is_refused_and_nothing_worse(body: bytes, digests: bytes) -> None:
    try:
        decode(Record(digests=digests, body=body))
    except RecordInvalid:
        return
    pytest.fail("garbage was taken for a record")


@given(contents(), st.data())
def test_a_record_cut_short_or_altered_is_refused_or_is_consistent(
    given: tuple[RecordContent, bytes], data: st.DataObject
) -> None:
    record = encode(*given)
    body = bytearray(record.body)
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body) - 1)) :]
    else:
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    altered = Record(digests=record.digests, body=bytes(body))
    assert record_hash(altered) != record_hash(record)
    try:
        content = decode(altered)
    except RecordInvalid:
        return
    blocks = content.tokens // content.block_tokens
    assert content.tokens == len(record.digests) // DIGEST_BYTES * content.stride_tokens
    assert all(len(group) == blocks for group in content.block_ids)
    assert content.seals
    assert all(seal.address and seal.value for seal in content.seals)


@pytest.mark.parametrize(
    "content",
    [
        replace(CONTENT, tokens=96),
        replace(CONTENT, tokens=0),
        replace(CONTENT, block_tokens=0),
        replace(CONTENT, stride_tokens=0),
        replace(CONTENT, stride_tokens=40),
        replace(CONTENT, block_ids=()),
        replace(CONTENT, block_ids=((1, 2, 3),)),
        replace(CONTENT, block_ids=((1, 2, 3, 4), (5,))),
        replace(CONTENT, seals=()),
        replace(CONTENT, seals=(SealRef(pp_rank=0, tp_rank=0, address=0, value=9),)),
        replace(CONTENT, seals=(SealRef(pp_rank=0, tp_rank=0, address=64, value=0),)),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(content: RecordContent) -> None:
    assert decode(encode(CONTENT, DIGESTS)) == CONTENT
    with pytest.raises(RecordInvalid):
        decode(encode(content, DIGESTS))


@pytest.mark.parametrize("digests", [b"", b"x" * 15, b"x" * 33, b"x" * 48])
def test_a_chain_that_does_not_fit_is_refused(digests: bytes) -> None:
    with pytest.raises(RecordInvalid):
        decode(encode(CONTENT, digests))


def test_another_version_is_refused() -> None:
    body = pb.RecordBody.FromString(encode(CONTENT, DIGESTS).body)
    body.version = VERSION + 1
    with pytest.raises(RecordInvalid, match="version"):
        decode(Record(digests=DIGESTS, body=body.SerializeToString()))


def test_block_ids_are_little_endian_words_on_the_wire() -> None:
    body = pb.RecordBody.FromString(encode(replace(CONTENT, block_ids=((1, 2, 3, 258),)), DIGESTS).body)
    assert body.block_ids[0] == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 2, 1, 0, 0])


def test_the_hash_covers_both_parts_and_where_one_ends() -> None:
    record = encode(CONTENT, DIGESTS)
    assert len(record_hash(record)) == HASH_BYTES
    other = encode(replace(CONTENT, lease_id=LeaseId("other")), DIGESTS)
    moved = Record(digests=record.digests + record.body[:16], body=record.body[16:])
    mixed = Record(digests=b"d" * len(DIGESTS), body=record.body)
    assert len({record_hash(r) for r in (record, other, moved, mixed)}) == 4
