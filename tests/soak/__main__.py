"""`python -m tests.soak`: mixed chats on real engines under kills, stops and cancels, each answer judged.

First a reference engine records chats by seed; then the fleets of each phase serve them, again and again, while one
disturbance follows another. Exit status 0 if nothing was wrong, 1 otherwise, 130 after Ctrl-C; everything that was
started is stopped in each case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.engines.children import ChildFailed
from tests.engines.fleet import Fleet
from tests.engines.openai_client import http_session
from tests.soak.answers import ask
from tests.soak.counters import Counters
from tests.soak.disturbances import Disturbances
from tests.soak.judge import HANG_S, Fault, Judge
from tests.soak.players import Players
from tests.soak.reference import Reference, reference
from tests.soak.report import lines, report
from tests.soak.scene import (
    Phase,
    Scene,
    chosen,
    connector_ports,
    fleet_settings,
    metric_pages,
)

WATCH_S: Final = 5.0
PROGRESS_S: Final = 60.0
EMPTY_EVERY: Final = 4
"""Disturbances between two looks at free blocks."""
WARM_UP_S: Final = 8.0


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


async def play(phase: Phase, minutes: float, options: argparse.Namespace, known: Reference) -> dict[str, Any]:
    """One phase; returns its report."""
    judge, began_s = Judge(), time.monotonic()
    ports = connector_ports(phase)
    settings = fleet_settings(phase, ports, secrets.token_hex(3))
    tell(f"{phase.name}: starting {len(settings.engines)} engines, registry and router; logs in {settings.log_dir}")
    async with Fleet(settings) as fleet, http_session(HANG_S) as http:
        counters = Counters(http, metric_pages(fleet, ports))
        scene = Scene(fleet, phase, http, counters, judge)
        # Another prompt than the recorded one, as if a block of other tokens had been read.
        probe = known.probes[0][0]
        other = {**probe.body, "messages": known.probes[1][0].body["messages"]}
        judge.control(probe, await ask(http, fleet.router_url + probe.path, other))
        players = Players(
            url=fleet.router_url,
            chats=random.Random(f"{options.seed} {phase.name}").sample(known.chats, len(known.chats)),
            judge=judge,
            gate=scene.gate,
            seed=options.seed,
            count=options.clients,
            rate=options.rate,
        )
        rng = random.Random(f"disturbances {options.seed} {phase.name}")
        disturbances = Disturbances(scene, rng, restarts_only=bool(options.restarts))
        try:
            await _until(60 * minutes, scene, players, disturbances, known, options)
        except ChildFailed as error:
            judge.fault(Fault.DIED, str(error))
        await counters.update()
    found = report(phase.name, (time.monotonic() - began_s) / 60, judge, counters, disturbances.restarts())
    for line in lines(found):
        tell(line)
    return found


async def _until(
    seconds: float,
    scene: Scene,
    players: Players,
    disturbances: Disturbances,
    known: Reference,
    options: argparse.Namespace,
) -> None:
    """Everything at once, until the time is up; then all leases end and the last look at the blocks."""
    playing = asyncio.create_task(players.run())
    watching = asyncio.create_task(_watch(scene, disturbances))
    disturbing = asyncio.create_task(_disturb(scene, disturbances, known, seconds, options))
    try:
        await asyncio.wait({playing, watching, disturbing}, return_when=asyncio.FIRST_COMPLETED)
        for task in (playing, watching, disturbing):
            if task.done():
                task.result()
        took_s = await scene.emptied("at the end")
        tell(f"{scene.phase.name}: all blocks looked at in {took_s:.0f} s at the end")
    finally:
        for task in (playing, watching, disturbing):
            task.cancel()
        await asyncio.gather(playing, watching, disturbing, return_exceptions=True)


async def _disturb(
    scene: Scene, disturbances: Disturbances, known: Reference, seconds: float, options: argparse.Namespace
) -> None:
    began_s, every_s = time.monotonic(), options.every
    restarts: int = options.restarts

    def over() -> bool:
        if restarts:
            return min(disturbances.restarts().values()) >= restarts
        return time.monotonic() - began_s >= seconds

    rng = random.Random(every_s)
    await asyncio.sleep(min(WARM_UP_S, seconds / 4))
    number = 0
    while not over():
        done = await disturbances.again()
        number += 1
        await asyncio.sleep(rng.uniform(0.5, 1.5) * every_s / 3)
        await scene.recovered(known.probes[number % len(known.probes)], done)
        tell(f"{scene.phase.name}: {done}; faults {len(scene.judge.faults)}")
        if number % EMPTY_EVERY == 0:
            took_s = await scene.emptied(f"after {done}")
            tell(f"{scene.phase.name}: all leases ended, blocks looked at in {took_s:.0f} s")
        await asyncio.sleep(rng.uniform(0.5, 1.5) * every_s * 2 / 3)


async def _watch(scene: Scene, disturbances: Disturbances) -> None:
    """Scrapes, tells how it goes, and sees processes that end by themselves: raises ChildFailed."""
    told_s = time.monotonic()
    known_faults = 0
    while True:
        await asyncio.sleep(WATCH_S)
        await scene.counters.update()
        judge = scene.judge
        for fault, what in judge.faults[known_faults:]:
            tell(f"{scene.phase.name}: FAULT {fault}: {what}")
        known_faults = len(judge.faults)
        for name in scene.fleet.names:
            if name not in disturbances.absent and scene.fleet.child(name).returncode is not None:
                child = scene.fleet.child(name)
                raise child.failure(f"ended by itself, or was killed from outside, with status {child.returncode}")
        if time.monotonic() - told_s >= PROGRESS_S:
            told_s = time.monotonic()
            counts = judge.counts
            tell(
                f"{scene.phase.name}: {counts['turns']} turns, {counts['clients that left']} left, "
                f"{counts['errors excused']} errors excused, longest {judge.longest_s:.1f} s, "
                f"reused {scene.counters.total('kvlease_borrower_reused_tokens_total'):.0f} tokens, "
                f"faults {len(judge.faults)}"
            )


async def soak(options: argparse.Namespace) -> int:
    """All phases; returns the exit status."""
    phases = chosen(options.phases)
    length = f"{options.restarts} restarts of each role" if options.restarts else f"{options.minutes:g} minutes"
    tell(f"seed {options.seed}, {length}, phases {options.phases}, {options.rate:g} turns a second")
    known = await reference(options.seed, options.chats, tell)
    tell(f"{len(known.chats)} chats, {sum(map(len, known.chats))} turns in the reference")
    reports = [await play(phase, options.minutes / len(phases), options, known) for phase in phases]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(reports, indent=1))
    clean = not any(found["faults"] for found in reports)
    tell("CLEAN" if clean else "FAILED")
    return 0 if clean else 1


async def _until_stopped(options: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await soak(options)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="for all phases together (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of chats, clients and disturbances (default 1)")
    parser.add_argument("--phases", default="1P1D,2P1D", help="with commas between (default 1P1D,2P1D)")
    parser.add_argument("--chats", type=int, default=60, help="how many different chats (default 60)")
    parser.add_argument("--clients", type=int, default=4, help="clients at once (default 4)")
    parser.add_argument("--rate", type=float, default=1.0, help="turns a second of all clients (default 1)")
    parser.add_argument("--every", type=float, default=20, help="seconds between disturbances (default 20)")
    parser.add_argument(
        "--restarts", type=int, default=0, help="instead of by time: nothing but restarts, so many of each role a phase"
    )
    parser.add_argument("--nice", type=int, default=5, help="niceness of everything (default 5)")
    parser.add_argument("--json", type=Path, help="where the report goes as well")
    options = parser.parse_args(arguments)
    os.nice(options.nice)
    try:
        return asyncio.run(_until_stopped(options))
    except ChildFailed as error:
        tell(f"FAILED: {error}")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        tell("interrupted; everything is stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
