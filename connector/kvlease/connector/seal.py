"""The seal: a word in the lender's registered memory that says a lease's blocks are untouched.

Pure: the layout of a slot and the verdict on what was read from one. Where the table lives is `seal_table.py`.

A slot has 32 bytes: a 64-bit value (little-endian), then 24 bytes of record hash. The value is written when the lease's
blocks are pinned, the hash before its record is published; broken by writing 0 to the value. Values never repeat within
an incarnation, so a slot used again cannot be mistaken: a reader that finds the value it expects read the slot before
it was broken, whatever the hash bytes beside it were.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

VALUE_BYTES: Final = 8
HASH_BYTES: Final = 24
SLOT_BYTES: Final = VALUE_BYTES + HASH_BYTES
HEADER_BYTES: Final = 64
BROKEN: Final = 0
_VALUE: Final = struct.Struct("<Q")
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SealRef:
    """Where one lender rank keeps the seal of a lease, and the value that says whole."""

    pp_rank: int
    tp_rank: int
    address: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a borrower must find in one rank's slot after its READ."""

    seal: SealRef
    record_hash: bytes


class SealVerdict(StrEnum):
    WHOLE = "whole"
    BROKEN = "broken"
    OTHER_RECORD = "other_record"


def verdict(proof: Proof, slot: bytes) -> SealVerdict:
    """What the 32 bytes of a slot, read after the blocks, say about them."""
    if len(slot) != SLOT_BYTES:
        return SealVerdict.BROKEN
    if _VALUE.unpack_from(slot)[0] != proof.seal.value:
        return SealVerdict.BROKEN
    if slot[VALUE_BYTES:] != proof.record_hash:
        return SealVerdict.OTHER_RECORD
    return SealVerdict.WHOLE


def pack_value(value: int) -> bytes:
    return _VALUE.pack(value)


def next_value(value: int) -> int:
    """The value after `value`: never 0, and back to a used one only after 2**64 leases."""
    return (value + 1) & _MASK or 1


def slot_offset(slot: int) -> int:
    """Where slot number `slot` begins in the table, in bytes from its start."""
    return HEADER_BYTES + slot * SLOT_BYTES


def table_bytes(slots: int) -> int:
    return HEADER_BYTES + slots * SLOT_BYTES
