"""What the model of `test_lender_machine.py` knows of leases and of the turns that they are made of.

Values, and who is to go first; what should happen to them is decided there. Invariant: a lease's limit never moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from hypothesis import strategies as st
from kvlease.connector.digests import Chain
from kvlease.connector.lender_effects import AnnounceEnded, Effect
from kvlease.connector.lender_live import HEAD_START_MS
from kvlease.connector.loan import LenderTerms, RankTable
from kvlease.registry.values import DIGEST_BYTES, EndReason, EngineId, Incarnation, LeaseId, OnDeadline, TenantId

TTL_MS: Final = 100
TERMS: Final = LenderTerms(
    engine_id=EngineId("lender"),
    incarnation=Incarnation(b"i" * 16),
    fingerprint_hash=b"f" * 16,
    block_tokens=8,
    stride_tokens=8,
    block_bytes=1,
    tables=(RankTable(pp_rank=0, tp_rank=0, address=4_096),),
    slots=6,
    max_blocks=24,
    ttl_ms=TTL_MS,
    keep_free_blocks=3,
)
BLOCKS: Final = 12
all_terms = st.builds(
    partial(replace, TERMS),
    slots=st.sampled_from([6, 2, 1]),
    max_blocks=st.sampled_from([2 * BLOCKS, 8, 4]),
    on_deadline=st.sampled_from([OnDeadline.LAPSE, OnDeadline.LAPSE, OnDeadline.END]),
    renewable=st.booleans(),
    max_lifetime_ms=st.sampled_from([0, 300, 110, 60]),
    self_renewing=st.booleans(),
    tenant_blocks=st.sampled_from([0, 5]),
)


def chain(text: str) -> Chain:
    """One stride for each letter; a digest covers all letters before it."""
    return Chain.of(b"".join(text[: n + 1].encode().rjust(DIGEST_BYTES, b".") for n in range(len(text))))


def ends(effects: Sequence[Effect]) -> list[tuple[LeaseId, EndReason]]:
    return [(effect.lease_id, effect.reason) for effect in effects if isinstance(effect, AnnounceEnded)]


@dataclass(slots=True)
class Lease:
    """What the model knows of one."""

    blocks: tuple[int, ...]
    text: str
    conversation: str | None
    deadline_ms: int
    limit_ms: int
    """No renewal moves the deadline past it."""
    tenant: TenantId
    used_ms: int
    reads: int = 0
    self_renewing: bool = False
    lapsed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Blocks that the engine holds for a request, and the tokens in them, a letter for each."""

    text: str
    blocks: tuple[int, ...]


Leases = Mapping[LeaseId, Lease]


def live(leases: Leases, tenant: TenantId | None = None) -> dict[LeaseId, Lease]:
    return {i: lease for i, lease in leases.items() if not lease.lapsed and tenant in (None, lease.tenant)}


def held(leases: Iterable[Lease]) -> int:
    """Blocks; those that several share count once."""
    return len({block for lease in leases for block in lease.blocks})


def by_deadline(leases: Leases) -> list[LeaseId]:
    return sorted(live(leases), key=lambda lease_id: (leases[lease_id].deadline_ms, lease_id))


def by_loss(leases: Leases, tenant: TenantId | None = None) -> list[LeaseId]:
    """Live leases, the cheapest loss first."""

    def loss(lease_id: LeaseId) -> tuple[int, LeaseId]:
        lease = leases[lease_id]
        return lease.used_ms + (HEAD_START_MS if lease.reads else 0), lease_id

    return sorted(live(leases, tenant), key=loss)


def cheapest(leases: Leases, blocks: int, tenant: TenantId | None = None) -> list[LeaseId]:
    """As many of them as it takes to give `blocks`; none if that is not a positive number."""
    gone: list[LeaseId] = []
    left = live(leases, tenant)
    most = held(left.values()) - blocks
    for lease_id in by_loss(leases, tenant):
        if held(left.values()) <= most:
            break
        gone.append(lease_id)
        del left[lease_id]
    return gone


def room(
    leases: Leases, lapse_order: Sequence[LeaseId], terms: LenderTerms, new: Lease
) -> list[tuple[LeaseId, EndReason]]:
    """Who ends, and why, so that one more lease fits."""
    gone: dict[LeaseId, EndReason] = {}
    left = dict(leases)

    def end(lease_ids: list[LeaseId], reason: EndReason) -> None:
        gone.update(dict.fromkeys(lease_ids, reason))
        for lease_id in lease_ids:
            del left[lease_id]

    if len(left) >= terms.slots:
        lapsed = [lease_id for lease_id in lapse_order if lease_id in left]
        end([lapsed[0] if lapsed else by_loss(left)[0]], EndReason.PRESSURE)
    if terms.blocks_for(new.tenant) < terms.max_blocks:
        while held([*live(left, new.tenant).values(), new]) > terms.blocks_for(new.tenant):
            end(by_loss(left, new.tenant)[:1], EndReason.QUOTA)
    while held([*live(left).values(), new]) > terms.max_blocks:
        end(by_loss(left)[:1], EndReason.PRESSURE)
    return list(gone.items())
