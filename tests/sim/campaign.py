"""Many seeds, added up: what happened, whether the faults bit, and how to repeat the first seed that went wrong.

Invariant: a run of enough seeds in which nothing was borrowed, refused, or caught in the act counts as failed, because
it has shown nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Final

from tests.sim.breaks import Straight
from tests.sim.breaks_named import BREAKS
from tests.sim.plan import replicated
from tests.sim.simulation import Outcome, run_seed

ENOUGH_SEEDS: Final = 200
"""From here on, a run must have seen the faults bite."""
_OF_REPLICAS: Final = (
    "ends_acknowledged",
    "ends_outlived_replicas",
    "unavailable",
    "loads",
    "expiries",
    "restores",
    "twins",
)
MUST_HAPPEN: Final = ("used", "refused", "overlap", "moved", "renewal_at_limit", *_OF_REPLICAS)
_CHUNK: Final = 50
_IN_FULL: Final = 5
"""So many red seeds are told with what they found and how to repeat them, the others on one line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How to run each seed, by names that another process understands: "" is honest, on the seed's own plan."""

    broken: str = ""
    sharpened: str = ""
    replicated: bool = False
    """Every seed has replicas on a store."""

    def run(self, seed: int) -> Outcome:
        makings = BREAKS[self.broken]() if self.broken else Straight()
        sharpen = BREAKS[self.sharpened]().sharpen if self.sharpened else makings.sharpen
        if self.replicated:
            return run_seed(seed, makings, sharpen=lambda plan: replicated(sharpen(plan)))
        return run_seed(seed, makings, sharpen=sharpen)

    def command(self, seed: int) -> str:
        """One line that repeats this seed."""
        options = f" --break {self.broken}" if self.broken else ""
        options += " --replicas" if self.replicated else ""
        options += f" --sharpen {self.sharpened}" if self.sharpened else ""
        return f"python -m tests.sim --seeds 1 --start {seed}{options}"


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a run of seeds came to."""

    how: How
    seeds: int = 0
    steps: int = 0
    agreed_ms: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    red: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.steps += outcome.steps
        self.agreed_ms = max(self.agreed_ms, outcome.agreed_ms)
        self.counts += outcome.counts
        if outcome.violations:
            self.red.append(outcome)

    def missing(self) -> list[str]:
        """What should have happened in so many seeds and did not."""
        if self.seeds < ENOUGH_SEEDS:
            return []
        return [name for name in MUST_HAPPEN if not self.counts[name]]

    @property
    def good(self) -> bool:
        return not self.red and not self.missing()

    def report(self) -> Iterator[str]:
        """Lines for people; on failure the seed and how to repeat it come first."""
        for outcome in self.red[:_IN_FULL]:
            yield f"seed {outcome.seed}: {self.how.command(outcome.seed)}"
            yield from (f"    {violation}" for violation in outcome.violations[:5])
        yield from (f"seed {outcome.seed}: {outcome.violations[0]}" for outcome in self.red[_IN_FULL:])
        if self.missing():
            yield f"the faults did not bite: never {', '.join(self.missing())} in {self.seeds} seeds"
        yield f"{self.seeds} seeds, {self.steps} steps, {len(self.red)} red, agreed within {self.agreed_ms} ms"
        names = sorted(name for name in self.counts if self.counts[name])
        yield "  ".join(f"{name}={self.counts[name]}" for name in names)


def campaign(
    seeds: Iterable[int],
    how: How,
    *,
    workers: int = 1,
    on_outcome: Callable[[Outcome], None] | None = None,
    stop_at_red: bool = False,
) -> Tally:
    """Runs the seeds, in `workers` processes; the tally is the same for any number of them."""
    tally = Tally(how=how)
    for outcome in _outcomes(seeds, how, workers):
        tally.add(outcome)
        if on_outcome is not None:
            on_outcome(outcome)
        if stop_at_red and outcome.violations:
            break
    return tally


def seeds_until(over: Callable[[], bool], *, start: int) -> Iterator[int]:
    """Seeds from `start` on, one after another; `over` is asked before each. Some workers' shares more are run."""
    for seed in count(start):
        if over():
            return
        yield seed


def _outcomes(seeds: Iterable[int], how: How, workers: int) -> Iterator[Outcome]:
    if workers <= 1:
        yield from map(how.run, seeds)
        return
    remaining = iter(seeds)
    with ProcessPoolExecutor(workers) as pool:
        while chunk := list(islice(remaining, _CHUNK * workers)):
            yield from pool.map(how.run, chunk, chunksize=_CHUNK // 5)
