"""What a caller of the product's own client sees: resolves by `RegistryClient`, beside a bare echo on a stream.

Here the caller's work counts: checking and encoding the question, joining the batch, decoding the answer. The registry
behind it is the same as in `resolve_bench.py`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Final

from kvlease.registry.client import RegistryClient
from kvlease.registry.values import Hit
from kvlease.registry.wire_resolve import encode_answer, encode_query

from tests.bench.echo_server import BYTES_SERVICE
from tests.bench.effort import Effort
from tests.bench.figures import Figure, Unit, over_rounds, quantile
from tests.bench.payloads import Turn
from tests.bench.resolve_bench import DISTINCT, echo_of
from tests.bench.wire import AnswerTooShort, Script, Wire

RESOLVE_MS: Final = 2_000
CALLERS: Final = 64


class ClientBench:
    """One client, one echo to compare with."""

    def __init__(self, client: RegistryClient, echo: Wire, effort: Effort, *, seed: int) -> None:
        self._client: Final = client
        self._echo: Final = echo
        self._effort: Final = effort
        self._random: Final = random.Random(seed)

    async def run(self, turns: Mapping[str, Sequence[Turn]]) -> list[Figure]:
        figures: list[Figure] = []
        for size, held in turns.items():
            figures += await self._size(size, held)
        return figures

    async def _size(self, size: str, turns: Sequence[Turn]) -> list[Figure]:
        section = f"resolve by the client, {size}-token leases"
        chosen = self._random.sample(turns, min(DISTINCT, len(turns)))
        answer_bytes = encode_answer(await self._resolve(chosen[0])).ByteSize()
        requests = [encode_query(turn.query).SerializeToString() for turn in chosen]
        script = Script(
            method=f"/{BYTES_SERVICE}/Stream", requests=echo_of(requests, answer_bytes), least_bytes=answer_bytes
        )
        p50: list[float] = []
        p99: list[float] = []
        ratios: list[float] = []
        rates: list[float] = []
        for _ in range(self._effort.rounds):
            echo_us = quantile(await self._echo.stream_latencies(script, self._effort.calls), 0.5)
            samples = await self._latencies(chosen)
            p50.append(quantile(samples, 0.5))
            p99.append(quantile(samples, 0.99))
            ratios.append(p50[-1] / echo_us)
            rates.append(await self._rate(chosen))
        return [
            over_rounds(section, "one caller, p50", Unit.MICROSECONDS, p50),
            over_rounds(section, "one caller, p99", Unit.MICROSECONDS, p99),
            over_rounds(section, "one caller, p50 / bare echo on a stream", Unit.RATIO, ratios),
            over_rounds(section, f"{CALLERS} callers, joined into batches", Unit.PER_SECOND, rates),
        ]

    async def _latencies(self, turns: Sequence[Turn]) -> list[float]:
        samples: list[float] = []
        for index in range(self._effort.calls):
            turn = turns[index % len(turns)]
            began_ns = time.perf_counter_ns()
            await self._resolve(turn)
            samples.append((time.perf_counter_ns() - began_ns) / 1e3)
        return samples

    async def _rate(self, turns: Sequence[Turn]) -> float:
        count = self._effort.many_calls
        left = iter([turns[index % len(turns)] for index in range(count)])

        async def caller() -> None:
            for turn in left:
                await self._resolve(turn)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(caller())
        return count / (time.perf_counter() - began)

    async def _resolve(self, turn: Turn) -> Hit:
        answer = await self._client.resolve(turn.query, timeout_ms=RESOLVE_MS)
        if not isinstance(answer, Hit):
            raise AnswerTooShort(f"the registry does not find what it holds: {answer}")
        return answer
