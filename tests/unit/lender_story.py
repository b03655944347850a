"""Lenders and loans for the lease holder's tests: small, with two ranks, four slots and twelve blocks.

Builders only, no assertions. A loan's text has one letter for each stride, so that prefixes can be seen.
"""

from __future__ import annotations

from dataclasses import replace

from kvlease.connector.digests import Chain
from kvlease.connector.lender import LeaseHolder
from kvlease.connector.lender_effects import AnnounceEnded, Effect, WriteSeal
from kvlease.connector.loan import LenderTerms, Loan, RankTable
from kvlease.registry.values import (
    DIGEST_BYTES,
    ConversationId,
    EndReason,
    EngineId,
    Incarnation,
    LeaseId,
    TenantId,
)

TTL_MS = 1_000
TERMS = LenderTerms(
    engine_id=EngineId("lender"),
    incarnation=Incarnation(b"i" * 16),
    fingerprint_hash=b"f" * 16,
    block_tokens=16,
    stride_tokens=32,
    block_bytes=10,
    tables=(RankTable(pp_rank=0, tp_rank=0, address=4_096), RankTable(pp_rank=0, tp_rank=1, address=8_192)),
    slots=4,
    max_blocks=12,
    ttl_ms=TTL_MS,
    renewable=True,
)


def holder(**changes: object) -> LeaseHolder:
    return LeaseHolder(replace(TERMS, **changes), first_value=500)  # type: ignore[arg-type]  # the cases' own fields


def chain(text: str) -> Chain:
    """One stride for each letter; a digest covers all letters before it."""
    return Chain.of(
        b"".join(text[: n + 1].encode().ljust(DIGEST_BYTES, b".")[-DIGEST_BYTES:] for n in range(len(text)))
    )


def loan(
    name: str, text: str = "ab", *, first: int = 1, conversation: str | None = "c", ttl_ms: int | None = None
) -> Loan:
    return Loan(
        lease_id=LeaseId(name),
        tenant=TenantId("t"),
        conversation=None if conversation is None else ConversationId(conversation),
        chain=chain(text),
        block_ids=(tuple(range(first, first + 2 * len(text))),),
        engine_params=b"{}",
        ttl_ms=ttl_ms,
    )


def kinds(effects: list[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def ends(effects: list[Effect]) -> list[tuple[str, EndReason]]:
    return [(effect.lease_id, effect.reason) for effect in effects if isinstance(effect, AnnounceEnded)]


def seal(effects: list[Effect]) -> WriteSeal:
    (found,) = [effect for effect in effects if isinstance(effect, WriteSeal)]
    return found
