"""What a lender is asked to lend, and the terms on which it does.

Values only: what becomes of them is decided in `lender.py`. Durations are milliseconds of the lender's clock.
Invariant: terms hold for an incarnation; nothing of them changes while a lease is out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlease.connector.digests import Chain
from kvlease.registry.values import ConversationId, EngineId, Incarnation, LeaseId, OnDeadline, TenantId


class LoanRefused(ValueError):
    """This loan cannot be made; nothing was changed."""


class OverQuota(LoanRefused):
    """The loan alone needs more than its tenant's share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """Where one rank's seal table begins, in that rank's address space."""

    pp_rank: int
    tp_rank: int
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LenderTerms:
    """What does not change during an incarnation."""

    engine_id: EngineId
    incarnation: Incarnation
    fingerprint_hash: bytes
    block_tokens: int
    stride_tokens: int
    block_bytes: int
    """KV bytes of one block, all ranks together; 0 if unknown."""
    tables: tuple[RankTable, ...]
    slots: int
    """Leases at most: one slot of the seal table each."""
    max_blocks: int
    """Blocks that live leases may hold; those that several share count once."""
    ttl_ms: int = 480_000
    max_lifetime_ms: int = 0
    """From a lease's publish to its last possible deadline, whatever is asked; 0: as long as somebody renews it."""
    on_deadline: OnDeadline = OnDeadline.LAPSE
    renewable: bool = False
    self_renewing: bool = False
    """Elastic: leases are renewed at their deadline without being asked, while enough blocks are free."""
    keep_free_blocks: int = 0
    """Below so many free blocks, live leases give theirs back, the cheapest loss first, and none renews itself."""
    tenant_blocks: int = 0
    """Blocks that live leases of one tenant may hold; 0: as many as all may."""
    blocks_of_tenants: Mapping[TenantId, int] = field(default_factory=dict)
    """The same for tenants that have a limit of their own."""

    def blocks_for(self, tenant: TenantId) -> int:
        """Blocks that live leases of this tenant may hold."""
        own = self.blocks_of_tenants.get(tenant, self.tenant_blocks)
        return min(own, self.max_blocks) if own else self.max_blocks


class Loan(NamedTuple):
    """A finished turn to lend: whole strides of it, and the blocks they lie in. A tuple, since it is made
    within an engine's step."""

    lease_id: LeaseId
    tenant: TenantId
    conversation: ConversationId | None
    chain: Chain
    block_ids: tuple[tuple[int, ...], ...]
    engine_params: bytes
    traceparent: str = ""
    ttl_ms: int | None = None
    on_deadline: OnDeadline | None = None
