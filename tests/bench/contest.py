"""Servers measured against each other in alternating rounds, so that the machine's noise hits all of them alike.

In each round every server does the same once, the first one changing from round to round; a ratio is made within a
round and the median taken over rounds. Processor time of the server is read beside, since it tells what a server costs
even where the caller is the bottleneck.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tests.bench.figures import Budget, Figure, Unit, over_rounds, quantile
from tests.bench.served import Program
from tests.bench.wire import Script, Wire


class Role(StrEnum):
    ECHO = "bare echo"
    MESSAGES = "message echo"
    REGISTRY = "registry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    role: Role
    program: Program
    wire: Wire


@dataclass(slots=True)
class Outcome:
    """One server, round by round."""

    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    """Processor time of the server for one item."""


Outcomes = dict[Role, Outcome]
Scripts = dict[Role, Script]


class Contest:
    """Everything that is measured between the same servers."""

    def __init__(self, contestants: Sequence[Contestant], rounds: int) -> None:
        self._contestants: Final = list(contestants)
        self._rounds: Final = rounds

    async def unary_latency(self, scripts: Scripts, count: int) -> Outcomes:
        await self._warm(scripts, stream=False)
        return await self._latency(scripts, count, Wire.unary_latencies)

    async def stream_latency(self, scripts: Scripts, count: int) -> Outcomes:
        await self._warm(scripts, stream=True)
        return await self._latency(scripts, count, Wire.stream_latencies)

    async def unary_rate(self, scripts: Scripts, count: int, *, callers: int) -> Outcomes:
        """One item a call."""

        async def seconds(wire: Wire, script: Script) -> float:
            return await wire.unary_seconds(script, count, callers=callers)

        await self._warm(scripts, stream=False)
        return await self._rate(scripts, count, seconds)

    async def stream_rate(self, scripts: Scripts, count: int, *, window: int, items: int) -> Outcomes:
        """`items` in each message are counted."""

        async def seconds(wire: Wire, script: Script) -> float:
            return await wire.stream_seconds(script, count, window=window)

        await self._warm(scripts, stream=True)
        return await self._rate(scripts, count * items, seconds)

    async def _latency(
        self, scripts: Scripts, count: int, measure: Callable[[Wire, Script, int], Awaitable[list[float]]]
    ) -> Outcomes:
        outcomes = {contestant.role: Outcome() for contestant in self._contestants if contestant.role in scripts}
        for contestant in self._turns(scripts):
            script = scripts[contestant.role]
            samples = await measure(contestant.wire, script, count)
            outcome = outcomes[contestant.role]
            outcome.p50_us.append(quantile(samples, 0.5))
            outcome.p99_us.append(quantile(samples, 0.99))
        return outcomes

    async def _rate(
        self, scripts: Scripts, items: int, measure: Callable[[Wire, Script], Awaitable[float]]
    ) -> Outcomes:
        outcomes = {contestant.role: Outcome() for contestant in self._contestants if contestant.role in scripts}
        for contestant in self._turns(scripts):
            before_ns = contestant.program.cpu_ns()
            seconds = await measure(contestant.wire, scripts[contestant.role])
            outcome = outcomes[contestant.role]
            outcome.cpu_us.append((contestant.program.cpu_ns() - before_ns) / 1e3 / items)
            outcome.per_second.append(items / seconds)
        return outcomes

    async def _warm(self, scripts: Scripts, *, stream: bool) -> None:
        for contestant in self._contestants:
            if contestant.role in scripts:
                await contestant.wire.warm(scripts[contestant.role], stream=stream)

    def _turns(self, scripts: Scripts) -> list[Contestant]:
        """Who is measured, in which order; the first round's order rotates."""
        turns = [contestant for contestant in self._contestants if contestant.role in scripts]
        order: list[Contestant] = []
        for number in range(self._rounds):
            start = number % len(turns)
            order += turns[start:] + turns[:start]
        return order


Series = Callable[[Outcome], list[float]]


def latency_figures(section: str, name: str, outcomes: Outcomes, *, budget: Budget | None = None) -> list[Figure]:
    """p50 and p99 of the registry, and its p50 over those of the echoes."""
    registry = outcomes[Role.REGISTRY]
    p50, p99 = _others(outcomes, lambda o: o.p50_us, "us"), _others(outcomes, lambda o: o.p99_us, "us")
    return [
        over_rounds(section, f"{name}, p50", Unit.MICROSECONDS, registry.p50_us, note=p50),
        over_rounds(section, f"{name}, p99", Unit.MICROSECONDS, registry.p99_us, note=p99),
        *_ratios(section, f"{name}, p50", outcomes, lambda o: o.p50_us, budget),
    ]


def rate_figures(section: str, name: str, outcomes: Outcomes, *, budget: Budget | None = None) -> list[Figure]:
    """The registry's rate, the same over the echoes', and the server's processor time for one item."""
    registry = outcomes[Role.REGISTRY]
    rate, cpu = _others(outcomes, lambda o: o.per_second, "/s"), _others(outcomes, lambda o: o.cpu_us, "us")
    return [
        over_rounds(section, name, Unit.PER_SECOND, registry.per_second, note=rate),
        *_ratios(section, name, outcomes, lambda o: o.per_second, budget),
        over_rounds(section, f"{name}, server's CPU each", Unit.MICROSECONDS, registry.cpu_us, note=cpu),
    ]


def ratio(section: str, name: str, outcomes: Outcomes, series: Series, against: Role, budget: Budget | None) -> Figure:
    """Registry over an echo, made within each round."""
    pairs = zip(series(outcomes[Role.REGISTRY]), series(outcomes[against]), strict=True)
    return over_rounds(
        section, f"{name} / {against}", Unit.RATIO, [mine / theirs for mine, theirs in pairs], budget=budget
    )


def _ratios(section: str, name: str, outcomes: Outcomes, series: Series, budget: Budget | None) -> list[Figure]:
    """The budget holds against either echo."""
    return [ratio(section, name, outcomes, series, role, budget) for role in outcomes if role is not Role.REGISTRY]


def _others(outcomes: Outcomes, series: Series, unit: str) -> str:
    """What the echoes made of the same."""
    return "; ".join(
        f"{role}: {statistics.median(series(outcome)):,.0f} {unit}"
        for role, outcome in outcomes.items()
        if role is not Role.REGISTRY
    )
