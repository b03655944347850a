"""The store that replicas share, in virtual time: etcd's rules about keys, revisions, leases, history and compaction.

One order for all: a transaction is one revision, and takes effect at one instant; when each replica hears of it is not
decided here. The store never pauses; replicas lose contact with it (`store.py`). It may forget, as an etcd does that
was restored from a snapshot: then it has another `history`.
Invariant: the events of each revision, in order, lead from what there was to what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kvlease.etcd import DeleteOp, Event, EventKind, KeyValue, LeaseId, Op, PutOp
from kvlease.etcd.values import Revision

from tests.sim.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One revision, and when it came to be."""

    revision: int
    at_ms: int
    events: tuple[Event, ...]


@dataclass(slots=True, kw_only=True)
class _Lease:
    ttl_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    kvs: dict[bytes, KeyValue]
    revision: int
    leases: dict[LeaseId, int]


class Watcher(Protocol):
    """Who wants to hear of everything from some revision on."""

    def offer(self, entry: Entry) -> None: ...

    def compacted(self) -> None:
        """What has not arrived yet is not kept any more."""

    def restored(self) -> None:
        """There is another history now."""


class LeaseOver(Exception):
    """The transaction names a lease that is over; nothing was done."""


class Etcd:
    """All its members as one: what they agreed on."""

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self.kvs: dict[bytes, KeyValue] = {}
        self.revision = 1
        self.history = 0
        """Another one after a restore; revisions of two histories have nothing to do with each other."""
        self.history_since_ms = 0
        self.log: list[Entry] = []
        """Since the first revision; a compaction keeps watchers from it, not the judge."""
        self.watchers: list[Watcher] = []
        self.expiries = 0
        self._leases: dict[LeaseId, _Lease] = {}
        self._unkept: Final[set[LeaseId]] = set()
        self._saved: _Saved | None = None

    # -- keys -----------------------------------------------------------------------------------------------------

    def version(self, key: bytes) -> int:
        known = self.kvs.get(key)
        return 0 if known is None else known.version

    def transact(self, operations: Sequence[Op]) -> None:
        """All of it, in one revision. Raises LeaseOver."""
        if any(isinstance(x, PutOp) and x.lease and x.lease not in self._leases for x in operations):
            raise LeaseOver
        revision = Revision(self.revision + 1)
        events: list[Event] = []
        for operation in operations:
            if isinstance(operation, PutOp):
                events.append(self._put(operation, revision))
            elif isinstance(operation, DeleteOp) and self.kvs.pop(operation.key, None) is not None:
                events.append(_deleted(operation.key, revision))
        self._keep(revision, events)

    def everything(self) -> tuple[int, tuple[KeyValue, ...]]:
        """The revision, and all keys as of it, by name."""
        return self.revision, tuple(self.kvs[key] for key in sorted(self.kvs))

    def first_after(self, revision: int) -> Entry | None:
        """The first entry later than this revision."""
        if revision >= self.revision or not self.log:
            return None
        return self.log[max(0, revision + 1 - self.log[0].revision)]

    # -- leases ---------------------------------------------------------------------------------------------------

    def keep_alive(self, lease: LeaseId) -> bool:
        """Whether there is still such a lease."""
        known = self._leases.get(lease)
        if known is None:
            return False
        known.until_ms = self._world.now_ms + known.ttl_ms
        return True

    def grant(self, lease: LeaseId, ttl_ms: int, *, unkept: bool = False) -> None:
        """A lease that is there already is kept alive instead. `unkept`: it runs out by itself, and not before."""
        if unkept:
            self._unkept.add(lease)
        if self.keep_alive(lease):
            return
        self._leases[lease] = _Lease(ttl_ms=ttl_ms, until_ms=self._world.now_ms + ttl_ms)
        self._watch_lease(lease)

    def expire_one(self) -> None:
        """Some lease runs out although somebody keeps it: a new leader lost count, or an operator revoked it."""
        if kept := self._leases.keys() - self._unkept:
            self._expire(self._world.rng.choice(sorted(kept)))

    def _watch_lease(self, lease: LeaseId) -> None:
        known = self._leases[lease]
        self._world.hardware(known.until_ms - self._world.now_ms, lambda: self._look(lease, known))

    def _look(self, lease: LeaseId, known: _Lease) -> None:
        if self._leases.get(lease) is not known:
            return
        if known.until_ms > self._world.now_ms:
            self._watch_lease(lease)
        else:
            self._expire(lease)

    def _expire(self, lease: LeaseId) -> None:
        del self._leases[lease]
        self.expiries += 1
        keys = sorted(key for key, kv in self.kvs.items() if kv.lease == lease)
        if not keys:
            return
        revision = Revision(self.revision + 1)
        for key in keys:
            del self.kvs[key]
        self._keep(revision, [_deleted(key, revision) for key in keys])

    # -- history --------------------------------------------------------------------------------------------------

    def compact(self) -> None:
        """Watchers that lag behind have to load everything anew."""
        for watcher in self.watchers:
            watcher.compacted()

    def save(self) -> None:
        """Take a snapshot."""
        leases = {lease: known.ttl_ms for lease, known in self._leases.items()}
        self._saved = _Saved(kvs=dict(self.kvs), revision=self.revision, leases=leases)

    def restore(self) -> None:
        """Go back to the snapshot, if there is one: what came later never was. Every lease has its whole time again."""
        saved = self._saved
        if saved is None:
            return
        self.kvs, self.revision = dict(saved.kvs), saved.revision
        self.log = [entry for entry in self.log if entry.revision <= saved.revision]
        self._leases = {}
        for lease, ttl_ms in saved.leases.items():
            self.grant(lease, ttl_ms)
        self.history += 1
        self.history_since_ms = self._world.now_ms
        watchers, self.watchers = self.watchers, []
        for watcher in watchers:
            watcher.restored()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _put(self, put: PutOp, revision: Revision) -> Event:
        known = self.kvs.get(put.key)
        if known is None:
            kv = KeyValue(
                key=put.key,
                value=put.value,
                create_revision=revision,
                mod_revision=revision,
                version=1,
                lease=put.lease,
            )
        else:
            version = known.version + 1
            kv = replace(known, value=put.value, mod_revision=revision, version=version, lease=put.lease)
        self.kvs[put.key] = kv
        return Event(kind=EventKind.PUT, kv=kv, previous=None)

    def _keep(self, revision: Revision, events: Sequence[Event]) -> None:
        if not events:
            return
        entry = Entry(revision=revision, at_ms=self._world.now_ms, events=tuple(events))
        self.revision = revision
        self.log.append(entry)
        for watcher in self.watchers:
            watcher.offer(entry)


def _deleted(key: bytes, revision: Revision) -> Event:
    kv = KeyValue(key=key, value=b"", create_revision=Revision(0), mod_revision=revision, version=0, lease=LeaseId(0))
    return Event(kind=EventKind.DELETE, kv=kv, previous=None)
