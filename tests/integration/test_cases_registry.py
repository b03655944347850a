"""Cases that fleets reported, at the registry: who ends when, clocks that disagree, a network that goes away.

Real sockets, the real session and the connector's own lease holder; no engine. Where a case is about time passing,
clocks are turned by hand; the one real wait here is the length of an outage.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from math import ceil
from typing import Final

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import Clock, SystemClock
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.values import (
    DEFAULT_TENANT,
    EndReason,
    Hit,
    LeaseEventType,
    LeaseId,
    LeaseState,
    Miss,
    MissReason,
    OnDeadline,
    RenewStatus,
)

from tests.integration.cut_line import CutLine
from tests.integration.holding_lender import HoldingLender, holding, query
from tests.integration.raw_session import HandClock
from tests.integration.registry_peer import eventually, soon, until

ASK_MS: Final = 9_000
"""Limit of one resolve, on a machine that is busy."""
TTL_MS: Final = 60_000
TEN_MINUTES_MS: Final = 600_000

LENDERS: Final = 50
AWAY_S: Final = float(os.environ.get("KVLEASE_OUTAGE_S", "3"))
"""How long the network is away: KVLEASE_OUTAGE_S=30 for a run by hand."""
SUSPECT_MS: Final = 2_000
"""Less than the outage."""
MOST_ATTEMPTS: Final = 7 + ceil((AWAY_S - 1.2) / 0.8)
"""Of one lender while the registry is away. Pauses of 0.1 s grow by 1.6 to 1 s, each 20 % shorter by chance: six
attempts in 1.2 s, then one each 0.8 s at most; one more for an attempt that was under way."""


@asynccontextmanager
async def registry(
    clock: Clock, *, suspect_after_ms: int = 10_000
) -> AsyncIterator[tuple[RegistryServer, RegistryClient]]:
    settings = RegistrySettings(
        listen="127.0.0.1:0",
        metrics_listen=NO_METRICS,
        heartbeat_interval_ms=50,
        suspect_after_ms=suspect_after_ms,
    )
    async with RegistryServer(settings, clock=clock) as server, RegistryClient(server.endpoint) as client:
        yield server, client


async def lend(lender: HoldingLender, *lease_ids: str) -> None:
    """Publishes the leases and waits until they can be resolved."""
    for lease_id in lease_ids:
        lender.lend(lease_id)
    await until(lambda: lender.published.issuperset(lease_ids), f"answers for {len(lease_ids)} publishes")


async def resolve(client: RegistryClient, lease_id: str) -> Hit | Miss:
    return await client.resolve(query(lease_id), timeout_ms=ASK_MS)


async def hit(client: RegistryClient, lease_id: str) -> Hit:
    answer = await resolve(client, lease_id)
    assert isinstance(answer, Hit), f"{lease_id}: {answer}"
    assert answer.lease_id == lease_id
    return answer


async def heard_at(client: RegistryClient, lease_id: str, remaining_ms: int) -> None:
    """Returns when the registry has heard the lender's clock, which leaves the lease so long."""

    async def heard() -> bool:
        return (await hit(client, lease_id)).remaining_ms <= remaining_ms

    await eventually(heard, f"a heartbeat that leaves {lease_id} {remaining_ms} ms")


# -- one renewed lease and a hundred that nobody renews


@pytest.mark.parametrize(
    ("on_deadline", "event_type", "end_reason", "counts"),
    [
        (OnDeadline.END, LeaseEventType.ENDED, EndReason.EXPIRED, (1, 0)),
        (OnDeadline.LAPSE, LeaseEventType.LAPSED, None, (1, 100)),
    ],
)
async def test_of_101_leases_the_renewed_one_lives_and_the_others_keep_their_time(
    on_deadline: OnDeadline, event_type: LeaseEventType, end_reason: EndReason | None, counts: tuple[int, int]
) -> None:
    lenders_clock = HandClock()
    others = [f"l-{number}" for number in range(100)]
    async with (
        registry(HandClock()) as (_, client),
        holding(client, "d-1", lenders_clock, ttl_ms=TTL_MS, on_deadline=on_deadline) as lender,
    ):
        await lend(lender, "renewed", *others)
        lenders_clock.time_ms += TTL_MS // 2
        await heard_at(client, "renewed", TTL_MS // 2)
        answer = await client.renew(DEFAULT_TENANT, LeaseId("renewed"))
        assert (answer.status, answer.remaining_ms) == (RenewStatus.RENEWED, TTL_MS)

        lenders_clock.time_ms += TTL_MS // 2 - 1
        lender.tick()
        await heard_at(client, "renewed", TTL_MS // 2 + 1)
        listed = await client.list_leases()
        assert {view.lease_id: view.remaining_ms for view in listed.leases} == {
            "renewed": TTL_MS // 2 + 1,
            **dict.fromkeys(others, 1),
        }
        assert {view.state for view in listed.leases} == {LeaseState.LIVE}, "not a millisecond early"

        lenders_clock.time_ms += 1  # and the lender itself is slow to look
        seen: dict[str, tuple[LeaseEventType, EndReason | None]] = {}
        async with aclosing(client.watch(from_revision=listed.revision)) as watch:
            while len(seen) < len(others):
                batch = await soon(anext(watch), f"events of 100 leases, not only of {len(seen)}")
                seen |= {event.lease.lease_id: (event.type, event.lease.end_reason) for event in batch.events}
        assert seen == dict.fromkeys(others, (event_type, end_reason))
        kept = await hit(client, "renewed")
        assert (kept.state, kept.remaining_ms) == (LeaseState.LIVE, TTL_MS // 2)
        lender.tick()
        held = lender.holder
        assert (held.count(LeaseState.LIVE), held.count(LeaseState.LAPSED)) == counts, "the lender holds the same"
        held.check()


async def test_a_renewal_past_the_longest_lifetime_is_answered_so_and_gives_what_is_left() -> None:
    lenders_clock = HandClock()
    async with (
        registry(HandClock()) as (_, client),
        holding(client, "d-1", lenders_clock, ttl_ms=TTL_MS, max_lifetime_ms=TTL_MS + 5_000) as lender,
    ):
        await lend(lender, "l")
        for _ in range(2):
            answer = await client.renew(DEFAULT_TENANT, LeaseId("l"), 2 * TTL_MS)
            assert answer.status is RenewStatus.AT_LIMIT

        async def moved() -> bool:
            return (await hit(client, "l")).remaining_ms == TTL_MS + 5_000

        await eventually(moved, "the deadline at the limit")
        assert (await client.renew(DEFAULT_TENANT, LeaseId("l"), TTL_MS)).status is RenewStatus.RENEWED


# -- clocks


class FarClock:
    """The machine's monotonic clock with another zero; a test can make it leap ahead, as after a host's pause."""

    def __init__(self, offset_ms: int) -> None:
        self._real = SystemClock()
        self.offset_ms = offset_ms

    def now_ms(self) -> int:
        return self._real.now_ms() + self.offset_ms


class WallClock:
    """Stands in for `time.time` and its kind: can be stepped, and remembers which of our modules looked at it.

    gRPC is told the truth: it hands deadlines to a core that reads the real clock for itself.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.step_s = 0.0
        self.readers: set[str] = set()
        real, real_ns = time.time, time.time_ns

        def seconds() -> float:
            return real() + self._step_for(sys._getframe(1).f_globals.get("__name__", ""))

        def nanoseconds() -> int:
            return real_ns() + int(self._step_for(sys._getframe(1).f_globals.get("__name__", "")) * 1e9)

        patch.setattr(time, "time", seconds)
        patch.setattr(time, "time_ns", nanoseconds)

    def _step_for(self, reader: str) -> float:
        if reader.startswith("kvlease."):
            self.readers.add(reader)
        return 0.0 if reader.startswith("grpc") else self.step_s


async def test_clocks_ten_minutes_apart_change_nothing() -> None:
    behind, ahead = FarClock(0), FarClock(2 * TEN_MINUTES_MS)
    async with (
        registry(FarClock(TEN_MINUTES_MS)) as (_, client),
        holding(client, "d-behind", behind, ttl_ms=TTL_MS) as first,
        holding(client, "d-ahead", ahead, ttl_ms=TTL_MS) as second,
    ):
        await lend(first, "of-behind")
        await lend(second, "of-ahead")
        for lease_id in ("of-behind", "of-ahead"):
            found = await hit(client, lease_id)
            assert found.state is LeaseState.LIVE
            # The registry knows the lender's present from messages, late by what they took; never early.
            assert 0 < found.remaining_ms <= TTL_MS + ASK_MS
        answer = await client.renew(DEFAULT_TENANT, LeaseId("of-behind"), 2 * TTL_MS)
        assert answer.status is RenewStatus.RENEWED
        assert TTL_MS < answer.remaining_ms <= 2 * TTL_MS + ASK_MS

        behind.offset_ms += 2 * TTL_MS  # its host stood still and woke: its own leases are over, nobody else's
        await heard_at(client, "of-behind", 0)
        assert (await hit(client, "of-behind")).state is LeaseState.LAPSED
        other = await hit(client, "of-ahead")
        assert other.state is LeaseState.LIVE
        assert other.remaining_ms > 0


@pytest.mark.parametrize("step_ms", [TEN_MINUTES_MS, -TEN_MINUTES_MS])
async def test_a_step_of_the_wall_clock_during_a_lease_has_no_effect(
    step_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = WallClock(monkeypatch)
    async with (
        registry(SystemClock()) as (_, client),
        holding(client, "d-1", SystemClock(), ttl_ms=TTL_MS) as lender,
    ):
        await lend(lender, "before")
        wall.step_s = step_ms / 1_000
        lender.tick()
        await lend(lender, "after")
        for lease_id in ("before", "after"):
            found = await hit(client, lease_id)
            assert found.state is LeaseState.LIVE
            assert 0 < found.remaining_ms <= TTL_MS + ASK_MS
        renewed = await client.renew(DEFAULT_TENANT, LeaseId("before"))
        assert renewed.status is RenewStatus.RENEWED
        assert 0 < renewed.remaining_ms <= TTL_MS + ASK_MS
        (engine,) = await client.list_engines()
        assert (engine.connected, engine.suspect) == (True, False)
        assert lender.connects == 1, "the session went on"
        assert wall.readers == set(), "somebody decides by the wall clock"


# -- a network that goes away


class CountedLine(CutLine):
    """A line that counts the attempts to connect."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.attempts = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.attempts += 1
        await super().serve(reader, writer)


@asynccontextmanager
async def counted_line(endpoint: str) -> AsyncIterator[CountedLine]:
    line = CountedLine(endpoint)
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    line.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        try:
            yield line
        finally:
            line.cut()


def all_of(lenders: list[HoldingLender], what: Callable[[HoldingLender], bool]) -> Callable[[], bool]:
    return lambda: all(what(lender) for lender in lenders)


async def test_an_outage_under_fifty_lenders_makes_no_storm_and_leases_are_back(
    record_property: Callable[[str, object], None],
) -> None:
    clock = SystemClock()
    async with registry(clock, suspect_after_ms=SUSPECT_MS) as (server, client), AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(counted_line(server.endpoint)) for _ in range(LENDERS)]
        lenders: list[HoldingLender] = []
        for number, line in enumerate(lines):
            own = await stack.enter_async_context(RegistryClient(line.endpoint))
            lenders.append(await stack.enter_async_context(holding(own, f"d-{number}", clock)))
            lenders[-1].lend(f"l-{number}")
        await until(all_of(lenders, lambda lender: lender.session.connected), "fifty sessions")
        for number in range(LENDERS):
            await hit(client, f"l-{number}")

        before = [line.attempts for line in lines]
        for line in lines:
            line.cut()
        await asyncio.sleep(AWAY_S)
        tried = [line.attempts - count for line, count in zip(lines, before, strict=True)]
        assert max(tried) <= MOST_ATTEMPTS, f"a storm: attempts of each lender {tried}"
        assert min(tried) >= 1, f"some gave up: {tried}"
        assert await resolve(client, "l-0") == Miss(reason=MissReason.SUSPECT), "nobody has heard of it for a while"

        for line in lines:
            line.mend()
        mended = time.monotonic()
        await until(all_of(lenders, lambda lender: lender.connects == 2), "fifty sessions again")
        record_property("sessions_back_s", time.monotonic() - mended)
        for number in range(LENDERS):
            assert (await hit(client, f"l-{number}")).state is LeaseState.LIVE
        record_property("leases_back_s", time.monotonic() - mended)
        record_property("attempts_while_away", (min(tried), max(tried)))
        after = [line.attempts - count for line, count in zip(lines, before, strict=True)]
        assert max(after) <= MOST_ATTEMPTS + 10, f"a storm after the outage: {after}"
        assert {lender.connects for lender in lenders} == {2}, "each came back once"
