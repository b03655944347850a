"""What `kvlease bench` lends and asks: leases of realistic size, of an engine that there is not, and what finds them.

Pure. Digests and bodies are random bytes of the right length: a registry compares the first and never decodes the
second. Invariant: no two leases share a digest, a conversation or an id, so each question has one right answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from kvlease.registry.values import (
    DIGEST_BYTES,
    FINGERPRINT_BYTES,
    INCARNATION_BYTES,
    MAX_DIGESTS,
    ConversationId,
    Engine,
    EngineId,
    Fingerprint,
    Incarnation,
    LeaseId,
    OnDeadline,
    Publication,
    Record,
    ResolveQuery,
    TenantId,
)

STRIDE_TOKENS: Final = 64
BLOCK_TOKENS: Final = 16
MAX_TOKENS: Final = STRIDE_TOKENS * MAX_DIGESTS // 2
"""So that the prompt of the next turn, which is longer, has a chain within the limit."""
NEXT_TURN_STRIDES: Final = 4
"""How much longer the prompt is than what was lent."""
_BODY_BESIDE_BLOCKS: Final = 600
"""Ids, seal and the engine's transfer parameters."""
_BLOCK_ID_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A lease, and what the next turn of its conversation asks."""

    publication: Publication
    query: ResolveQuery

    @property
    def record_bytes(self) -> int:
        return len(self.publication.record.digests) + len(self.publication.record.body)


class Load:
    """Turns of one engine under one tenant."""

    def __init__(self, engine_id: EngineId, tenant: TenantId, *, tokens: int) -> None:
        """`tokens` a lease; only whole strides of them are lent, one at least."""
        self._random: Final = random.Random()
        self._tenant: Final = tenant
        self._strides: Final = max(1, min(tokens, MAX_TOKENS) // STRIDE_TOKENS)
        self._fingerprint: Final = self._random.randbytes(FINGERPRINT_BYTES)
        self.engine: Final = Engine(
            engine_id=engine_id,
            incarnation=Incarnation(self._random.randbytes(INCARNATION_BYTES)),
            version="kvlease bench: holds nothing",
            fingerprint=Fingerprint(hash=self._fingerprint),
        )

    @property
    def tokens(self) -> int:
        """That a lease covers."""
        return self._strides * STRIDE_TOKENS

    def turn(self, *, deadline_ms: int) -> Turn:
        """A new one. `deadline_ms` is on the lender's clock."""
        drawn = self._random.randbytes(16).hex()
        blocks = self.tokens // BLOCK_TOKENS
        digests = self._random.randbytes(DIGEST_BYTES * self._strides)
        conversation = ConversationId(f"bench-{drawn}")
        publication = Publication(
            lease_id=LeaseId(drawn),
            tenant=self._tenant,
            conversation=conversation,
            stride_tokens=STRIDE_TOKENS,
            block_count=blocks,
            size_bytes=0,
            deadline_ms=deadline_ms,
            on_deadline=OnDeadline.END,
            fingerprint_hash=self._fingerprint,
            record=Record(digests=digests, body=self._random.randbytes(_BLOCK_ID_BYTES * blocks + _BODY_BESIDE_BLOCKS)),
        )
        query = ResolveQuery(
            tenant=self._tenant,
            conversation=conversation,
            digests=digests + self._random.randbytes(DIGEST_BYTES * NEXT_TURN_STRIDES),
            stride_tokens=STRIDE_TOKENS,
            fingerprint_hash=self._fingerprint,
        )
        return Turn(publication=publication, query=query)
