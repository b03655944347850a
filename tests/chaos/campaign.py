"""A chaos run from beginning to end: rounds of faults under load, each followed by a time in which all must agree.

The same seed chooses the same faults, though not at the same instants of the parties. What is wrong is the judge's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvlease.etcd import EtcdClient, EtcdError

from tests.chaos.faults import Deed, Faults, Kind
from tests.chaos.fleet import STORE_PREFIX, Fleet, FleetSettings, fleet
from tests.chaos.judge import Judge
from tests.chaos.probes import Probes, open_probes

CONVERGE_S: Final = 10.0
SLACK_S: Final = 1.0
READY_S: Final = 60.0
LOOK_S: Final = 0.1
ROUND_S: Final = 20.0
ASK_S: Final = 5.0
EXPLAINED: Final = 5
AT_ONCE: Final = 3
"""Faults at the same time, at most."""


@dataclass(slots=True)
class Result:
    """What a run saw."""

    seed: int
    findings: list[str]
    log: list[Deed]
    rounds: int = 0
    settled_s: list[float] = field(default_factory=list)
    """How long after each round's faults all agreed."""
    figures: dict[str, Any] = field(default_factory=dict)
    waited_for: str = ""
    """What was seen last that did not agree."""
    stories: list[str] = field(default_factory=list)
    """What is known of leases that something was wrong with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignSettings:
    fleet: FleetSettings
    seconds: float
    kinds: tuple[Kind, ...] = ()
    """Only these faults; none: all that the machine can do."""
    stop_at_first: bool = True


async def run(settings: CampaignSettings, say: Callable[[str], None]) -> Result:
    """Raises EtcdMissing, EtcdFailed, NetworkFailed if the run cannot be made."""
    seed = settings.fleet.seed
    dice = random.Random(seed)
    judge = Judge(bound_s=settings.fleet.max_staleness_ms / 1_000, slack_s=SLACK_S)
    async with fleet(settings.fleet, judge) as parties, open_probes(parties, random.Random(seed + 1)) as probes:
        faults = Faults(parties, dice, lambda deed: say(str(deed)))
        result = Result(seed=seed, findings=judge.findings, log=faults.log)
        if faults.left_out:
            say(f"LEFT OUT, not permitted or not installed here: {', '.join(sorted(faults.left_out))}")
        try:
            await _settle(parties, probes, result, limit_s=READY_S)
            result.settled_s.clear()
            looking = [asyncio.create_task(probes.look(name)) for name in parties.replica_names]
            end_s = time.monotonic() + settings.seconds
            while time.monotonic() < end_s and not (judge.findings and settings.stop_at_first):
                await _round(parties, probes, faults, dice, settings, result, end_s)
                waited = f"{result.settled_s[-1]:.1f} s after the faults; last seen before: {result.waited_for}"
                say(f"round {result.rounds}: all agreed {waited}")
            for task in looking:
                task.cancel()
            await asyncio.gather(*looking, return_exceptions=True)
            _check_worth(parties, judge, result)
        finally:
            result.figures = {
                **parties.figures(),
                "ends": probes.ends,
                "renewals": probes.renewals,
                "answers": judge.answers,
                "refused": probes.refused,
                "checked_after_end": judge.checked_after_end,
                "checked_alone": judge.checked_alone,
                "faults": {kind.value: count for kind, count in sorted(faults.done.items())},
            }
    return result


async def _round(
    parties: Fleet,
    probes: Probes,
    faults: Faults,
    dice: random.Random,
    settings: CampaignSettings,
    result: Result,
    end_s: float,
) -> None:
    """Load and faults for a while; then no faults, and everything has to agree in time."""
    result.rounds += 1
    parties.tell_lenders("work")
    ordering = asyncio.create_task(probes.order())
    round_s = min(time.monotonic() + ROUND_S, end_s)
    pending: set[asyncio.Task[None]] = set()
    while (left_s := round_s - time.monotonic()) > 0:
        if len(pending) < AT_ONCE:
            pending.add(asyncio.create_task(faults.one(dice.choice(settings.kinds) if settings.kinds else None)))
        await asyncio.sleep(min(left_s, dice.uniform(0.2, 4.0)))
        for task in [x for x in pending if x.done()]:
            pending.discard(task)
            task.result()
    await asyncio.gather(*pending)
    ordering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ordering
    await faults.heal()
    await _settle(parties, probes, result, limit_s=CONVERGE_S)


async def _settle(parties: Fleet, probes: Probes, result: Result, *, limit_s: float) -> None:
    """Wait until lenders and replicas agree; if they do not in time, say what differs."""
    began_s = time.monotonic()
    judge, result.waited_for = parties.judge, "nothing"
    while True:
        # The first look does not stop the turns: a fleet that agrees only when nothing happens would be no use.
        parties.tell_lenders("rest")
        held = await parties.held()
        told = await probes.told()
        after_s = time.monotonic() - began_s
        if await parties.note_deaths():  # one fault more, which has just ended
            began_s = time.monotonic()
            continue
        silent = [name for name in parties.lender_names if name not in held]
        unlike = [f"{name} is silent" for name in silent] + judge.differences(held, told)
        if unlike:
            result.waited_for = unlike[0]
        if not silent and judge.settled(held, told):
            result.settled_s.append(after_s)
            return
        if after_s > limit_s:
            result.settled_s.append(after_s)
            if silent:
                judge.ended_by_itself(f"{', '.join(silent)} did not say what it holds {after_s:.1f} s after the faults")
            judge.not_settled(after_s, held, told)
            await _explain(parties, result, held, told)
            return
        await asyncio.sleep(LOOK_S)


async def _explain(
    parties: Fleet,
    result: Result,
    held: dict[str, dict[str, str]],
    told: dict[str, dict[str, dict[str, str]] | str],
) -> None:
    """What is known of leases about which there is no agreement: their stories, and what the store has."""
    every = [*held.values(), *(leases for view in told.values() if isinstance(view, dict) for leases in view.values())]
    names = {name for leases in every for name in leases}
    unclear = sorted(name for name in names if sum(name in leases for leases in every) != len(told) + 1)
    for name in unclear[:EXPLAINED]:
        result.stories += parties.journal.about(name)
    try:
        async with asyncio.timeout(ASK_S), EtcdClient(parties.cluster.endpoints) as etcd:
            async for page in etcd.pages(STORE_PREFIX.encode()):
                for kv in page.kvs:
                    key = kv.key.decode(errors="replace")
                    if "/leases/" not in key or key.rpartition("/")[2] in unclear[:EXPLAINED]:
                        result.stories.append(f"{key} at revision {kv.mod_revision}, version {kv.version}")
    except (EtcdError, TimeoutError) as error:
        result.stories.append(f"etcd: {error}")


def _check_worth(parties: Fleet, judge: Judge, result: Result) -> None:
    """A run in which nothing could go wrong shows nothing."""
    figures = parties.figures()
    if not figures["right"] or not figures["acknowledged"]:
        judge.ended_by_itself(f"nothing was lent and read: {json.dumps(figures)}")


def describe(result: Result, folder: Path) -> list[str]:
    """The end of a run, in lines."""
    lines = [f"seed {result.seed}, {result.rounds} rounds, {len(result.log)} lines of faults"]
    if result.settled_s:
        ordered = sorted(result.settled_s)
        lines.append(f"agreed after faults: median {ordered[len(ordered) // 2]:.1f} s, longest {ordered[-1]:.1f} s")
    lines += [f"{name}: {json.dumps(value)}" for name, value in result.figures.items()]
    if result.findings:
        lines += ["", f"WRONG, seed {result.seed}:", *(f"  {sentence}" for sentence in result.findings)]
        lines += [f"  {story}" for story in result.stories]
        lines += [f"logs of all processes: {folder}", "faults:", *(f"  {deed}" for deed in result.log[-80:])]
    else:
        lines.append("nothing was wrong")
    return lines
