"""Time to first token of a second turn, by context: computed again, from a lease, by stock's own reuse, from P's cache.

`python -m tests.bench.ttft` (`make bench-ttft`). Three pairs of real CPU engines run side by side and every round asks
each of them in turn, so that what else the machine does hits all alike. All pairs have the decode engine's prefix cache
on; the prefill engine's is on only in the pair that shows the limit, a turn served from P's own cache. Stock's pair is
stopped while another one is measured: an engine that holds blocks for stock's reuse takes a step each millisecond, half
a core of a small machine, and would be measured in all others.

A turn is timed from the request to the prefill engine to the first streamed token of the decode engine, without a
router, as stock's published benchmark does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from tests.bench.figures import Figure, Unit, at_most, over_rounds
from tests.bench.report import Report, show, write_json
from tests.engines.chat import ids, token_ids
from tests.engines.children import Child
from tests.engines.engine import Json
from tests.engines.fleet import Fleet, FleetSettings, one_prefill_one_decode
from tests.engines.openai_client import PREFILL_ONLY, Answer, OpenAIClient

SECTION = "time to first token"
CONTEXTS = (2_000, 4_000, 8_000)
NEW_TOKENS = 84
"""Of the second turn, beyond the history: as in the published runs."""
ROUNDS = 5
OF_OWN_CACHE = at_most(1.45, goal=1.25)
"""A lease ends with a whole stride, the own cache with a whole block: at 4 000 tokens that is 32 tokens later, which
the borrower computes, a third more than the others do; at 2 000 and 8 000 both end at the same token."""
OF_OWN_CACHE_MEAN = at_most(1.25)
"""Over the contexts."""
OF_STOCK = at_most(1.10, goal=1.0)
"""A lease takes a resolve and a seal more, some 4 ms; medians of five rounds of equal work differ by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prefill and a decode engine."""

    prefill: OpenAIClient
    decode: OpenAIClient
    engines: tuple[Child, ...]

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[Pair]:
        """Running inside the block only, and asked over new connections: a server drops those that it slept through."""
        self.signal(signal.SIGCONT)
        try:
            async with OpenAIClient(self.prefill.url) as prefill, OpenAIClient(self.decode.url) as decode:
                yield replace(self, prefill=prefill, decode=decode)
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        for engine in self.engines:
            engine.signal(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The first turn: its history, and what stock's decode engine told of its blocks."""

    history: list[int]
    params: Mapping[str, Json]


async def _leg(
    engine: OpenAIClient, prompt: Sequence[int], params: Mapping[str, Json], *, max_tokens: int, stream: bool = False
) -> Answer:
    return await engine.complete(
        prompt,
        max_tokens=max_tokens,
        stream=stream,
        ignore_eos=True,
        return_tokens_as_token_ids=True,
        kv_transfer_params=dict(params),
    )


async def _first(pair: Pair, prompt: list[int], told: Mapping[str, Json]) -> Said:
    prefilled = await _leg(pair.prefill, prompt, {**PREFILL_ONLY, **told}, max_tokens=1)
    answer = await _leg(pair.decode, prompt, {**(prefilled.kv_transfer_params or {}), **told}, max_tokens=16)
    return Said(history=prompt + token_ids(answer), params=answer.kv_transfer_params or {})


async def _second(pair: Pair, prompt: list[int], params: Mapping[str, Json], told: Mapping[str, Json]) -> float:
    """Seconds to the first token."""
    began = time.perf_counter()
    prefilled = await _leg(pair.prefill, prompt, {**PREFILL_ONLY, **params, **told}, max_tokens=1)
    handed = prefilled.kv_transfer_params or {}
    handing = time.perf_counter()
    answer = await _leg(pair.decode, prompt, {**handed, **told}, max_tokens=2, stream=True)
    return handing - began + answer.ttft_s


Way = Callable[[int, int], Awaitable[float]]
"""Context in tokens and a seed to seconds."""


def ways(leases: Pair, stock: Pair, caching: Pair) -> dict[str, Way]:
    """How a second turn can be served; each plays a conversation of its own."""

    def told(seed: int) -> Mapping[str, Json]:
        return {"kvlease": {"conversation": f"ttft-{seed}"}}

    async def computed(context: int, seed: int) -> float:
        said = await _first(leases, ids(context, seed), {})
        return await _second(leases, said.history + ids(NEW_TOKENS, -seed), {}, {})

    async def from_lease(context: int, seed: int) -> float:
        said = await _first(leases, ids(context, seed), told(seed))
        return await _second(leases, said.history + ids(NEW_TOKENS, -seed), {}, told(seed))

    async def by_stock(context: int, seed: int) -> float:
        async with stock.awake() as pair:
            said = await _first(pair, ids(context, seed), {})
            return await _second(pair, said.history + ids(NEW_TOKENS, -seed), said.params, {})

    async def from_own_cache(context: int, seed: int) -> float:
        said = await _first(caching, ids(context, seed), {})
        return await _second(caching, said.history + ids(NEW_TOKENS, -seed), {}, {})

    return {"computed": computed, "kvlease": from_lease, "stock": by_stock, "own cache": from_own_cache}


async def measure(contexts: Sequence[int], rounds: int) -> list[Figure]:
    settings: dict[str, Json] = {"resolve_wait_ms": 1_000}
    async with AsyncExitStack() as stack:

        async def pair(kvlease: bool, caching: bool) -> Pair:
            engines = one_prefill_one_decode(kvlease=settings if kvlease else None, prefill_prefix_caching=caching)
            if not kvlease:
                engines = (
                    replace(engines[0], connector_extra={"bidirectional_kv_xfer": True}),
                    replace(engines[1], connector_extra={"bidirectional_kv_xfer": True}),
                )
            fleet = await stack.enter_async_context(
                Fleet(FleetSettings(engines=engines, router=False, registry=kvlease))
            )
            return Pair(
                prefill=await stack.enter_async_context(OpenAIClient(fleet.prefill_url)),
                decode=await stack.enter_async_context(OpenAIClient(fleet.decode_url)),
                engines=tuple(fleet.child(engine.engine_id) for engine in engines),
            )

        stock = await pair(False, False)
        every = ways(await pair(True, False), stock, await pair(True, True))
        stack.callback(stock.signal, signal.SIGCONT)
        for way in every.values():
            await way(200, 1)
        figures: list[Figure] = []
        of_own_cache: list[Sequence[float]] = []
        for context in contexts:
            seconds: dict[str, list[float]] = {name: [] for name in every}
            for number in range(rounds):
                for place, (name, way) in enumerate(every.items()):
                    seconds[name].append(await way(context, 100_000 + 1_000 * context + 10 * number + place))
            print(f"{context} tokens: " + ", ".join(f"{n} {statistics.median(s):.3f} s" for n, s in seconds.items()))
            figures += _figures(context, seconds)
            of_own_cache.append(_ratios(seconds, "own cache"))
        means = [statistics.mean(ratios) for ratios in zip(*of_own_cache, strict=True)]
        name = "mean of all contexts, kvlease / own cache"
        return [*figures, over_rounds(SECTION, name, Unit.RATIO, means, budget=OF_OWN_CACHE_MEAN)]


def _figures(context: int, seconds: Mapping[str, Sequence[float]]) -> list[Figure]:
    figures = [
        over_rounds(SECTION, f"{context} tokens, {name}", Unit.MILLISECONDS, [1_000 * s for s in samples])
        for name, samples in seconds.items()
    ]
    for other, budget in (("computed", None), ("stock", OF_STOCK), ("own cache", OF_OWN_CACHE)):
        name = f"{context} tokens, kvlease / {other}"
        figures.append(over_rounds(SECTION, name, Unit.RATIO, _ratios(seconds, other), budget=budget))
    return figures


def _ratios(seconds: Mapping[str, Sequence[float]], other: str) -> list[float]:
    """Round by round."""
    return [mine / theirs for mine, theirs in zip(seconds["kvlease"], seconds[other], strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ttft", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="tokens")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="fail when a budget is missed")
    options = parser.parse_args()
    load, began = os.getloadavg()[0], time.monotonic()
    figures = asyncio.run(measure(options.contexts, options.rounds))
    report = Report(quick=False, seconds=time.monotonic() - began, load=load, figures=figures)
    show(report, Console())
    if options.json:
        write_json(report, options.json)
    return int(options.check and not report.kept)


if __name__ == "__main__":
    sys.exit(main())
