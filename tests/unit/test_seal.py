"""The seal: layout of a slot, values that never repeat, and a verdict that accepts nothing but both words.

Bytes only; where the table lives and how it is read are tested with `seal_table` and on real agents.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvlease.connector.seal import (
    BROKEN,
    HASH_BYTES,
    HEADER_BYTES,
    SLOT_BYTES,
    Proof,
    SealRef,
    SealVerdict,
    next_value,
    pack_value,
    slot_offset,
    table_bytes,
    verdict,
)

HASH = bytes(range(HASH_BYTES))
PROOF = Proof(seal=SealRef(pp_rank=0, tp_rank=0, address=64, value=77), record_hash=HASH)


def test_a_slot_with_both_words_is_whole() -> None:
    assert verdict(PROOF, pack_value(77) + HASH) is SealVerdict.WHOLE


def test_a_broken_or_reused_slot_is_broken() -> None:
    assert verdict(PROOF, pack_value(BROKEN) + HASH) is SealVerdict.BROKEN
    assert verdict(PROOF, pack_value(78) + HASH) is SealVerdict.BROKEN


def test_another_record_is_told_apart() -> None:
    assert verdict(PROOF, pack_value(77) + bytes(HASH_BYTES)) is SealVerdict.OTHER_RECORD


@given(st.binary(max_size=2 * SLOT_BYTES))
def test_nothing_else_is_ever_whole(slot: bytes) -> None:
    assert (verdict(PROOF, slot) is SealVerdict.WHOLE) == (slot == pack_value(77) + HASH)


@given(st.integers(0, SLOT_BYTES - 1), st.integers(0, 7))
def test_no_bit_of_a_slot_is_idle(index: int, bit: int) -> None:
    slot = bytearray(pack_value(77) + HASH)
    slot[index] ^= 1 << bit
    assert verdict(PROOF, bytes(slot)) is not SealVerdict.WHOLE


@given(st.integers(1, (1 << 64) - 1))
def test_a_value_is_followed_by_another_that_is_not_the_broken_one(value: int) -> None:
    assert next_value(value) not in (value, BROKEN)
    assert next_value(value) < 1 << 64


def test_values_begin_again_without_the_broken_one() -> None:
    assert next_value((1 << 64) - 1) == 1


@given(st.integers(1, 10_000))
def test_slots_lie_side_by_side_within_the_table(slots: int) -> None:
    assert slot_offset(0) == HEADER_BYTES
    assert slot_offset(slots) - slot_offset(slots - 1) == SLOT_BYTES
    assert slot_offset(slots - 1) + SLOT_BYTES == table_bytes(slots)
    assert slot_offset(slots) % 8 == 0, "a value that is not aligned may be read in halves"
