"""A registry that is full: what a lease costs in memory, and what a resolve takes while very much ends at once.

Real server, real sockets. A quarter of the leases are of one lender, which is restarted; a tenth end at one deadline,
brought about by the lender's clock, which is the one that counts. A prober resolves one lease after the other all the
while, of lenders to which nothing happens.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Final

import grpc.aio
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_channel import CLIENT_OPTIONS
from kvlease.registry.values import ConversationId, LeaseFilter
from kvlease.v1 import registry_pb2 as pb

from tests.bench.crowd import FINGERPRINT, PAYLOAD_BYTES, TENANT, Crowd
from tests.bench.figures import Figure, Unit, at_most, quantile
from tests.bench.registry_sections import port_of
from tests.bench.served import Program
from tests.bench.wire import AnswerTooShort

DAY_MS: Final = 24 * 3_600_000
SOON_MS: Final = 3_600_000
"""When the tenth ends; later than it takes to publish everything."""
CALM_S: Final = 2.0
PHASE_S: Final = 120.0
PROBE_PAUSE_S: Final = 0.001
LIMITS: Final = ("--max-leases-per-engine", "2000000", "--max-leases-per-tenant", "2000000")
WATCHERS: Final = 100
WATCHED: Final = 50
"""Publishes seen by all watchers."""


class Prober:
    """One caller on a resolve stream of its own."""

    def __init__(self, channel: grpc.aio.Channel, chains: Sequence[bytes]) -> None:
        call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            "/kvlease.v1.Registry/ResolveStream"
        )
        self._stream: Final = call()
        self._messages: Final = [_question(chain) for chain in chains]
        self._random: Final = random.Random(len(chains))

    async def during(self, phase: Awaitable[object]) -> list[float]:
        """Milliseconds of each resolve until `phase` is over. Raises AnswerTooShort for a miss."""
        samples: list[float] = []
        waiting = asyncio.ensure_future(phase)
        try:
            async with asyncio.timeout(PHASE_S):
                while not waiting.done() or not samples:
                    message = self._random.choice(self._messages)
                    began = time.perf_counter()
                    await self._stream.write(message)
                    answer = await self._stream.read()
                    samples.append((time.perf_counter() - began) * 1e3)
                    if not isinstance(answer, bytes) or len(answer) < PAYLOAD_BYTES:
                        raise AnswerTooShort("the registry does not find what it holds")
                    await asyncio.sleep(PROBE_PAUSE_S)
                await waiting
        finally:
            waiting.cancel()
        return samples

    def close(self) -> None:
        self._stream.cancel()


async def measure(held: int, seed: int, progress: Callable[[str], None]) -> list[Figure]:
    """Raises ProgramFailed, NotPublished, AnswerTooShort, TimeoutError."""
    section = f"a registry with {held:,} leases"
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(Program("tests.bench.registry_server", *LIMITS))
        address = f"127.0.0.1:{await port_of(registry)}"
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS))
        client = await stack.enter_async_context(RegistryClient(address))

        async def lender(name: str, number: int) -> Crowd:
            crowd = Crowd(channel, name, seed=seed + number, incarnation=bytes((number,)) * 16)
            return await stack.enter_async_context(crowd)

        steady, big, brief = await lender("steady", 1), await lender("big", 2), await lender("brief", 3)
        before_bytes = registry.resident_bytes()
        began = time.perf_counter()
        tenth, quarter = held // 10, held // 4
        for crowd, count in ((steady, held - quarter - tenth), (big, quarter)):
            progress(f"publishing {count:,} leases of {crowd.name}")
            await crowd.fill(count, ttl_ms=DAY_MS)
        await brief.fill(tenth, ttl_ms=SOON_MS, ends=True)
        rate = held / (time.perf_counter() - began)
        each_bytes = (registry.resident_bytes() - before_bytes) / held - PAYLOAD_BYTES

        prober = Prober(channel, steady.chains)
        stack.callback(prober.close)
        progress("resolves: nothing else happens")
        calm = await prober.during(asyncio.sleep(CALM_S))
        progress(f"resolves: {tenth:,} leases end at once")
        began = time.perf_counter()
        expiry = await prober.during(_after(client, tenth, brief.leap(SOON_MS)))
        expiry_s = time.perf_counter() - began
        progress(f"resolves: the lender of {quarter:,} leases is lost")
        began = time.perf_counter()
        await big.__aexit__(None, None, None)
        loss = await prober.during(_after(client, quarter, lender("big", 4)))
        loss_s = time.perf_counter() - began
        progress(f"{WATCHERS} watchers")
        return [
            _one(section, "memory of a lease, beside its payload", Unit.BYTES, each_bytes, budget=1_024),
            _one(section, "publishes, 256 a call, the caller's work included", Unit.PER_SECOND, rate),
            *_resolves(section, "nothing else happens", calm),
            *_resolves(section, f"{tenth:,} leases end at once, in {expiry_s:.1f} s", expiry, budget=10),
            *_resolves(section, f"the lender of {quarter:,} is lost, in {loss_s:.1f} s", loss, budget=10),
            *await _watch(section, registry, channel, steady),
        ]


async def _after(client: RegistryClient, events: int, start: Awaitable[object]) -> None:
    """Until the registry has told watchers of so many events more."""
    nothing = LeaseFilter(conversation=ConversationId("of-nobody"))
    first: int | None = None
    async with aclosing(client.watch(nothing)) as news:
        async for heard in news:
            if first is None:
                first = heard.revision
                await start
            elif heard.revision - first >= events:
                return


async def _watch(section: str, registry: Program, channel: grpc.aio.Channel, lender: Crowd) -> list[Figure]:
    """One publish at a time, until the last of many watchers has it."""
    watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/kvlease.v1.Registry/Watch")
    request = pb.WatchRequest(tenant=TENANT).SerializeToString()
    streams = [watch(request) for _ in range(WATCHERS)]
    try:
        async with asyncio.timeout(PHASE_S):
            await asyncio.gather(*(stream.read() for stream in streams))
            samples: list[float] = []
            before_ns = registry.cpu_ns()
            for _ in range(WATCHED):
                heard = asyncio.gather(*(stream.read() for stream in streams))
                began = time.perf_counter()
                await lender.fill(1, ttl_ms=DAY_MS)
                await heard
                samples.append((time.perf_counter() - began) * 1e3)
            cpu_us = (registry.cpu_ns() - before_ns) / 1e3 / (WATCHED * WATCHERS)
    finally:
        for stream in streams:
            stream.cancel()
    name = f"publish to the last of {WATCHERS} watchers"
    note = "the caller, who is all the watchers, included"
    return [
        _spread(section, f"{name}, p50", 0.5, samples, note=note),
        _spread(section, f"{name}, p99", 0.99, samples),
        _one(section, f"{name}, server's CPU for each", Unit.MICROSECONDS, cpu_us),
    ]


def _question(chain: bytes) -> bytes:
    request = pb.ResolveRequest(tenant=TENANT, digests=chain, stride_tokens=64, fingerprint_hash=FINGERPRINT)
    item = pb.CorrelatedResolve(correlation_id=1, request=request)
    return pb.ResolveStreamRequest(requests=[item]).SerializeToString()


def _resolves(section: str, name: str, samples: Sequence[float], *, budget: float | None = None) -> list[Figure]:
    note = f"{len(samples)} resolves, the longest {max(samples):.0f} ms"
    return [
        _spread(section, f"resolve, {name}: p50", 0.5, samples),
        _spread(section, f"resolve, {name}: p99", 0.99, samples, budget=budget, note=note),
    ]


def _spread(
    section: str, name: str, share: float, samples: Sequence[float], *, budget: float | None = None, note: str = ""
) -> Figure:
    """A quantile of single calls, with their quartiles (or itself, if it is beyond them)."""
    value = quantile(samples, share)
    return Figure(
        section=section,
        name=name,
        unit=Unit.MILLISECONDS,
        value=value,
        low=quantile(samples, 0.25),
        high=max(value, quantile(samples, 0.75)),
        budget=at_most(budget) if budget is not None else None,
        note=note,
    )


def _one(section: str, name: str, unit: Unit, value: float, *, budget: float | None = None) -> Figure:
    limit = at_most(budget) if budget is not None else None
    return Figure(section=section, name=name, unit=unit, value=value, low=value, high=value, budget=limit)
