"""Renewals that are on the way to a lender: who asked first, what was asked, when to give up.

Pure bookkeeping. Callers are joined: one push to the lender for all who ask about the same lease, and one settlement
for all of them.
Invariant: entries are in order of their give-up time.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvlease.registry.table_changes import Draft, RenewalSettled
from kvlease.registry.values import LeaseId, RenewStatus


class Renewals:
    """Lease id -> (longest ttl asked, when to give up, on our clock, whether another replica asked too)."""

    __slots__ = ("_pending", "_wait_ms")

    def __init__(self, *, wait_ms: int) -> None:
        self._wait_ms = wait_ms
        self._pending: dict[LeaseId, tuple[int, int, bool]] = {}

    def __iter__(self) -> Iterator[LeaseId]:
        return iter(self._pending)

    def ask(self, lease_id: LeaseId, ttl_ms: int, now_ms: int, *, elsewhere: bool = False) -> bool:
        """Whether the lender must be pushed: nobody has asked yet, or not for that long."""
        waiting = self._pending.get(lease_id)
        if waiting is None:
            self._pending[lease_id] = (ttl_ms, now_ms + self._wait_ms, elsewhere)
            return True
        # Whoever asked before waits no longer than before, so an entry that exists keeps its place and its time.
        self._pending[lease_id] = (max(ttl_ms, waiting[0]), waiting[1], elsewhere or waiting[2])
        return waiting[0] < ttl_ms

    def asked_elsewhere(self, lease_id: LeaseId) -> bool:
        """Whether another replica waits for the answer."""
        waiting = self._pending.get(lease_id)
        return waiting is not None and waiting[2]

    def settle(self, draft: Draft, lease_id: LeaseId, status: RenewStatus | None, remaining_ms: int) -> None:
        """Answer everyone who asked, if anyone did."""
        if self._pending and self._pending.pop(lease_id, None) is not None:
            draft.settled.append(RenewalSettled(lease_id=lease_id, status=status, remaining_ms=remaining_ms))

    def next_give_up_ms(self) -> int | None:
        return next(iter(self._pending.values()))[1] if self._pending else None

    def give_up(self, draft: Draft, now_ms: int) -> None:
        """Settle those whose lender stayed silent."""
        while self._pending:
            lease_id, (_, give_up_ms, _) = next(iter(self._pending.items()))
            if give_up_ms > now_ms:
                return
            self.settle(draft, lease_id, None, 0)

    def check(self) -> None:
        """Raises AssertionError."""
        give_ups = [give_up_ms for _, give_up_ms, _ in self._pending.values()]
        assert give_ups == sorted(give_ups), "order of renewals"
