"""A client's copy of the leases, fed over real sockets by the real registry: resumed, listed anew, stale, refused.

The client's line can be cut and held still; lenders keep theirs. Every wait ends after LIMIT_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.lease_copy import LeaseCopy
from kvlease.registry.lease_copy_feed import FeedLimits, LeaseCopyFeed
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.values import (
    DEFAULT_TENANT,
    ConversationId,
    EndReason,
    LeaseFilter,
    LeaseId,
    MissReason,
    TenantId,
)
from kvlease.v1 import registry_pb2 as pb

from tests.integration.cut_line import CutLine, cut_line
from tests.integration.raw_session import LENDER_NOW_MS, HandClock, RawSession, lease, raw_stub
from tests.integration.registry_peer import soon, until
from tests.integration.router_lender import Lender, lending
from tests.ports import free_port

QUICK = FeedLimits(backoff_first_ms=10, backoff_cap_ms=50, long_pause_ms=20)
OURS = LeaseFilter(tenant=DEFAULT_TENANT)


def settings(port: int = 0, *, keep_events: int = 65_536) -> RegistrySettings:
    given = {"listen": f"127.0.0.1:{port}", "metrics_listen": NO_METRICS, "keep_events": keep_events}
    return RegistrySettings.model_validate(given)


@asynccontextmanager
async def fed(
    endpoint: str,
    *,
    limits: FeedLimits = QUICK,
    selection: LeaseFilter = OURS,
    clock: HandClock | None = None,
    most: int = 100,
) -> AsyncIterator[LeaseCopy]:
    """A copy that is fed as long as the block."""
    copy = LeaseCopy(limit=most)
    async with RegistryClient(endpoint) as client, asyncio.TaskGroup() as group:
        feed = LeaseCopyFeed(client, copy, clock=clock or HandClock(), selection=selection, limits=limits)
        feeding = group.create_task(feed.run())
        try:
            yield copy
        finally:
            feeding.cancel()


@asynccontextmanager
async def scene(*, keep_events: int = 65_536) -> AsyncIterator[tuple[Lender, CutLine, LeaseCopy, LeaseCopy]]:
    """A registry, a lender, a copy whose line can be cut, and one beside it whose line is whole."""
    async with (
        RegistryServer(settings(keep_events=keep_events)) as server,
        lending(server, "http://d") as lender,
        cut_line(server.endpoint) as line,
        fed(line.endpoint) as copy,
        fed(server.endpoint) as beside,
    ):
        await until(lambda: copy.revision is not None and beside.revision is not None, "the first lists")
        yield lender, line, copy, beside


def ids(copy: LeaseCopy) -> list[str]:
    copy.check()
    return sorted(x.lease_id for x in copy.leases(now_ms=0))


async def holds(copy: LeaseCopy, leases: Sequence[str]) -> None:
    await until(lambda: ids(copy) == sorted(leases), f"the copy to hold {sorted(leases)}")


async def test_a_copy_answers_what_the_registry_answers() -> None:
    async with (
        RegistryServer(settings()) as server,
        lending(server, "http://d/v1") as lender,
        fed(server.endpoint) as copy,
    ):
        kept = [await lender.lend("a", strides=3), await lender.lend("a", strides=2), await lender.lend("b")]
        await holds(copy, kept)
        for name in ("a", "b", "c"):
            conversation = ConversationId(name)
            told = copy.locate(DEFAULT_TENANT, conversation, now_ms=0)
            asked = await lender.client.locate(DEFAULT_TENANT, conversation)
            assert (told.conversation, told.api_url, told.reason) == (asked.conversation, asked.api_url, asked.reason)
            assert (told.lease is None) == (asked.lease is None)
            if told.lease is not None and asked.lease is not None:
                assert (told.lease.lease_id, told.lease.tokens) == (asked.lease.lease_id, asked.lease.tokens)
        await lender.client.end_conversation(DEFAULT_TENANT, ConversationId("a"))
        await holds(copy, kept[2:])


async def test_only_what_is_selected_is_copied() -> None:
    async with (
        RegistryServer(settings()) as server,
        raw_stub(server.endpoint) as stub,
        fed(server.endpoint, selection=LeaseFilter(tenant=TenantId("acme"))) as copy,
    ):
        lender = RawSession(stub)
        await lender.start(held=[lease("a", "x"), lease("b", "y", tenant="other")])
        await lender.publish(lease("c", "z", tenant="other"), lease("d", "w", conversation="d"))
        await holds(copy, ["a", "d"])


async def test_a_resumed_watch_misses_nothing_and_repeats_nothing() -> None:
    async with scene() as (lender, line, copy, beside):
        first = [await lender.lend(name) for name in "abc"]
        await holds(copy, first)
        for number in range(3):
            line.cut()
            more = [await lender.lend(f"{number}-{name}") for name in "de"]
            lender.session.ended(LeaseId(first[number]), EndReason.REUSED)
            first += more
            await until(lambda: beside.events == 3 * (number + 2), "all events to be there")  # noqa: B023
            assert copy.events < beside.events
            line.mend()
            await until(lambda: copy.revision == beside.revision, "the copy to catch up")
        assert (copy.events, copy.lists) == (beside.events, 1), "each event once, and no new list"
        await holds(copy, first[3:])
        await holds(beside, first[3:])


async def test_a_watch_says_how_far_there_is_to_go() -> None:
    async with scene() as (lender, _, copy, _beside):
        behind = copy.revision
        assert behind is not None
        lent = [await lender.lend(name) for name in "abc"]
        await holds(copy, lent)
        async with aclosing(lender.client.watch(OURS, from_revision=behind)) as watch:
            first, second = [await soon(anext(watch), "news") for _ in range(2)]
        assert (first.revision, first.newest) == (behind, behind + 3)
        assert (second.revision, second.newest, len(second.events)) == (behind + 3, behind + 3, 3)


async def test_what_ended_between_two_streams_is_gone() -> None:
    async with scene(keep_events=4) as (lender, line, copy, beside):
        gone, kept = await lender.lend("a"), await lender.lend("b")
        await holds(copy, [gone, kept])
        line.cut()
        lender.session.ended(gone, EndReason.REUSED)
        more = [await lender.lend(f"c-{number}") for number in range(5)]
        await holds(beside, [kept, *more])
        assert gone in ids(copy), "what was known is answered until there is news"
        line.mend()
        await holds(copy, [kept, *more])
        assert copy.lists == 2


async def test_a_watcher_that_falls_behind_lists_again() -> None:
    async with scene(keep_events=4) as (lender, _, copy, _beside):
        async with asyncio.TaskGroup() as group:  # one batch: more events at once than are kept
            lent = [group.create_task(lender.lend(f"c-{number}")) for number in range(10)]
        await holds(copy, [x.result() for x in lent])
        assert copy.lists > 1


async def test_a_restarted_registry_is_another_history() -> None:
    port = free_port()
    async with AsyncExitStack() as later:
        async with RegistryServer(settings(port)) as server:
            lender = await later.enter_async_context(lending(server, "http://d"))
            copy = await later.enter_async_context(fed(server.endpoint))
            gone, kept = await lender.lend("a"), await lender.lend("b")
            await holds(copy, [gone, kept])
        lender.session.ended(gone, EndReason.REUSED)
        async with RegistryServer(settings(port)):
            await holds(copy, [kept])
            more = await lender.lend("c")
            await holds(copy, [kept, more])
            assert copy.lists == 2
            await later.aclose()


async def test_staleness_grows_while_the_line_is_cut() -> None:
    clock = HandClock()
    async with (
        RegistryServer(settings()) as server,
        cut_line(server.endpoint) as line,
        fed(line.endpoint, clock=clock) as copy,
    ):
        assert copy.staleness_ms(clock.now_ms()) is None
        await until(lambda: copy.revision is not None, "the first list")
        line.cut()
        clock.time_ms += 60_000
        assert copy.staleness_ms(clock.now_ms()) == 60_000
        line.mend()
        await until(lambda: copy.staleness_ms(clock.now_ms()) == 0, "the copy to be current again")
        assert copy.lists == 1


async def test_a_watch_that_says_nothing_is_taken_for_dead(caplog: pytest.LogCaptureFixture) -> None:
    limits = FeedLimits(silence_ms=200, backoff_first_ms=10, backoff_cap_ms=50)
    async with (
        RegistryServer(settings()) as server,
        lending(server, "http://d") as lender,
        cut_line(server.endpoint) as line,
        fed(line.endpoint, limits=limits) as copy,
    ):
        first = await lender.lend("a")
        await holds(copy, [first])
        line.stand_still()
        await until(lambda: "said nothing for 200 ms" in caplog.text, "the feed to give the watch up")
        second = await lender.lend("b")
        assert ids(copy) == [first]
        line.move()
        await holds(copy, [first, second])
        assert copy.lists == 1


async def test_a_silent_lenders_leases_are_not_answered() -> None:
    clock = HandClock()
    async with (
        RegistryServer(settings(), clock=clock) as server,
        raw_stub(server.endpoint) as stub,
        fed(server.endpoint, selection=LeaseFilter(tenant=TenantId("acme"))) as copy,
    ):

        def reason() -> MissReason | None:
            return copy.locate(TenantId("acme"), ConversationId("chat"), now_ms=0).reason

        lender = RawSession(stub)
        await lender.start(held=[lease("a", "xyz")])
        await until(lambda: reason() is None, "the lease")
        clock.time_ms += 10_001
        await until(lambda: reason() is MissReason.SUSPECT, "the lender to be suspect")
        await lender.say(heartbeat=pb.Heartbeat(now_lender_ms=LENDER_NOW_MS + 10_001))
        await until(lambda: reason() is None, "the lender to be back")
        clock.time_ms += 60_001
        await until(lambda: reason() is MissReason.UNKNOWN, "the lender to be lost")
        assert (len(copy), copy.lists) == (0, 1)


async def test_more_leases_than_a_copy_holds_are_not_half_copied() -> None:
    async with RegistryServer(settings()) as server, lending(server, "http://d") as lender:
        lent = [await lender.lend(name) for name in "abc"]
        async with fed(server.endpoint, most=2) as copy, fed(server.endpoint) as beside:
            await holds(beside, lent)
            assert (len(copy), copy.revision) == (0, None)
            lender.session.ended(lent[0], EndReason.REUSED)
            await holds(copy, lent[1:])
