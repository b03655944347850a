"""Clients of a registry with several replicas: how fast they leave one that fails, and that they lose nothing by it.

The replicas are registries with memory of their own, so what one knows after a move is what lenders have presented to
it. Those that are killed or stopped are processes. Times are printed; the bounds are those of the promise, 2 s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.errors import DeadlineExceeded, KvleaseError, RegistryUnavailable
from kvlease.registry.values import DEFAULT_TENANT, ConversationId, Hit, Miss

from tests.integration.first_replica import at_the_first
from tests.integration.holding_lender import HoldingLender, holding, query
from tests.integration.registry_peer import soon, until
from tests.integration.registry_process import RegistryProcess, registry_process

BUDGET_S = 2.0
RESOLVE_MS = 50
"""What a connector waits for."""
CLOCK = SystemClock()


@dataclass
class Load:
    """Resolves of one lease, one after the other, as long as it runs."""

    client: RegistryClient
    seen: list[tuple[float, Hit | Miss | KvleaseError]] = field(default_factory=list)
    resolve_ms: int = RESOLVE_MS
    slowest_s: float = 0.0

    async def run(self) -> None:
        while True:
            asked_s = time.monotonic()
            answer: Hit | Miss | KvleaseError
            try:
                answer = await self.client.resolve(query("kept"), timeout_ms=self.resolve_ms)
            except KvleaseError as error:
                answer = error
            self.slowest_s = max(self.slowest_s, time.monotonic() - asked_s)
            self.seen.append((time.monotonic(), answer))
            await asyncio.sleep(0.01)

    def failures(self) -> list[Miss | KvleaseError]:
        return [answer for _, answer in self.seen if not isinstance(answer, Hit)]

    async def next_good(self, since_s: float, client: RegistryClient, other: str) -> float:
        """Seconds from `since_s` to the first hit after which the client is at `other`."""

        def moved() -> bool:
            return client.address == other and bool(self.seen) and isinstance(self.seen[-1][1], Hit)

        await until(moved, "a good resolve at the other replica")
        after = [at_s for at_s, answer in self.seen if at_s > since_s and not isinstance(answer, Hit)]
        good = [at_s for at_s, answer in self.seen if isinstance(answer, Hit) and at_s > max(after, default=since_s)]
        return good[0] - since_s


@dataclass(frozen=True)
class Scene:
    first: RegistryProcess
    second: RegistryProcess
    lender: HoldingLender
    load: Load
    borrower: RegistryClient
    lending: RegistryClient


@asynccontextmanager
async def scene(*, resolve_ms: int = RESOLVE_MS) -> AsyncIterator[Scene]:
    """Two registries; a lender with a lease and a borrower under load, both at the first."""
    async with (
        registry_process() as first,
        registry_process() as second,
        at_the_first(f"{first.endpoint},{second.endpoint}") as lending,
        at_the_first(f"{first.endpoint},{second.endpoint}") as borrower,
        holding(lending, "d-1", CLOCK) as lender,
    ):
        lender.lend("kept")
        await until(lambda: "kept" in lender.published, "the lease")
        load = Load(borrower, resolve_ms=resolve_ms)
        running = asyncio.create_task(load.run())
        try:
            await until(lambda: len([x for _, x in load.seen if isinstance(x, Hit)]) >= 5, "some resolves")
            load.seen.clear()
            load.slowest_s = 0.0
            assert (borrower.address, lending.address) == (first.endpoint, first.endpoint)
            yield Scene(first, second, lender, load, borrower, lending)
        finally:
            running.cancel()
            (outcome,) = await asyncio.gather(running, return_exceptions=True)
            if isinstance(outcome, Exception):
                raise outcome


async def publishes(scene: Scene, name: str) -> float:
    """Seconds until a new lease is accepted."""
    began_s = time.monotonic()
    scene.lender.lend(name)
    await until(lambda: name in scene.lender.published, "the next accepted publish")
    return time.monotonic() - began_s


async def killed(scene: Scene) -> None:
    await scene.first.kill()


async def stopped(scene: Scene) -> None:
    scene.first.stand_still()


async def terminated(scene: Scene) -> None:
    scene.first.terminate()


@pytest.mark.parametrize("fault", [killed, stopped, terminated])
async def test_a_replica_that_fails_is_left_within_the_budget(fault: Callable[[Scene], Awaitable[None]]) -> None:
    async with scene() as it:
        began_s = time.monotonic()
        await fault(it)
        published_s = await publishes(it, "new")
        resolved_s = await it.load.next_good(began_s, it.borrower, it.second.endpoint)
        failed = it.load.failures()
        assert it.load.slowest_s < 1.0, "a resolve is bounded by its own time"
        print(
            f"\n{fault.__name__}: next good resolve {resolved_s * 1000:.0f} ms, next accepted publish "
            f"{published_s * 1000:.0f} ms, {len(failed)} of {len(it.load.seen)} resolves failed"
        )
        assert resolved_s < BUDGET_S
        assert published_s < BUDGET_S
        await until(lambda: it.lender.connects > 1, "the lender to move, if the first took a publish on its way out")
        assert it.lender.connects == 2, "one session on each, and no more"
        assert (it.borrower.moves, it.lending.moves) == (1, 1)
        answer = await it.borrower.resolve(query("new"), timeout_ms=5_000)
        assert isinstance(answer, Hit)


async def test_a_rolling_upgrade_makes_no_turn_blind() -> None:
    async with scene(resolve_ms=1_000) as it:
        it.first.terminate()
        await until(lambda: it.borrower.address == it.second.endpoint, "the borrower to move")
        await soon(it.first.process.wait(), "the first to end")
        async with registry_process(it.first.endpoint):
            it.second.terminate()
            await until(lambda: it.borrower.address == it.first.endpoint, "the borrower to move back")
            await soon(it.second.process.wait(), "the second to end")
            enough = len(it.load.seen) + 10
            await until(lambda: len(it.load.seen) >= enough, "some more resolves")
            print(f"\nrolled: {len(it.load.seen)} resolves, the slowest {it.load.slowest_s * 1000:.0f} ms")
            assert [x for x in it.load.failures() if isinstance(x, KvleaseError)] == []
            assert it.lender.connects == 3


async def test_an_idle_client_finds_out_before_it_is_asked() -> None:
    async with (
        registry_process() as first,
        registry_process() as second,
        at_the_first(f"{first.endpoint},{second.endpoint}") as client,
    ):
        await client.resolve(query("x"), timeout_ms=5_000)
        assert client.address == first.endpoint
        began_s = time.monotonic()
        first.stand_still()
        await until(lambda: client.address == second.endpoint, "the client to move by itself")
        print(f"\nidle: moved after {(time.monotonic() - began_s) * 1000:.0f} ms")
        assert isinstance(await client.resolve(query("x"), timeout_ms=5_000), Miss)


async def test_single_calls_move_too_and_fail_no_caller_when_a_replica_is_killed() -> None:
    async with (
        registry_process() as first,
        registry_process() as second,
        at_the_first(f"{first.endpoint},{second.endpoint}") as client,
    ):
        await client.locate(DEFAULT_TENANT, ConversationId("x"))
        await first.kill()
        await client.locate(DEFAULT_TENANT, ConversationId("x"), timeout_ms=1_000)
        assert client.address == second.endpoint
        second.stand_still()
        with pytest.raises((DeadlineExceeded, RegistryUnavailable)):
            await client.locate(DEFAULT_TENANT, ConversationId("x"), timeout_ms=RESOLVE_MS)
        second.go_on()

        async def answered() -> None:
            while True:
                try:
                    await client.locate(DEFAULT_TENANT, ConversationId("x"), timeout_ms=RESOLVE_MS)
                except KvleaseError:
                    await asyncio.sleep(0.02)
                else:
                    return

        await soon(answered(), "an answer again")


async def test_fifty_lenders_move_at_once_without_a_storm() -> None:
    async with registry_process() as first, registry_process() as second, AsyncExitStack() as stack:
        both = f"{first.endpoint},{second.endpoint}"
        clients = [await stack.enter_async_context(at_the_first(both)) for _ in range(50)]
        lenders = []
        for number, client in enumerate(clients):
            lenders.append(await stack.enter_async_context(holding(client, f"d-{number}", CLOCK)))
            lenders[-1].lend(f"l-{number}")
        await until(lambda: all(len(x.published) == 1 for x in lenders), "fifty leases")
        began_s = time.monotonic()
        await first.kill()
        await until(lambda: all(x.connects == 2 for x in lenders), "fifty sessions at the other")
        print(f"\nfifty lenders: all moved after {(time.monotonic() - began_s) * 1000:.0f} ms")
        async with RegistryClient(second.endpoint) as asking:
            for number in range(50):
                assert isinstance(await asking.resolve(query(f"l-{number}"), timeout_ms=5_000), Hit)
        assert [x.connects for x in lenders] == [2] * 50
        assert [x.moves for x in clients] == [1] * 50
