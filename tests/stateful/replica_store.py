"""A store for tests of replicas, as plain as can be: keys, values, and the order in which they came to be.

No expectations here. What is written takes effect at once and for all; when each replica hears of it, and whether keys
expire or the history is lost, is decided by the test.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvlease.registry.table import LeaseTable
from kvlease.registry.table_changes import (
    Batch,
    EndHeard,
    EndOwed,
    EngineGone,
    EnginePut,
    LeaseGone,
    LeasePut,
    StoreChange,
    StoredEngine,
    StoredView,
)
from kvlease.registry.table_limits import TableLimits
from kvlease.registry.values import EndReason, EngineId, Incarnation, LeaseId


@dataclass
class Entry:
    """One place in the store's order."""

    writer: int | None
    batch: Batch


@dataclass
class Store:
    """Keys and values, and the order in which they came to be."""

    log: list[Entry] = field(default_factory=list)
    engines: dict[EngineId, tuple[int, EnginePut]] = field(default_factory=dict)
    leases: dict[LeaseId, LeasePut] = field(default_factory=dict)
    owed: dict[LeaseId, EndOwed] = field(default_factory=dict)
    saved: tuple[dict[EngineId, tuple[int, EnginePut]], dict[LeaseId, LeasePut], dict[LeaseId, EndOwed]] = field(
        default_factory=lambda: ({}, {}, {})
    )

    def commit(self, writer: int, changes: tuple[StoreChange, ...]) -> None:
        for change in changes:
            match change:
                case EnginePut():
                    self.engines[change.engine.engine_id] = (writer, change)
                case EngineGone():
                    known = self.engines.get(change.engine_id)
                    if known is not None and known[1].engine.incarnation == change.incarnation:
                        del self.engines[change.engine_id]
                case LeasePut():
                    self.leases[change.publication.lease_id] = change
                case LeaseGone():
                    self.leases.pop(change.lease_id, None)
                case EndOwed():
                    self.owed[change.lease_id] = change
                case EndHeard():
                    self.owed.pop(change.lease_id, None)
                case _:
                    pass
        self.log.append(Entry(writer, Batch(changes=changes)))

    def save(self) -> None:
        """Take a snapshot."""
        self.saved = dict(self.engines), dict(self.leases), dict(self.owed)

    def restore(self) -> None:
        """Go back to the snapshot. Everybody has to load."""
        engines, leases, owed = self.saved
        self.engines, self.leases, self.owed = dict(engines), dict(leases), dict(owed)

    def expire(self, engine_id: EngineId) -> None:
        """The engine's keys go all at once, as on an etcd lease."""
        known = self.engines.pop(engine_id, None)
        if known is None:
            return
        incarnation = known[1].engine.incarnation
        gone: list[StoreChange] = [EngineGone(engine_id=engine_id, incarnation=incarnation)]
        for lease_id, put in list(self.leases.items()):
            if put.engine_id == engine_id and put.incarnation == incarnation:
                del self.leases[lease_id]
                gone.append(LeaseGone(lease_id=lease_id, reason=EndReason.LENDER_LOST))
        self.log.append(Entry(None, Batch(changes=tuple(gone), expired=True)))

    def expire_dead(self, living: set[Incarnation]) -> None:
        """Nobody keeps the keys of an incarnation that is no more."""
        gone = [k for k, x in self.leases.items() if x.incarnation not in living]
        for lease_id in gone:
            del self.leases[lease_id]
        changes = tuple(LeaseGone(lease_id=x, reason=EndReason.LENDER_LOST) for x in gone)
        self.log.append(Entry(None, Batch(changes=changes, expired=True)))

    def view(self, reader: int) -> StoredView:
        engines = tuple(StoredEngine(put=put, own=writer == reader) for writer, put in self.engines.values())
        return StoredView(engines=engines, leases=tuple(self.leases.values()), owed=tuple(self.owed.values()))


class Replica:
    def __init__(self, number: int, store: Store, limits: TableLimits) -> None:
        self.number = number
        self.store = store
        self.table = LeaseTable(limits)
        self.queue: deque[StoreChange] = deque()
        self.seen = len(store.log)

    def behind(self) -> bool:
        return self.seen < len(self.store.log)
