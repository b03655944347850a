"""`python -m tests.nixl`: many READs on real NIXL agents against a lender that reuses its blocks, as a table.

Ends with status 1 on a wrong word, or if the run could not have shown one: nothing refused, nothing overlapped, nothing
accepted. With `--break` the contract is broken on purpose, and the status is 1 because the judge sees it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.nixl.messages import Counts, Fault, Transport, Workload
from tests.nixl.pair import Pair, PairSettings

SECONDS_FOR_READS = 900.0
FAULTS = "break this rule; quarantine_left_out shows only when the lender is stopped (test_pair.py)"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.nixl", description=__doc__)
    parser.add_argument("--reads", type=int, default=100_000, help="READs in all (default: %(default)s)")
    parser.add_argument("--transport", type=Transport, choices=list(Transport), default=Transport.SM)
    parser.add_argument("--borrowers", type=int, default=2)
    parser.add_argument("--block-bytes", type=int, default=4_096)
    parser.add_argument("--break", dest="fault", type=Fault, choices=list(Fault), default=Fault.NONE, help=FAULTS)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(arguments)


def shortcomings(counts: Counts) -> list[str]:
    """Why this run does not show that no wrong word is used."""
    found: list[str] = []
    if counts.wrong or counts.wrong_in_use:
        found.append(f"{counts.wrong} READs accepted with a wrong word, {counts.wrong_in_use} blocks changed in use")
    if not counts.right:
        found.append("no READ was accepted")
    if not counts.refusals:
        found.append("no READ was refused: the lender did not get in the way")
    if not counts.overlap:
        found.append("no READ was overlapped by a reuse")
    return found


def rows(counts: Counts, seconds: float) -> list[tuple[str, str]]:
    def micros(values: list[int]) -> str:
        return " / ".join(str(value) for value in values) + " us"

    return [
        ("READs", f"{counts.reads:,} in {seconds:.1f} s"),
        ("accepted, every word right", f"{counts.right:,}"),
        ("accepted, a word wrong", f"{counts.wrong:,}"),
        ("refused", f"{counts.refusals:,}"),
        *((f"  {reason}", f"{count:,}") for reason, count in sorted(counts.refused.items())),
        ("  of these with right words", f"{counts.refused_right:,}"),
        ("seal whole before, broken after", f"{counts.overlap:,}"),
        ("  of these with wrong words", f"{counts.overlap_wrong:,}"),
        ("offers turned down before a READ", f"{counts.not_asked:,}"),
        ("local blocks changed in use", f"{counts.wrong_in_use:,}"),
        ("block READ p50 / p90 / p99", micros(counts.read_us)),
        ("seal READ p50 / p90 / p99", micros(counts.seal_us)),
    ]


async def run(options: argparse.Namespace) -> int:
    workload = Workload.SAME_SLOT if options.fault is Fault.SLOT_VALUE_REUSED else Workload.CHURN
    settings = PairSettings(
        reads=options.reads,
        seed=options.seed,
        transport=options.transport,
        borrowers=options.borrowers,
        fault=options.fault,
        workload=workload,
        block_bytes=options.block_bytes,
    )
    print(f"seed {options.seed}, transport {options.transport}, {options.borrowers} borrowers, fault {options.fault}")
    async with Pair(settings) as pair:
        started = time.monotonic()
        counts = await pair.finished(SECONDS_FOR_READS)
        seconds = time.monotonic() - started
    for name, value in rows(counts, seconds):
        print(f"{name:36} {value}")
    found = shortcomings(counts)
    for sentence in found:
        print(f"FAILED: {sentence}")
    if options.json is not None:
        figures = {
            "seed": options.seed,
            "transport": options.transport,
            "fault": options.fault,
            "seconds": seconds,
            "shortcomings": found,
            **asdict(counts),
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if found else 0


async def main() -> int:
    task = asyncio.ensure_future(run(parse(sys.argv[1:])))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
