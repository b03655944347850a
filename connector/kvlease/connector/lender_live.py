"""The live leases of a lender: how many blocks they hold, in all and by tenant, and whose loss is the cheapest.

Pure. The cheapest loss is the lease that has not been used for longest (made, renewed or read); one of a conversation
that borrowers have read before has a head start. A count of reads as such would keep conversations that are over.

Invariant: a lease is here exactly while it is live; sums are those of the leases here.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvlease.connector.lender_blocks import HeldBlocks
from kvlease.registry.values import LeaseId, TenantId

Blocks = tuple[tuple[int, ...], ...]
"""Of one lease: its block ids, per KV group."""
HEAD_START_MS: Final = 120_000
"""Of a lease whose conversation is known to come back: the median pause between two turns of a chat."""
_STALE: Final = 64
"""Entries of a heap that may be stale beyond one for each lease before it is rebuilt."""


class Loss(NamedTuple):
    """What is lost with a lease; the smallest goes first. A tuple, since heaps compare many of them within a step."""

    used_ms: int
    """When it was used last, with its head start."""
    lease_id: LeaseId


@dataclass(slots=True)
class _Live:
    tenant: TenantId
    blocks: Blocks
    loss: Loss


class _Heap:
    """Losses, the smallest first. An entry is stale if its lease is gone or has another loss by now."""

    def __init__(self) -> None:
        self.entries: list[Loss] = []
        self.leases = 0
        self.held = HeldBlocks()

    def first(self, leases: dict[LeaseId, _Live]) -> Loss | None:
        while self.entries:
            loss = self.entries[0]
            live = leases.get(loss.lease_id)
            if live is not None and live.loss == loss:
                return loss
            heapq.heappop(self.entries)
        return None

    def push(self, loss: Loss, leases: dict[LeaseId, _Live]) -> None:
        heapq.heappush(self.entries, loss)
        if len(self.entries) > 2 * self.leases + _STALE:
            self.entries = [x for x in set(self.entries) if x.lease_id in leases and leases[x.lease_id].loss == x]
            heapq.heapify(self.entries)


class LiveLeases:
    """All live leases of one lender."""

    def __init__(self) -> None:
        self._leases: dict[LeaseId, _Live] = {}
        self._all = _Heap()
        self._tenants: dict[TenantId, _Heap] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def blocks(self, tenant: TenantId | None = None) -> int:
        """Blocks that leases hold, of all or of one tenant; those that several share count once."""
        heap = self._heap(tenant)
        return 0 if heap is None else heap.held.count

    def blocks_with(self, blocks: Blocks, tenant: TenantId | None = None) -> int:
        """The same with one more lease."""
        heap = self._heap(tenant)
        return sum(map(len, blocks)) if heap is None else heap.held.count + heap.held.more(blocks)

    def add(self, lease_id: LeaseId, tenant: TenantId, blocks: Blocks, *, reads: int, now_ms: int) -> None:
        loss = _loss(lease_id, reads, now_ms)
        self._leases[lease_id] = _Live(tenant, blocks, loss)
        for heap in (self._all, self._tenants.setdefault(tenant, _Heap())):
            heap.leases += 1
            heap.held.add(blocks)
            heap.push(loss, self._leases)

    def drop(self, lease_id: LeaseId) -> None:
        live = self._leases.pop(lease_id)
        own = self._tenants[live.tenant]
        for heap in (self._all, own):
            heap.leases -= 1
            heap.held.drop(live.blocks)
        if not own.leases:
            del self._tenants[live.tenant]

    def used(self, lease_id: LeaseId, *, reads: int, now_ms: int) -> None:
        """The lease was renewed, or read: `reads` in all."""
        live, loss = self._leases[lease_id], _loss(lease_id, reads, now_ms)
        if loss == live.loss:
            return
        live.loss = loss
        for heap in (self._all, self._tenants[live.tenant]):
            heap.push(live.loss, self._leases)

    def cheapest(self, tenant: TenantId | None = None) -> LeaseId | None:
        """The lease to lose first, of all or of one tenant; None if there is none."""
        heap = self._heap(tenant)
        loss = None if heap is None else heap.first(self._leases)
        return None if loss is None else loss.lease_id

    def _heap(self, tenant: TenantId | None) -> _Heap | None:
        return self._all if tenant is None else self._tenants.get(tenant)

    def check(self) -> None:
        """Recounts; raises AssertionError on a difference. For tests and the simulation."""
        for tenant, heap in [(None, self._all), *self._tenants.items()]:
            mine = [live for live in self._leases.values() if tenant in (None, live.tenant)]
            assert heap.leases == len(mine)
            heap.held.check(group for live in mine for group in live.blocks)
            assert {live.loss for live in mine} <= set(heap.entries), "a live lease has no entry"


def _loss(lease_id: LeaseId, reads: int, now_ms: int) -> Loss:
    return Loss(now_ms + (HEAD_START_MS if reads else 0), lease_id)
