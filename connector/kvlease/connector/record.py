"""The record of a lease: what the lender wrote, its encoding, and the hash that the seal holds.

Pure. The registry forwards a record byte for byte and never decodes it; borrowers decode it here and trust nothing in
it before the seal's hash has confirmed both of its parts.

Invariant: `decode(encode(c, d)) == c`, and a record that decodes is consistent in itself (counts, sizes, ranges).
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError
from kvlease.connector.seal import HASH_BYTES, SealRef
from kvlease.registry.values import DIGEST_BYTES, EngineId, Incarnation, LeaseId, Record, TenantId
from kvlease.v1 import registry_pb2 as pb

VERSION: Final = 1


class RecordInvalid(ValueError):
    """A record that cannot be what a lender wrote: the borrower treats it as a miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordContent:
    """What a record says. `block_ids` has one tuple per KV group, each block from position 0 on."""

    lease_id: LeaseId
    engine_id: EngineId
    incarnation: Incarnation
    fingerprint_hash: bytes
    tenant: TenantId
    stride_tokens: int
    block_tokens: int
    tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    seals: tuple[SealRef, ...]
    engine_params: bytes


def encode(content: RecordContent, digests: bytes) -> Record:
    """The record that a lender publishes for a lease."""
    body = pb.RecordBody(
        version=VERSION,
        lease_id=content.lease_id,
        engine_id=content.engine_id,
        incarnation=content.incarnation,
        fingerprint_hash=content.fingerprint_hash,
        tenant=content.tenant,
        stride_tokens=content.stride_tokens,
        block_tokens=content.block_tokens,
        tokens=content.tokens,
        block_ids=[_pack_ids(group) for group in content.block_ids],
        seals=[pb.Seal(pp_rank=s.pp_rank, tp_rank=s.tp_rank, address=s.address, value=s.value) for s in content.seals],
        engine_params=content.engine_params,
    )
    return Record(digests=digests, body=body.SerializeToString(deterministic=True))


def decode(record: Record) -> RecordContent:
    """What `record` says; raises RecordInvalid if it is not consistent in itself."""
    body = pb.RecordBody()
    try:
        body.ParseFromString(record.body)
    except DecodeError as error:
        raise RecordInvalid("the record's body is not a RecordBody") from error
    if body.version != VERSION:
        raise RecordInvalid(f"the record has version {body.version}, this borrower reads version {VERSION}")
    if len(record.digests) % DIGEST_BYTES or not record.digests:
        raise RecordInvalid(
            f"the digest chain has {len(record.digests)} bytes, not a positive multiple of {DIGEST_BYTES}"
        )
    strides = len(record.digests) // DIGEST_BYTES
    if not body.block_tokens or not body.stride_tokens or body.stride_tokens % body.block_tokens:
        raise RecordInvalid(f"strides of {body.stride_tokens} tokens do not hold whole blocks of {body.block_tokens}")
    if body.tokens != strides * body.stride_tokens:
        raise RecordInvalid(f"{strides} strides of {body.stride_tokens} tokens are not {body.tokens} tokens")
    blocks = body.tokens // body.block_tokens
    if not body.block_ids or any(len(group) != 4 * blocks for group in body.block_ids):
        raise RecordInvalid(f"each KV group must list {blocks} blocks")
    if not body.seals or any(not seal.address or not seal.value for seal in body.seals):
        raise RecordInvalid("the record names no seal, or one without address or value")
    return RecordContent(
        lease_id=LeaseId(body.lease_id),
        engine_id=EngineId(body.engine_id),
        incarnation=Incarnation(body.incarnation),
        fingerprint_hash=body.fingerprint_hash,
        tenant=TenantId(body.tenant),
        stride_tokens=body.stride_tokens,
        block_tokens=body.block_tokens,
        tokens=body.tokens,
        block_ids=tuple(_unpack_ids(group) for group in body.block_ids),
        seals=tuple(
            SealRef(pp_rank=s.pp_rank, tp_rank=s.tp_rank, address=s.address, value=s.value) for s in body.seals
        ),
        engine_params=body.engine_params,
    )


def record_hash(record: Record) -> bytes:
    """The 24 bytes that the seal holds beside its value: over both parts, their border included."""
    digest = hashlib.sha256(struct.pack("<Q", len(record.digests)))
    digest.update(record.digests)
    digest.update(record.body)
    return digest.digest()[:HASH_BYTES]


def _pack_ids(ids: tuple[int, ...]) -> bytes:
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack_ids(raw: bytes) -> tuple[int, ...]:
    packed = array("I")
    packed.frombytes(raw)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)
