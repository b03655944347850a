"""What happens to a fleet of real processes in single cases: the store away, replicas rolled, wall clocks stepped.

All together and at random is in `test_chaos.py`, how fast the next answer comes in `failover.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.values import EngineId, LeaseFilter

from tests.chaos.failover import calling
from tests.chaos.faults import Faults
from tests.chaos.fleet import Fleet, FleetSettings, fleet
from tests.chaos.judge import Judge
from tests.chaos.party import clocks_can_step
from tests.chaos.probes import Probes, open_probes
from tests.integration.registry_peer import eventually, says_that_it_serves

pytestmark = [pytest.mark.chaos, pytest.mark.nixl, pytest.mark.timeout(300)]

AWAY_S: Final = tuple(float(x) for x in os.environ.get("KVLEASE_TEST_STORE_AWAY_S", "16").split(","))
SHORT_TTL: Final = ("--suspect-after-ms", "8000", "--session-ttl-ms", "9000")
"""So that engines' keys in etcd last for less time than etcd is away."""
AGREE_S: Final = 15.0
PATIENT_MS: Final = 2_000
STEP_S: Final = 600
SOON_S: Final = 20.0


@asynccontextmanager
async def small_fleet(folder: Path, *flags: str) -> AsyncIterator[tuple[Fleet, Probes]]:
    """Two replicas, a lender, a borrower; the lender holds something and rests, and all agree."""
    settings = FleetSettings(folder=folder, replicas=2, lenders=1, borrowers=1, flags=flags)
    judge = Judge(bound_s=settings.max_staleness_ms / 1_000, slack_s=1.0)
    async with fleet(settings, judge) as parties, open_probes(parties, random.Random(1)) as probes:
        await soon(lambda: parties.lender_news["d0"].acknowledged > 20, "leases are acknowledged")
        await soon(lambda: parties.borrower_news["p0"].last and parties.borrower_news["p0"].total("right") > 5, "read")
        parties.tell_lenders("rest")
        await agree(parties, probes)
        yield parties, probes


async def soon(condition: Callable[[], object], what: str) -> None:
    """Return when `condition` holds, or fail the test."""
    end_s = time.monotonic() + SOON_S
    while not condition():  # said by other processes, so there is no event
        assert time.monotonic() < end_s, f"waited {SOON_S:g} s: {what}"
        await asyncio.sleep(0.05)


async def agree(parties: Fleet, probes: Probes) -> dict[str, str]:
    """Wait until both replicas tell what the lender holds; what that is."""
    end_s = time.monotonic() + AGREE_S
    while True:
        held, told = await parties.held(), await probes.told()
        if held and parties.judge.settled(held, told):
            return held["d0"]
        if time.monotonic() > end_s:
            parties.judge.not_settled(AGREE_S, held, told)
            raise AssertionError(parties.judge.findings)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("away_s", AWAY_S)
async def test_serving_goes_on_without_the_store_and_nothing_is_lost_by_it(tmp_path: Path, away_s: float) -> None:
    flags = SHORT_TTL if away_s < 60 else ()
    async with small_fleet(tmp_path, *flags) as (parties, probes):
        before = await agree(parties, probes)
        turns = parties.borrower_news["p0"].last["turns"]
        await Faults(parties, random.Random(1), lambda _: None).store_away(away_s, stop=False)
        later = parties.borrower_news["p0"]
        assert later.last["turns"] > turns, "a turn waits for the registry"
        assert later.reasons().get("registry_unavailable", 0), "it was answered after the bound"
        assert await agree(parties, probes) == before
        await parties.note_deaths()
        assert not parties.judge.findings


async def test_a_step_of_wall_clocks_is_not_noticed(tmp_path: Path) -> None:
    if not clocks_can_step():
        pytest.fail("faketime is not installed: apt-get install faketime")
    async with small_fleet(tmp_path) as (parties, probes):
        before = await agree(parties, probes)
        left = await remaining_s(parties)
        for steps in ((STEP_S, -STEP_S, 0, STEP_S), (-STEP_S, STEP_S, STEP_S, 0)):
            for party, step in zip(parties.parties.values(), steps, strict=True):
                party.step_clock(step)
            lender = parties.lender_news["d0"]
            wanted = steps[list(parties.parties).index("d0")]
            await soon(lambda: abs(lender.wall_s - time.time() - wanted) < 2, "its clock was stepped")  # noqa: B023
            assert await agree(parties, probes) == before
            now_left = await remaining_s(parties)
            assert now_left.keys() == left.keys()
            assert all(left[x] - SOON_S * 2 < now_left[x] <= left[x] for x in left)
        right = parties.borrower_news["p0"].total("right")
        await soon(lambda: parties.borrower_news["p0"].total("right") > right, "turns are served")
        await parties.note_deaths()
        assert not parties.judge.findings


async def remaining_s(parties: Fleet) -> dict[str, float]:
    """How long each live lease lasts, as each replica tells it."""
    found: dict[str, float] = {}
    for name in parties.replica_names:
        async with RegistryClient(parties.endpoint(name)) as client:
            for lease in (await client.list_leases(LeaseFilter(engine_id=EngineId("d0")))).leases:
                if lease.remaining_ms > 60_000:
                    found[f"{name} {lease.lease_id}"] = lease.remaining_ms / 1_000
    assert found
    return found


async def test_no_turn_is_blind_while_replicas_are_rolled(tmp_path: Path) -> None:
    settings = FleetSettings(folder=tmp_path, replicas=2, lenders=0, borrowers=0)
    async with fleet(settings, Judge(bound_s=0, slack_s=0)) as parties, calling(parties, PATIENT_MS) as place:
        for name, party in parties.replicas.items():
            await party.terminate()
            await party.start()
            await eventually(lambda: says_that_it_serves(parties.endpoint(name)), f"{name} serves again")  # noqa: B023
            accepted = len(place.publishes.good_s)
            await soon(lambda: len(place.publishes.good_s) > accepted + 5, "publishes go on")  # noqa: B023
        resolved = [len(x.good_s) for x in place.resolves]
        await soon(lambda: all(len(x.good_s) > n for x, n in zip(place.resolves, resolved, strict=True)), "resolves")
        assert not place.blind
        assert not [party.died for party in parties.replicas.values() if party.died]
