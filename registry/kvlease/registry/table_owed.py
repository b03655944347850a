"""Ends that somebody asked for and that the lender has yet to confirm: it still holds the lease, for all we know.

Pure. The store keeps them too, so that an end outlives every registry that knew of it: a lender that presents such a
lease is told again. An entry goes when the lender reports the end, or presents what it holds without the lease; the
store lets it go after its ttl. Of more than `limit` the oldest goes, as if its ttl were over.
Invariant: no lease in the table is owed its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvlease.registry.table_changes import EndHeard, EndOwed
from kvlease.registry.values import EngineId, Incarnation, LeaseId

Lender = tuple[EngineId, Incarnation]


class OwedEnds:
    """Lease id -> the end, and each lender's."""

    __slots__ = ("_by_id", "_heard", "_limit", "_of")

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._by_id: OrderedDict[LeaseId, EndOwed] = OrderedDict()
        self._of: dict[Lender, dict[LeaseId, None]] = {}
        self._heard: OrderedDict[LeaseId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LeaseId]:
        return iter(self._by_id)

    def get(self, lease_id: LeaseId) -> EndOwed | None:
        return self._by_id.get(lease_id)

    def of(self, engine_id: EngineId, incarnation: Incarnation) -> tuple[LeaseId, ...]:
        """What this lender has yet to confirm."""
        return tuple(self._of.get((engine_id, incarnation), ()))

    def add(self, owed: EndOwed) -> None:
        """One more; the first word about a lease stays."""
        if owed.lease_id in self._by_id:
            return
        if len(self._by_id) >= self._limit:
            self.drop(next(iter(self._by_id)))
        self._by_id[owed.lease_id] = owed
        self._of.setdefault((owed.engine_id, owed.incarnation), {})[owed.lease_id] = None

    def drop(self, lease_id: LeaseId) -> None:
        """Nothing is owed any more. Unknown ids are no error."""
        owed = self._by_id.pop(lease_id, None)
        if owed is None:
            return
        lender = owed.engine_id, owed.incarnation
        of = self._of[lender]
        del of[lease_id]
        if not of:
            del self._of[lender]

    def confirmed(self, lease_id: LeaseId, engine_id: EngineId, incarnation: Incarnation) -> None:
        """This lender does not hold the lease; `take_heard` will tell the store. Others' leases are left alone."""
        owed = self._by_id.get(lease_id)
        if owed is not None and (owed.engine_id, owed.incarnation) == (engine_id, incarnation):
            self._heard[lease_id] = None

    @property
    def to_tell(self) -> bool:
        """Whether `take_heard` has something to say."""
        return bool(self._heard)

    def take_heard(self, limit: int) -> list[EndHeard]:
        """At most `limit` of the ends that were confirmed, for the store; they are owed no more."""
        heard: list[EndHeard] = []
        while self._heard and len(heard) < limit:
            lease_id, _ = self._heard.popitem(last=False)
            if lease_id in self._by_id:
                self.drop(lease_id)
                heard.append(EndHeard(lease_id=lease_id))
        return heard

    def check(self) -> None:
        """Raises AssertionError."""
        assert len(self._by_id) <= self._limit, "owed ends"
        of: dict[Lender, set[LeaseId]] = {}
        for lease_id, owed in self._by_id.items():
            assert owed.lease_id == lease_id, f"id of the end of {lease_id}"
            of.setdefault((owed.engine_id, owed.incarnation), set()).add(lease_id)
        assert {lender: set(ids) for lender, ids in self._of.items()} == of, "owed ends by lender"
