"""Under overload: what is shed, how callers hear of it, and what goes on. The signal is set by hand.

The edge is put together without the load probe, so that nothing but the test moves the signal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc.aio
import pytest
from kvlease.cli.bench import BenchTerms, measure
from kvlease.registry.calls import CallInterceptor
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_channel import SERVER_OPTIONS
from kvlease.registry.clock import SystemClock
from kvlease.registry.errors import Overloaded, retry_hint_ms
from kvlease.registry.instruments import CallMetrics, CountingService
from kvlease.registry.load_probe import feel_load
from kvlease.registry.overload import RAISE_AFTER, SWAMPED_FACTOR, Load, Overload
from kvlease.registry.servicer import SERVICE, RegistryServicer, add_to_server
from kvlease.registry.shell import RegistryShell
from kvlease.registry.store import MemoryStore
from kvlease.registry.table import LeaseTable
from kvlease.registry.values import (
    ConversationId,
    EngineId,
    Hit,
    LeaseId,
    Miss,
    MissReason,
    PublishStatus,
    ResolveQuery,
    TenantId,
)
from kvlease.registry.wire import decode_publish_result
from kvlease.v1 import registry_pb2 as pb
from prometheus_client import CollectorRegistry

from tests.integration.raw_session import LENDER_NOW_MS, RawSession, lease, raw_stub
from tests.integration.registry_peer import eventually, until

LIMIT_MS = 100
TENANT = TenantId("acme")
ASKED = ResolveQuery(tenant=TENANT, lease_id=LeaseId("a"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    overload: Overload
    client: RegistryClient
    lender: RawSession
    metrics: CollectorRegistry

    def load(self, lag_ms: float) -> None:
        for _ in range(RAISE_AFTER):
            self.overload.observe(lag_ms)

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.get_sample_value(f"kvlease_registry_{name}_total", labels) or 0.0


@asynccontextmanager
async def edge() -> AsyncIterator[Edge]:
    """A registry's gRPC edge over a real shell, and a lender with one lease."""
    metrics, overload = CollectorRegistry(), Overload(limit_ms=LIMIT_MS)
    async with RegistryShell(LeaseTable(), MemoryStore(), SystemClock(), max_watchers=1, keep_events=8) as shell:
        counting = CountingService(shell, metrics)
        servicer = RegistryServicer(
            counting,
            welcome=pb.Welcome(heartbeat_interval_ms=60_000),
            max_resolve_streams=8,
            overload=overload,
            on_shed=counting.shed,
        )
        calls = CallInterceptor(SERVICE, CallMetrics(metrics), join_traces=False)
        server = grpc.aio.server(interceptors=[calls], options=SERVER_OPTIONS)
        add_to_server(servicer, server)
        endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            async with RegistryClient(endpoint) as client, raw_stub(endpoint) as stub:
                lender = RawSession(stub)
                await lender.start(held=[lease("a", "xyz")])
                yield Edge(overload=overload, client=client, lender=lender, metrics=metrics)
        finally:
            await server.stop(None)


async def test_resolves_are_shed_with_a_reason_and_a_hint() -> None:
    async with edge() as it:
        it.load(LIMIT_MS)
        assert await it.client.resolve(ASKED, timeout_ms=5_000) == Miss(reason=MissReason.OVERLOADED)
        with pytest.raises(Overloaded) as shed:
            await it.client.resolve_unary(ASKED)
        assert (retry_hint_ms(shed.value) or 0) > 0
        assert it.counted("misses", reason="overloaded") == 2
        assert it.counted("resolves", outcome="miss") == 2


BENCH = BenchTerms(
    tenant=TenantId("bench"),
    engine_id=EngineId("bench"),
    leases=3,
    tokens=64,
    seconds=0.05,
    callers=2,
    timeout_ms=5_000,
)


async def test_a_bench_does_not_start_where_resolves_are_shed_and_stops_when_they_begin_to_be() -> None:
    async with edge() as it:
        assert (await measure(it.client, BENCH)).figures[0].calls == 3
        held = len(await it.client.list_engines())
        stop = asyncio.create_task(measure(it.client, replace(BENCH, seconds=60)))

        async def has_begun() -> bool:
            return any(x.leases for x in await it.client.list_engines() if x.engine.engine_id == BENCH.engine_id)

        await eventually(has_begun, "a lease of the bench")
        it.load(LIMIT_MS)
        with pytest.raises(Overloaded, match="began to refuse"):
            await stop
        with pytest.raises(Overloaded, match="refuses resolves already"):
            await measure(it.client, BENCH)
        assert len(await it.client.list_engines()) == held, "nothing of it stays"


async def test_leases_stay_true_while_resolves_are_shed() -> None:
    async with edge() as it:
        it.load(LIMIT_MS * SWAMPED_FACTOR)
        (result,) = await it.lender.publish(lease("b", "b", conversation="c"))
        assert decode_publish_result(result).status is PublishStatus.PUBLISHED
        await it.lender.say(heartbeat=pb.Heartbeat(now_lender_ms=LENDER_NOW_MS, free_blocks=7, total_blocks=9))
        assert (await it.lender.ack()).seq == 4
        (engine,) = await it.client.list_engines()
        assert (engine.free_blocks, engine.leases) == (7, 2)
        assert await it.client.end_lease(TENANT, LeaseId("b")) == 1


async def test_locates_and_lists_are_shed_only_when_it_is_worse() -> None:
    async with edge() as it:
        it.load(LIMIT_MS)
        assert (await it.client.locate(TENANT, ConversationId("chat"))).lease is not None
        await it.client.list_leases()
        it.load(LIMIT_MS * SWAMPED_FACTOR)
        with pytest.raises(Overloaded):
            await it.client.locate(TENANT, ConversationId("chat"))
        with pytest.raises(Overloaded):
            await it.client.list_leases()


async def test_when_it_is_over_resolves_are_answered_again() -> None:
    async with edge() as it:
        it.load(LIMIT_MS)
        assert isinstance(await it.client.resolve(ASKED, timeout_ms=5_000), Miss)
        while it.overload.load is not Load.CALM:
            it.overload.observe(0)
        assert isinstance(await it.client.resolve(ASKED, timeout_ms=5_000), Hit)
        assert isinstance(await it.client.resolve_unary(ASKED), Hit)


async def test_a_loop_that_is_held_up_is_noticed() -> None:
    overload = Overload(limit_ms=1)
    feeling = asyncio.create_task(feel_load(overload))

    def held_up() -> bool:
        time.sleep(0.06)  # the load: nothing else gets its turn meanwhile
        return overload.load is not Load.CALM

    try:
        await until(held_up, "the load to be noticed")
    finally:
        feeling.cancel()
