"""Where changes of the table go before anyone is told of them, and the store for registries in one process: memory.

The table is the working copy; a store makes changes last and brings those of other replicas. It decides nothing.
Contract, checked on every store by one conformance suite: commits of one replica keep their order and happen once,
whatever failed on the way; a replica that follows sees everything at one moment, and after that every batch, its own
too, exactly once and in one order that is the same for all; or it gets Compacted and follows anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, Protocol, Self

from kvlease.registry.errors import Compacted
from kvlease.registry.table_changes import (
    AliasPut,
    Batch,
    EndHeard,
    EndOwed,
    EngineBeat,
    EngineGone,
    EnginePut,
    LeaseGone,
    LeasePut,
    StoreChange,
    StoredEngine,
    StoredView,
)
from kvlease.registry.values import Alias, EngineId, LeaseId, TenantId

MAX_BACKLOG: Final = 1_024
"""Batches that wait for a replica which is slow to take them; then it has to load everything again."""


@dataclass(slots=True, kw_only=True)
class Followed:
    """What there is, and then what comes: `batches` goes on where `view` ends, and has no end."""

    view: StoredView
    """Large. Whoever has taken it in lets go of it here."""
    batches: AsyncIterator[Batch]
    """Raises Compacted: follow anew. Raises RegistryUnavailable only if nothing can be done about it."""
    kept: int = 0
    """Of a commit that was begun and is to be repeated, so many changes, the first ones, are in the view already, or
    were and have been overwritten since. No batch will tell of them."""


class Store(Protocol):
    """One replica's end of the store. Asynchronous, because real stores are elsewhere."""

    @property
    def shared(self) -> bool:
        """Whether there may be other replicas. If not, nobody needs to follow, and what is read is always current."""
        ...

    async def commit(self, changes: Sequence[StoreChange]) -> None:
        """Keep `changes`, in order. Raises RegistryUnavailable if they are not known to be kept; then repeat.

        A lease and those that it supersedes are kept in one piece, and so is an end with that it is owed; all of
        `changes` are, where the store can.
        """
        ...

    async def beat(self, number: int, beats: Sequence[EngineBeat]) -> None:
        """Tell the other replicas of our lenders; comes back to us as a batch with `beat_number`.

        Raises RegistryUnavailable.
        """
        ...

    def follow(self) -> AbstractAsyncContextManager[Followed]:
        """Everything, then everything that changes. No commit of this replica may be under way when it is entered.

        Raises RegistryUnavailable.
        """
        ...


class MemoryHub:
    """What replicas in one process share. Holds batches only until every replica that follows has taken them."""

    def __init__(self) -> None:
        self.watches: Final[list[_Watch]] = []
        self.engines: Final[dict[EngineId, tuple[MemoryStore, EnginePut]]] = {}
        self.leases: Final[dict[LeaseId, LeasePut]] = {}
        self.owed: Final[dict[LeaseId, EndOwed]] = {}
        self.aliases: Final[dict[tuple[TenantId, Alias], AliasPut]] = {}
        self.beats: Final[dict[MemoryStore, tuple[EngineBeat, ...]]] = {}

    def keep(self, writer: MemoryStore, change: StoreChange) -> None:
        match change:
            case LeasePut():
                self.leases[change.publication.lease_id] = change
            case LeaseGone():
                self.leases.pop(change.lease_id, None)
            case EndOwed():
                self.owed[change.lease_id] = change
            case EndHeard():
                self.owed.pop(change.lease_id, None)
            case EnginePut():
                self.engines[change.engine.engine_id] = (writer, change)
            case EngineGone():
                known = self.engines.get(change.engine_id)
                if known is not None and known[1].engine.incarnation == change.incarnation:
                    del self.engines[change.engine_id]
            case AliasPut():
                self.aliases[change.tenant, change.alias] = change
            case _:
                pass  # messages

    def view(self, reader: MemoryStore) -> StoredView:
        return StoredView(
            engines=tuple(StoredEngine(put=put, own=writer is reader) for writer, put in self.engines.values()),
            leases=tuple(self.leases.values()),
            owed=tuple(self.owed.values()),
            aliases=tuple(self.aliases.values()),
            beats=tuple(beat for beats in self.beats.values() for beat in beats),
        )

    def offer(self, writer: MemoryStore, batch: Batch) -> None:
        for watch in self.watches:
            own = watch.reader is writer
            watch.offer(replace(batch, own=own, beat_number=batch.beat_number if own else None))


class MemoryStore:
    """Lasts as long as the process. Enough for a single registry: after a restart, lenders present what they hold."""

    def __init__(self, hub: MemoryHub | None = None) -> None:
        """`hub`: shared with other replicas in this process; None if there are none."""
        self._hub: Final = hub

    @property
    def shared(self) -> bool:
        """See `Store`."""
        return self._hub is not None

    async def commit(self, changes: Sequence[StoreChange]) -> None:
        """See `Store`."""
        if self._hub is not None and changes:
            for change in changes:
                self._hub.keep(self, change)
            self._hub.offer(self, Batch(changes=tuple(changes)))

    async def beat(self, number: int, beats: Sequence[EngineBeat]) -> None:
        """See `Store`."""
        if self._hub is not None:
            self._hub.beats[self] = tuple(beats)
            self._hub.offer(self, Batch(beats=tuple(beats), beat_number=number))

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[Followed]:
        """See `Store`."""
        hub = self._hub if self._hub is not None else MemoryHub()
        watch = _Watch(self)
        hub.watches.append(watch)
        try:
            yield Followed(view=hub.view(self), batches=watch)
        finally:
            hub.watches.remove(watch)


class _Watch:
    """Batches on the way to one replica. An async iterator without an end."""

    __slots__ = ("_batches", "_overrun", "reader")

    def __init__(self, reader: MemoryStore) -> None:
        self.reader: Final = reader
        self._batches: asyncio.Queue[Batch | None] = asyncio.Queue()
        self._overrun = False

    def offer(self, batch: Batch) -> None:
        if self._overrun:
            return
        self._overrun = self._batches.qsize() >= MAX_BACKLOG
        self._batches.put_nowait(None if self._overrun else batch)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        batch = await self._batches.get()
        if batch is None:
            raise Compacted(f"more than {MAX_BACKLOG} batches behind")
        return batch
