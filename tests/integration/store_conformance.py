"""What every store must do, as tests: subclass `StoreConformance` and say how two replicas of one store are opened.

Nothing here knows which store it is. Waits end after LIMIT_S.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import pytest
from kvlease.registry.errors import Compacted
from kvlease.registry.store import MAX_BACKLOG, Batch, Store
from kvlease.registry.table_changes import LeaseGone
from kvlease.registry.values import EndReason, LeaseId

LIMIT_S = 10.0


def _batch(*names: str) -> Batch:
    return tuple(LeaseGone(lease_id=LeaseId(name), reason=EndReason.RELEASED) for name in names)


async def _take(batches: AsyncIterator[Batch], count: int) -> list[Batch]:
    async with asyncio.timeout(LIMIT_S):
        return [await anext(batches) for _ in range(count)]


class StoreConformance(ABC):
    """The suite."""

    @abstractmethod
    def replicas(self) -> AbstractAsyncContextManager[tuple[Store, Store]]:
        """Two replicas' ends of one empty store."""

    async def test_others_are_seen_whole_in_order_and_once(self) -> None:
        async with self.replicas() as (mine, theirs), mine.others() as batches:
            await theirs.commit(_batch("a", "b"))
            await theirs.commit(_batch("c"))
            assert await _take(batches, 2) == [_batch("a", "b"), _batch("c")]
            await theirs.commit(_batch("d"))
            assert await _take(batches, 1) == [_batch("d")]

    async def test_own_batches_do_not_come_back(self) -> None:
        async with self.replicas() as (mine, theirs), mine.others() as batches:
            await mine.commit(_batch("mine"))
            await theirs.commit(_batch("theirs"))
            assert await _take(batches, 1) == [_batch("theirs")]

    async def test_a_watch_starts_when_it_is_entered(self) -> None:
        async with self.replicas() as (mine, theirs):
            await theirs.commit(_batch("before"))
            async with mine.others() as batches:
                await theirs.commit(_batch("after"))
                assert await _take(batches, 1) == [_batch("after")]
            await theirs.commit(_batch("between"))
            async with mine.others() as batches:
                await theirs.commit(_batch("again"))
                assert await _take(batches, 1) == [_batch("again")]

    async def test_who_falls_behind_is_told(self) -> None:
        async with self.replicas() as (mine, theirs), mine.others() as batches:
            for i in range(MAX_BACKLOG + 2):
                await theirs.commit(_batch(str(i)))
            with pytest.raises(Compacted):
                await _take(batches, MAX_BACKLOG + 2)
