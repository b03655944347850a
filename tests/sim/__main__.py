"""`python -m tests.sim`: run seeds of the simulation and say what came of them.

With --minutes, as many seeds as the time allows, from a first one that is another one each day.
Exit status 0: every seed clean and the faults bit, or, with --break, the broken rule was caught; 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from tests.sim.breaks_named import BREAKS
from tests.sim.campaign import How, campaign, seeds_until
from tests.sim.simulation import Outcome

SEEDS_A_DAY: Final = 10_000_000
"""Between the first seeds of two days: more than a day's run gets through, so that no day repeats another's."""


def seed_of_the_day() -> int:
    """The same for a whole day of UTC."""
    return datetime.now(UTC).date().toordinal() * SEEDS_A_DAY


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description="Seeded simulation of the safety contract."
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seeds", type=int, default=1_000, help="how many seeds (default 1000)")
    length.add_argument("--minutes", type=float, help="as many seeds as this time allows")
    parser.add_argument("--start", type=int, help="the first seed (default 0; with --minutes, one for today)")
    parser.add_argument("--replicas", action="store_true", help="replicas on a store in every seed")
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--break", dest="broken", choices=sorted(BREAKS), default="", help="break this rule by hand")
    parser.add_argument("--sharpen", choices=sorted(BREAKS), default="", help="honest, on the plans of this break")
    parser.add_argument("--verbose", action="store_true", help="a line for each seed")
    options = parser.parse_args(arguments)
    how = How(broken=options.broken, sharpened=options.sharpen, replicated=options.replicas)
    timed = options.minutes is not None
    started = time.monotonic()
    done = 0

    def told(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if options.verbose:
            verdict = "RED" if outcome.violations else "ok"
            print(f"seed {outcome.seed} {verdict} used={outcome.counts['used']} refused={outcome.counts['refused']}")
        elif sys.stderr.isatty() and done % 20 == 0:
            print(f"\r{done}" if timed else f"\r{done}/{options.seeds}", end="", file=sys.stderr, flush=True)

    seeds: Iterable[int]
    if timed:
        start = seed_of_the_day() if options.start is None else options.start
        print(f"seeds from {start}, for {options.minutes:g} minutes", flush=True)
        seeds = seeds_until(lambda: time.monotonic() - started >= 60 * options.minutes, start=start)
    else:
        start = options.start or 0
        seeds = range(start, start + options.seeds)
    tally = campaign(seeds, how, workers=options.workers, on_outcome=told)
    for line in tally.report():
        print(line)
    elapsed = time.monotonic() - started
    print(f"{elapsed:.1f} s, {1000 * elapsed / max(1, tally.seeds):.1f} ms a seed")
    if options.broken:
        print("caught" if tally.red else f"{options.broken} was NOT caught")
        return 0 if tally.red else 1
    return 0 if tally.good else 1


if __name__ == "__main__":
    sys.exit(main())
