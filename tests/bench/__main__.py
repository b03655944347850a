"""`python -m tests.bench`: what kvlease costs beside the least that could be, as a table and as JSON.

Sections: the registry over sockets against a bare grpc.aio echo, what identity costs, etcd as the store, a registry
with a million leases, the router before engines that take no time, the connector's hooks on an engine's thread, the
seal check over NIXL.
Figures are held to the budgets of registry/DESIGN.md, section 8; only with --check (or CHECK=1) does a missed one
change the exit status. A section whose libraries are missing is reported as not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rich.console import Console

from tests.bench import engine_sections, etcd_bench, identity_bench, registry_sections, router_bench, scale_bench
from tests.bench.effort import FULL, QUICK, Effort
from tests.bench.figures import Figure
from tests.bench.report import Report, show, write_json
from tests.etcd.cluster import ETCD, EtcdMissing, binary

Progress = Callable[[str], None]
Section = Callable[[Effort, Progress], Awaitable[list[Figure]]]

SEED: Final = 20_261
PAPER_COLUMNS: Final = 160
"""Width of the tables where there is no terminal to ask."""
NEEDS: Final = {
    "registry": "uvloop",
    "identity": "uvloop",
    "etcd": "uvloop",
    "scale": "uvloop",
    "router": "aiohttp",
    "connector": "vllm",
    "seals": "nixl",
}
"""Sections, and the package without which each cannot run."""


async def registry(effort: Effort, progress: Progress) -> list[Figure]:
    return await registry_sections.measure(effort, SEED, progress)


async def identity(effort: Effort, progress: Progress) -> list[Figure]:
    return await identity_bench.measure(effort, SEED, progress)


async def etcd(effort: Effort, progress: Progress) -> list[Figure]:
    return await etcd_bench.measure(effort, SEED, progress)


async def scale(effort: Effort, progress: Progress) -> list[Figure]:
    return await scale_bench.measure(effort.held, SEED, progress)


async def router(effort: Effort, progress: Progress) -> list[Figure]:
    return await router_bench.measure(effort, SEED, progress)


SECTIONS: Final[dict[str, Section]] = {
    "registry": registry,
    "identity": identity,
    "etcd": etcd,
    "scale": scale,
    "router": router,
    "connector": engine_sections.connector,
    "seals": engine_sections.seals,
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Latency, rate and cost of kvlease, held to its budgets."
    )
    parser.add_argument("--quick", action="store_true", help="a few samples of everything: shows only that it runs")
    parser.add_argument("--only", choices=list(SECTIONS), action="append", help="this section; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument(
        "--check",
        action="store_true",
        default=os.environ.get("CHECK", "") not in ("", "0"),
        help="exit with status 1 if a budget is missed or a section could not be measured (also: CHECK=1)",
    )
    return parser.parse_args(arguments)


async def run(names: Sequence[str], effort: Effort, progress: Progress) -> Report:
    """One section after the other, since they share the machine's cores; all at once where figures mean nothing."""
    began = time.monotonic()
    load = os.getloadavg()[0]
    missing = {name: why for name in names if (why := _lacks(name))}
    sections = [SECTIONS[name] for name in names if name not in missing]
    if effort is QUICK:
        found = await asyncio.gather(*(section(effort, progress) for section in sections))
    else:
        found = [await section(effort, progress) for section in sections]
    return Report(
        quick=effort is QUICK,
        seconds=time.monotonic() - began,
        load=load,
        figures=tuple(figure for figures in found for figure in figures),
        skipped=tuple(missing.items()),
    )


def _lacks(name: str) -> str:
    """Why a section cannot run here; "" if it can."""
    if find_spec(NEEDS[name]) is None:
        return f"the package {NEEDS[name]} is not installed"
    if name == "etcd":
        try:
            binary(ETCD, "etcd", "etcd-server")
        except EtcdMissing as error:
            return str(error)
    return ""


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PAPER_COLUMNS)
    with console.status("starting") as status:
        report = asyncio.run(run(options.only or list(SECTIONS), QUICK if options.quick else FULL, status.update))
    show(report, console)
    if options.json is not None:
        write_json(report, options.json)
    return 1 if options.check and not report.kept else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
