"""`python -m tests.chaos`: real etcd members, registries, lenders and borrowers, and what goes wrong in a data center.

Ends with status 1 if the judge found anything; then the seed, the faults and what was wrong are printed. Runs in
network namespaces of its own where that is permitted; where not, the faults that need them are left out, and said so.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.campaign import CampaignSettings, describe, run
from tests.chaos.faults import Kind
from tests.chaos.fleet import STALENESS_MS, FleetSettings
from tests.chaos.network import enter_own_namespaces
from tests.etcd.cluster import EtcdMissing
from tests.nixl.messages import Fault


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="chooses the faults (default: random)")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--max-staleness-ms", type=int, default=STALENESS_MS)
    parser.add_argument("--only", type=Kind, choices=list(Kind), action="append", default=[], help="only such faults")
    parser.add_argument("--break", dest="fault", type=Fault, choices=list(Fault), default=Fault.NONE)
    parser.add_argument("--break-registry", default="", help="a rule of tests.chaos.breaks that registries leave out")
    parser.add_argument("--older", type=Path, help="a checkout of another release, which the first replica runs")
    parser.add_argument("--keep", action="store_true", help="keep the logs of a run in which nothing was wrong")
    return parser.parse_args(arguments)


async def main(options: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="kvlease-chaos-"))
    settings = CampaignSettings(
        fleet=FleetSettings(
            folder=folder,
            seed=options.seed,
            replicas=options.replicas,
            max_staleness_ms=options.max_staleness_ms,
            fault=options.fault,
            registry_break=options.break_registry,
            older=options.older,
        ),
        seconds=options.minutes * 60,
        kinds=tuple(options.only),
    )
    print(
        f"seed {options.seed}, {options.minutes:g} minutes, {options.replicas} replicas; logs in {folder}", flush=True
    )
    task = asyncio.ensure_future(run(settings, lambda line: print(line, flush=True)))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        result = await task
    except EtcdMissing as error:
        print(error)
        return 2
    for line in describe(result, folder):
        print(line)
    if not result.findings and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if result.findings else 0


if __name__ == "__main__":
    chosen = parse(sys.argv[1:])
    enter_own_namespaces(
        ["-m", "tests.chaos", *sys.argv[1:], *([] if "--seed" in sys.argv else ["--seed", str(chosen.seed)])]
    )
    sys.exit(asyncio.run(main(chosen)))
