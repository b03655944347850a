"""`python -m tests.sim`: run seeds of the simulation and say what came of them.

Exit status 0: every seed clean and the faults bit, or, with --break, the broken rule was caught; 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.sim.breaks import BREAKS
from tests.sim.campaign import How, campaign
from tests.sim.simulation import Outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description="Seeded simulation of the safety contract."
    )
    parser.add_argument("--seeds", type=int, default=1_000, help="how many seeds (default 1000)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--break", dest="broken", choices=sorted(BREAKS), default="", help="break this rule by hand")
    parser.add_argument("--sharpen", choices=sorted(BREAKS), default="", help="honest, on the plans of this break")
    parser.add_argument("--verbose", action="store_true", help="a line for each seed")
    options = parser.parse_args(arguments)
    how = How(broken=options.broken, sharpened=options.sharpen)
    started = time.monotonic()
    done = 0

    def told(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if options.verbose:
            verdict = "RED" if outcome.violations else "ok"
            print(f"seed {outcome.seed} {verdict} used={outcome.counts['used']} refused={outcome.counts['refused']}")
        elif sys.stderr.isatty() and done % 20 == 0:
            print(f"\r{done}/{options.seeds}", end="", file=sys.stderr, flush=True)

    seeds = range(options.start, options.start + options.seeds)
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
