"""A fuzz run: a real registry in a process of its own, attackers on connections of their own, an honest caller beside.

Reports what came of every message, how the server's memory went, and what the honest caller's resolves took: alone
while messages are made and not sent, which takes a core here; beside as many callers, as busy, whose messages are all
well-formed; and beside the attackers. The registry's limits are set low, so that what it may keep is kept after a short
while and memory that grows after that is a leak.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import grpc.aio
from kvlease.registry.client_channel import CLIENT_OPTIONS

from tests.bench.figures import quantile
from tests.bench.registry_sections import port_of
from tests.bench.served import Program
from tests.fuzz.attack import Attacker, Verdicts, rpcs
from tests.fuzz.messages import Maker

ATTACKERS: Final = 4
ROUNDS: Final = 10
"""Of the honest caller without an attack, each way."""
LOOKS: Final = 100
"""At the server's memory, at equal distances."""
ROUND_S: Final = 120.0
LIMITS: Final = (
    *("--keep-events", "2048"),
    *("--max-engines", "64", "--max-tenants", "64", "--max-leases-per-engine", "500"),
    *("--max-aliases-per-tenant", "500", "--max-watchers", "64", "--max-resolve-streams", "64"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run found. Times in milliseconds."""

    verdicts: Verdicts
    memory_bytes: Sequence[int]
    """Of the server, after each hundredth of the messages."""
    alone_p99_ms: float
    busy_p99_ms: float
    """Beside callers whose messages are well-formed."""
    beside_p99_ms: float
    """Beside the attackers."""
    honest_resolves: int

    @property
    def floors_bytes(self) -> tuple[int, ...]:
        """The least in each quarter of the run: buffers of huge messages come and go above what is kept."""
        quarter = max(1, len(self.memory_bytes) // 4)
        return tuple(min(self.memory_bytes[n : n + quarter]) for n in range(0, 4 * quarter, quarter))

    @property
    def grown_bytes(self) -> int:
        """From the second quarter, by which caches are full, to the last."""
        _, second, _, last = self.floors_bytes
        return last - second


async def run(messages: int, seed: int, on_progress: Callable[[int], None] = lambda sent: None) -> Result:
    """Raises ProgramFailed if the server or the honest caller ends."""
    verdicts = Verdicts()
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(Program("tests.bench.registry_server", *LIMITS))
        port = await port_of(registry)
        honest = await stack.enter_async_context(Program("tests.fuzz.honest_caller", str(port)))
        alone = await _alone(honest, seed)
        busy = await _busy(honest, port, seed)
        memory_bytes: list[int] = []

        def sent() -> bool:
            while LOOKS * verdicts.messages >= (len(memory_bytes) + 1) * messages:
                memory_bytes.append(registry.resident_bytes())
            on_progress(verdicts.messages)
            return verdicts.messages < messages

        beside: list[float] = []

        async def listen() -> None:
            while True:
                beside.extend(await _round(honest))

        async with asyncio.TaskGroup() as group:
            listener = group.create_task(listen())
            makers = [Maker(seed * ATTACKERS + number) for number in range(ATTACKERS)]
            attackers = [group.create_task(_call(port, maker, verdicts, sent)) for maker in makers]
            await asyncio.wait(attackers)
            listener.cancel()
        beside += await _round(honest)  # it is still served, and a short run has samples too
        return Result(
            verdicts=verdicts,
            memory_bytes=memory_bytes,
            alone_p99_ms=quantile(alone, 0.99),
            busy_p99_ms=quantile(busy, 0.99),
            beside_p99_ms=quantile(beside, 0.99),
            honest_resolves=len(beside),
        )


async def _call(port: int, maker: Maker, verdicts: Verdicts, goes_on: Callable[[], bool]) -> None:
    """Rounds over every rpc on a connection of its own, as long as `goes_on` says so."""
    options = (*CLIENT_OPTIONS, ("grpc.max_send_message_length", -1))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        attacker = Attacker(channel, maker, verdicts)
        while goes_on():
            for rpc in rpcs():
                await attacker.call(rpc)


async def _alone(honest: Program, seed: int) -> list[float]:
    """The honest caller while messages are made and none is sent: attackers do not share the registry's machine."""
    maker, over = Maker(seed), asyncio.Event()

    async def make() -> None:
        while not over.is_set():
            for rpc in rpcs():
                maker.make(rpc)
            await asyncio.sleep(0)

    making = asyncio.create_task(make())
    try:
        return [sample for _ in range(ROUNDS) for sample in await _round(honest)]
    finally:
        over.set()
        await making


async def _busy(honest: Program, port: int, seed: int) -> list[float]:
    """The honest caller beside as many callers as there will be attackers, who send nothing but what is well-formed."""
    over, verdicts = asyncio.Event(), Verdicts()
    async with asyncio.TaskGroup() as group:
        for number in range(ATTACKERS):
            maker = Maker(seed * ATTACKERS + number, well_formed=True)
            group.create_task(_call(port, maker, verdicts, lambda: not over.is_set()))
        samples = [sample for _ in range(ROUNDS) for sample in await _round(honest)]
        over.set()
    return samples


async def _round(honest: Program) -> list[float]:
    said = await honest.line(timeout_s=ROUND_S)
    assert isinstance(said, list)
    return [float(sample) for sample in said]
