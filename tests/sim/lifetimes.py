"""How long a lender keeps its leases' blocks, judged from what it does and against its longest lifetime alone.

Stands outside like the judge: it is told what the lender announces and gives back, and compares with the instant of the
loan. Invariant: a lender that keeps its terms is never found out, however late it looks at its deadlines for a pause.
"""

from __future__ import annotations

from typing import Final

from kvlease.connector.lender_effects import Announce, AnnounceEnded, AnnounceLapsed, AnnounceRenewed, RefuseRenewal
from kvlease.registry.values import LeaseId

from tests.sim.judge import Fault, Judge
from tests.sim.lender_link import Told
from tests.sim.world import Party

_GRACE_MS: Final = 20
"""Deadlines are looked at one tick after another, a few leases at a time."""


class Lifetimes:
    """One incarnation's leases. Instants are the world's."""

    def __init__(self, judge: Judge, lender: Party, limit_ms: int) -> None:
        """`limit_ms` 0: no limit."""
        self._judge: Final = judge
        self._lender: Final = lender
        self._limit_ms: Final = limit_ms
        self._lent: dict[LeaseId, tuple[int, int]] = {}
        """When, and how long the lender had been paused by then."""
        self._pinned: set[LeaseId] = set()
        self._deadlines_ms: dict[LeaseId, int] = {}

    def hear(self, told: Told) -> None:
        """What the lender announces, at the instant at which it happened."""
        counts = self._judge.counts
        match told:
            case Announce(draft=draft):
                self.lent(draft.lease_id, draft.deadline_ms - self._lender.clock_offset_ms)
            case AnnounceEnded(lease_id=lease_id, reason=reason):
                counts[f"ended_{reason.value}"] += 1
                self.given_back(lease_id)
                self.forget(lease_id)
            case AnnounceRenewed(lease_id=lease_id, deadline_ms=deadline_ms):
                counts["renewed"] += 1
                self.renewed(lease_id, deadline_ms - self._lender.clock_offset_ms)
            case RefuseRenewal(status=status):
                counts[f"renewal_{status.value}"] += 1
            case AnnounceLapsed(lease_id=lease_id):
                counts["lapsed"] += 1
                self.given_back(lease_id)

    def lent(self, lease_id: LeaseId, deadline_ms: int) -> None:
        self._lent[lease_id] = self._judge.now_ms, self._lender.paused_ms
        self._pinned.add(lease_id)
        self._check_deadline(lease_id, deadline_ms)

    def renewed(self, lease_id: LeaseId, deadline_ms: int) -> None:
        self._pinned.add(lease_id)
        self._check_deadline(lease_id, deadline_ms)

    def given_back(self, lease_id: LeaseId) -> None:
        """Its blocks are the pool's again, if they were not already."""
        if lease_id not in self._pinned:
            return
        self._pinned.remove(lease_id)
        lent_ms, paused_ms = self._lent[lease_id]
        kept_ms = self._judge.now_ms - lent_ms - (self._lender.paused_ms - paused_ms)
        if self._limit_ms:
            held = kept_ms <= self._limit_ms + _GRACE_MS
            self._judge.expect(held, Fault.OUTLIVED, f"{lease_id} was kept for {kept_ms} ms")

    def forget(self, lease_id: LeaseId) -> None:
        self._lent.pop(lease_id, None)
        self._deadlines_ms.pop(lease_id, None)

    @property
    def held(self) -> set[LeaseId]:
        """Leases that have not ended."""
        return set(self._lent)

    def overdue(self, lease_id: LeaseId, *, in_ms: int = 0) -> bool:
        """Whether its deadline has passed, or will have in a while."""
        return self._deadlines_ms.get(lease_id, 0) <= self._judge.now_ms + in_ms

    def _check_deadline(self, lease_id: LeaseId, deadline_ms: int) -> None:
        self._deadlines_ms[lease_id] = deadline_ms
        if self._limit_ms:
            life_ms = deadline_ms - self._lent[lease_id][0]
            held = life_ms <= self._limit_ms
            self._judge.expect(held, Fault.OUTLIVED, f"{lease_id} is to be kept for {life_ms} ms")
