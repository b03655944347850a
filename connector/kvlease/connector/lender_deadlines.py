"""A lease as its lender holds it, and the order in which live leases are to be looked at.

Pure. A lease is looked at when it meets its deadline; one that may be renewed unasked, a little before.

Invariant: every live lease has an entry at the time at which it is to be looked at.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvlease.connector.loan import Loan
from kvlease.registry.values import LeaseId, LeaseState

RENEWED_WITH_LEFT: Final = 4
"""A self-renewing lender renews a lease when this part of its ttl is left (a quarter): nobody sees it lapse first."""
_STALE: Final = 64
"""Entries that may be stale beyond one for each lease before the heap is rebuilt: renewals have no end."""


@dataclass(slots=True)
class Held:
    """One lease."""

    loan: Loan
    blocks: tuple[int, ...]
    slot: int
    state: LeaseState
    deadline_ms: int
    limit_ms: int | None
    """No renewal moves the deadline past it; None: no limit."""
    reads: int
    """Of this lease and those of its conversation that it superseded."""
    self_renewing: bool
    wake_ms: int = 0
    """When it is looked at next: at its deadline, or before it if it may be renewed unasked."""


class Deadlines:
    """When to look at which of the live leases."""

    def __init__(self, held: Mapping[LeaseId, Held], ttl_ms: int) -> None:
        """`held`: all leases of the lender, as its owner changes them."""
        self._held = held
        self._ahead_ms = ttl_ms // RENEWED_WITH_LEFT
        self._heap: list[tuple[int, LeaseId]] = []
        """An entry is stale if its lease is gone, not live, or is looked at another time."""

    def next(self) -> Held | None:
        """The live lease to be looked at next; stale entries before it are dropped."""
        while self._heap:
            wake_ms, lease_id = self._heap[0]
            held = self._held.get(lease_id)
            if held is not None and held.wake_ms == wake_ms and held.state is LeaseState.LIVE:
                return held
            heapq.heappop(self._heap)
        return None

    def schedule(self, held: Held, *, ahead: bool) -> None:
        """A live lease has a new deadline; `ahead`: it may be renewed unasked before it."""
        held.wake_ms = held.deadline_ms
        if ahead and held.self_renewing and held.deadline_ms != held.limit_ms:
            held.wake_ms -= self._ahead_ms
        heapq.heappush(self._heap, (held.wake_ms, held.loan.lease_id))
        if len(self._heap) > 2 * len(self._held) + _STALE:
            self._heap = [(h.wake_ms, i) for i, h in self._held.items() if h.state is LeaseState.LIVE]
            heapq.heapify(self._heap)

    def check(self, most_leases: int) -> None:
        """Recounts; raises AssertionError on a difference. For tests and the simulation."""
        assert len(self._heap) <= 2 * most_leases + _STALE + 1, "stale deadlines pile up"
        due = {(h.wake_ms, i) for i, h in self._held.items() if h.state is LeaseState.LIVE}
        assert due.issubset(self._heap), "a live lease has no deadline entry"
