"""Leases and questions of realistic size: what a lender publishes for a turn, what a borrower asks for the next one.

Records are made by the connector's own encoder. Digests are random bytes: the registry only compares them. No I/O.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvlease.connector.record import RecordContent, encode
from kvlease.connector.seal import SealRef
from kvlease.registry.values import (
    DEFAULT_TENANT,
    DIGEST_BYTES,
    FINGERPRINT_BYTES,
    INCARNATION_BYTES,
    ConversationId,
    Engine,
    EngineId,
    Fingerprint,
    Incarnation,
    LeaseId,
    OnDeadline,
    Publication,
    ResolveQuery,
    TenantId,
)

STRIDE_TOKENS: Final = 64
BLOCK_TOKENS: Final = 16
BLOCK_BYTES: Final = 2 * 1024 * 1024
"""KV of 16 tokens of an 8B model with grouped-query attention in 16 bits."""
NEXT_TURN_STRIDES: Final = 4
"""How much longer the prompt of the next turn is than what was lent."""
SLOT_ADDRESS: Final = 0x7F00_0000_0040
TOKENS: Final = {"1k": 1_024, "8k": 8_192, "24k": 24_576}
"""Lengths of the leases measured, by the name in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A lease, and what the next turn of its conversation asks."""

    publication: Publication
    query: ResolveQuery


class Turns:
    """Makes turns of one lender; equal seeds make equal turns."""

    def __init__(self, engine: Engine, *, seed: int, deadline_ms: int, tenant: TenantId = DEFAULT_TENANT) -> None:
        """`deadline_ms`: on the lender's clock, for every lease."""
        self._tenant = tenant
        self._engine = engine
        self._random = random.Random(seed)
        self._deadline_ms = deadline_ms
        self._number = 0

    def make(self, tokens: int) -> Turn:
        self._number += 1
        strides = tokens // STRIDE_TOKENS
        blocks = tokens // BLOCK_TOKENS
        lease_id = LeaseId(self._random.randbytes(16).hex())
        digests = self._random.randbytes(strides * DIGEST_BYTES)
        conversation = ConversationId(f"{self._engine.engine_id}-{self._number}")
        params = {
            "remote_engine_id": self._engine.engine_id,
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "transfer_mode": "pull",
            "remote_request_id": f"kvl:{lease_id}",
        }
        record = encode(
            RecordContent(
                lease_id=lease_id,
                engine_id=self._engine.engine_id,
                incarnation=self._engine.incarnation,
                fingerprint_hash=self._engine.fingerprint.hash,
                tenant=self._tenant,
                stride_tokens=STRIDE_TOKENS,
                block_tokens=BLOCK_TOKENS,
                tokens=strides * STRIDE_TOKENS,
                block_ids=(tuple(array("H", self._random.randbytes(2 * blocks))),),
                seals=(
                    SealRef(pp_rank=0, tp_rank=0, address=0x7F00_0000_0040, value=self._random.getrandbits(63) | 1),
                ),
                engine_params=json.dumps(params).encode(),
            ),
            digests,
        )
        return Turn(
            publication=Publication(
                lease_id=lease_id,
                tenant=self._tenant,
                conversation=conversation,
                stride_tokens=STRIDE_TOKENS,
                block_count=blocks,
                size_bytes=blocks * BLOCK_BYTES,
                deadline_ms=self._deadline_ms,
                on_deadline=OnDeadline.LAPSE,
                fingerprint_hash=self._engine.fingerprint.hash,
                record=record,
            ),
            query=ResolveQuery(
                tenant=self._tenant,
                conversation=conversation,
                digests=digests + self._random.randbytes(NEXT_TURN_STRIDES * DIGEST_BYTES),
                stride_tokens=STRIDE_TOKENS,
                fingerprint_hash=self._engine.fingerprint.hash,
            ),
        )

    def many(self, tokens: int, count: int) -> Iterator[Turn]:
        return (self.make(tokens) for _ in range(count))


def engine(name: str, *, seed: int) -> Engine:
    """A lender to publish for. `seed` decides its incarnation."""
    source = random.Random(seed)
    return Engine(
        engine_id=EngineId(name),
        incarnation=Incarnation(source.randbytes(INCARNATION_BYTES)),
        fingerprint=Fingerprint(hash=bytes(range(FINGERPRINT_BYTES)), fields=(("model", "bench"),)),
    )
