"""`python -m tests.fuzz --messages 100000 --seed 1`: random and broken messages over every rpc of a real registry.

Exit status 1 if an answer was not a typed one, or the registry or the honest caller beside it failed. With --check (or
CHECK=1) also if memory grew, or the honest caller's p99 was more than twice what it is beside as many busy callers who
send nothing but what is well-formed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Final

from tests.fuzz.campaign import Result, run

MOST_GROWN_BYTES: Final = 16 * 1024 * 1024
MOST_SLOWER: Final = 2.0
SHOWN_FAULTS: Final = 20
MIB: Final = 1024 * 1024


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random and broken messages over every rpc of a real registry."
    )
    parser.add_argument("--messages", type=int, default=10_000, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (default %(default)s)")
    parser.add_argument(
        "--check",
        action="store_true",
        default=os.environ.get("CHECK", "") not in ("", "0"),
        help="also fail if memory grew, or bad messages slow an honest caller more than twice as much as good ones "
        "(also: CHECK=1)",
    )
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    began = time.monotonic()
    result = asyncio.run(run(options.messages, options.seed, _progress))
    _show(result, time.monotonic() - began)
    good = not result.verdicts.faults and (not options.check or _is_calm(result))
    return 0 if good else 1


def _is_calm(result: Result) -> bool:
    return result.grown_bytes <= MOST_GROWN_BYTES and result.beside_p99_ms <= MOST_SLOWER * result.busy_p99_ms


def _progress(sent: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{sent:,} messages", end="", file=sys.stderr, flush=True)


def _show(result: Result, seconds: float) -> None:
    verdicts = result.verdicts
    print(f"{verdicts.messages:,} messages in {sum(verdicts.outcomes.values()):,} calls, {seconds:.0f} s")
    for (rpc, outcome), count in sorted(verdicts.outcomes.items()):
        print(f"  {rpc:18} {outcome:22} {count:9,}")
    print("server's memory, MiB: " + " ".join(f"{x / MIB:.0f}" for x in result.memory_bytes[9::10]))
    print("the least of each quarter, MiB: " + " ".join(f"{x / MIB:.0f}" for x in result.floors_bytes))
    print(
        f"honest caller: {result.honest_resolves:,} resolves found their lease; "
        f"p99 {result.alone_p99_ms:.1f} ms alone, {result.busy_p99_ms:.1f} ms beside as many good callers, "
        f"{result.beside_p99_ms:.1f} ms beside the attack"
    )
    for fault in verdicts.faults[:SHOWN_FAULTS]:
        print(f"FAULT {fault}")
    print(f"{len(verdicts.faults)} faults")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
