"""Where changes of the table go before anyone is told of them, and the store for a registry that is alone: memory.

The table is the working copy; a store makes changes last and brings those of other replicas. It decides nothing.
Contract, checked on every store by one conformance suite: a batch is kept whole or not at all; batches of one replica
keep their order; a replica sees every batch of the others exactly once and none of its own, or gets Compacted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol, Self

from kvlease.registry.errors import Compacted
from kvlease.registry.table_changes import StoreChange

Batch = tuple[StoreChange, ...]

MAX_BACKLOG: Final = 1_024
"""Batches that wait for a replica which is slow to take them; then it has to load everything again."""


class Store(Protocol):
    """One replica's end of the store. Asynchronous, because real stores are elsewhere."""

    async def commit(self, changes: Sequence[StoreChange]) -> None:
        """Keep `changes` as one batch. Raises RegistryUnavailable if they are not known to be kept; then repeat."""
        ...

    def others(self) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        """Batches of other replicas, from when the context is entered. Raises Compacted: load again."""
        ...


class MemoryHub:
    """What replicas in one process share. Holds batches only until every watching replica has taken them."""

    def __init__(self) -> None:
        self.watches: Final[list[_Watch]] = []


class MemoryStore:
    """Lasts as long as the process. Enough for a single registry: after a restart, lenders present what they hold."""

    def __init__(self, hub: MemoryHub | None = None) -> None:
        self._hub: Final = hub if hub is not None else MemoryHub()

    async def commit(self, changes: Sequence[StoreChange]) -> None:
        """See `Store`."""
        batch = tuple(changes)
        for watch in self._hub.watches:
            if watch.owner is not self:
                watch.offer(batch)

    @asynccontextmanager
    async def others(self) -> AsyncIterator[AsyncIterator[Batch]]:
        """See `Store`."""
        watch = _Watch(self)
        self._hub.watches.append(watch)
        try:
            yield watch
        finally:
            self._hub.watches.remove(watch)


class _Watch:
    """Batches on the way to one replica. An async iterator without an end."""

    __slots__ = ("_batches", "_overrun", "owner")

    def __init__(self, owner: MemoryStore) -> None:
        self.owner: Final = owner
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
