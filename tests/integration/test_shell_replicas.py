"""The shell as one of several on a store in memory: what it may say, and what it takes in, as time and the store go.

Real shells, a clock that is turned by hand; the store is one that a test can make refuse.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from kvlease.registry import committer
from kvlease.registry.errors import Overloaded, RegistryUnavailable
from kvlease.registry.replica import LOAD_WORK
from kvlease.registry.shell import RegistryShell
from kvlease.registry.store import MemoryHub, MemoryStore, Store
from kvlease.registry.table import LeaseTable
from kvlease.registry.table_changes import LeaseGone, LeasePut, StoreChange
from kvlease.registry.table_limits import TICK_WORK
from kvlease.registry.values import Alias, ConversationId, EndOrder, EndReason, EndScope, LeaseFilter, LeaseId, TenantId

from tests.integration.raw_session import HandClock
from tests.integration.registry_peer import eventually, until
from tests.integration.store_conformance import engine_put, lease_put

STALE_MS = 5_000


@asynccontextmanager
async def shell(clock: HandClock, store: Store | None = None) -> AsyncIterator[RegistryShell]:
    async with RegistryShell(
        LeaseTable(),
        store or MemoryStore(MemoryHub()),
        clock,
        max_watchers=8,
        keep_events=64,
        max_staleness_ms=STALE_MS,
    ) as one:
        await until(lambda: one.staleness_ms is not None, "it is current")
        yield one


async def test_a_watch_ends_without_a_word_once_what_is_here_is_old() -> None:
    """Also if it is the first to wake after the process stood still: to say "nothing new" would be a lie."""
    clock = HandClock()
    async with shell(clock) as one:
        with one.watch(LeaseFilter(), 0) as watch:
            assert await watch.next(wait_s=0) is not None
            clock.time_ms += STALE_MS + 1
            assert await watch.next(wait_s=0) is None


class RefusingStore(MemoryStore):
    """Takes beats, and what is to be written only while it is told to: an etcd that finds fault with the latter."""

    def __init__(self) -> None:
        super().__init__(MemoryHub())
        self.refuses = True

    async def commit(self, changes: Sequence[StoreChange]) -> None:
        if self.refuses:
            raise RegistryUnavailable("etcd: etcdserver: request is too large")
        await super().commit(changes)


async def test_while_the_store_refuses_what_is_written_only_so_much_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers come again and again; what they bring is turned away before it changes anything."""
    monkeypatch.setattr(committer, "MAX_WAITING", 8)
    monkeypatch.setattr(committer, "COMMIT_WAIT_S", 0.01)
    store = RefusingStore()
    async with shell(HandClock(), store) as one:
        named, turned_away = 0, 0
        for i in range(40):
            try:
                await one.name_conversation(TenantId("t"), ConversationId("c"), [Alias(bytes([i]) * 16)], 1_000)
            except RegistryUnavailable:
                named += 1
            except Overloaded:
                turned_away += 1
        assert named < 16
        assert named + turned_away == 40
        known = [one.locate(TenantId("t"), None, [Alias(bytes([i]) * 16)]).conversation for i in range(40)]
        assert sum(x is not None for x in known) == named
        await until(lambda: "request is too large" in caplog.text, "the log has the reason")
        store.refuses = False
        monkeypatch.setattr(committer, "COMMIT_WAIT_S", 5.0)
        await eventually(lambda: _named(one), "it goes on as soon as it is let")


async def test_what_was_loaded_and_has_ended_is_not_kept() -> None:
    """A replica follows for weeks; what it once began with is not to stay in its memory."""
    hub = MemoryHub()
    writer = MemoryStore(hub)
    owner = engine_put()
    names = [f"lease-{i}" for i in range(3 * LOAD_WORK)]
    await writer.commit([owner, *(lease_put(x, owner) for x in names)])
    async with shell(HandClock(), MemoryStore(hub)) as one:
        assert len(one.list_leases(LeaseFilter(), after=None, limit=len(names) + 1).leases) == len(names)
        assert one.owner(LeaseId(names[-1])) == TenantId("t")
        await writer.commit([LeaseGone(lease_id=LeaseId(x), reason=EndReason.RELEASED) for x in names])
        await until(lambda: not one.tallies(), "all have ended")
        gc.collect()
        assert not [x for x in gc.get_objects() if isinstance(x, LeasePut)]


class CountedStore(MemoryStore):
    """Says how often it was written to, which takes a while as in etcd."""

    def __init__(self, hub: MemoryHub) -> None:
        super().__init__(hub)
        self.commits = 0

    async def commit(self, changes: Sequence[StoreChange]) -> None:
        self.commits += 1
        await asyncio.sleep(0.02)
        await super().commit(changes)


async def test_an_end_of_very_many_is_few_commits_and_all_of_it_is_stored_when_it_is_answered() -> None:
    """A commit takes some milliseconds, whatever is in it; a caller waits two seconds."""
    hub = MemoryHub()
    owner = engine_put()
    many = 3 * committer.MAX_TOGETHER
    await MemoryStore(hub).commit([owner, *(lease_put(f"lease-{i}", owner) for i in range(many))])
    store = CountedStore(hub)
    async with shell(HandClock(), store) as one:
        order = EndOrder(tenant=TenantId("t"), scope=EndScope.TENANT, target="", reason=EndReason.RELEASED)
        assert await one.end(order) == many
        assert not hub.leases
        assert store.commits < many // TICK_WORK // 2


async def _named(one: RegistryShell) -> bool:
    try:
        await one.name_conversation(TenantId("t"), ConversationId("c"), [Alias(b"z" * 16)], 1_000)
    except Overloaded:
        return False
    return True
