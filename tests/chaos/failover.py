"""`python -m tests.chaos.failover`: how long after a fault the next good resolve and the next accepted publish come.

Two registries on three etcd members as real processes; a connector's client whose lender has its home at one of them,
and one that resolves at the other. For each kind of fault the longest time without a good answer that began with the
fault or after it: median and worst of ten. With `--check` it ends with status 1 if a median misses the budget.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.errors import KvleaseError
from kvlease.registry.values import EndReason, Hit, LeaseId

from tests.chaos import mooncake
from tests.chaos.fleet import STALENESS_MS, Fleet, FleetSettings, fleet
from tests.chaos.judge import Judge
from tests.chaos.network import enter_own_namespaces
from tests.integration.holding_lender import HoldingLender, holding, query

BUDGET_S: Final = 2.0
TIMES: Final = 10
WINDOW_S: Final = 3.0
LONG_WINDOW_S: Final = 8.0
"""For faults of the store: a replica finds out about them after its staleness bound at the latest."""
RESOLVE_MS: Final = 50
"""What a connector waits for a resolve."""
RESOLVE_EVERY_S: Final = 0.01
PUBLISH_EVERY_S: Final = 0.02
READY_S: Final = 40.0
PUBLISH_POLL_S: Final = 0.002


@dataclass(slots=True)
class Gaps:
    """Good answers of one caller; `since` starts the measurement."""

    good_s: list[float] = field(default_factory=list)

    def longest(self, since_s: float, until_s: float) -> float:
        """The longest time without a good answer from `since_s` on."""
        times = [since_s, *(x for x in self.good_s if since_s < x < until_s), until_s]
        return max(after - before for before, after in itertools.pairwise(times))


class Place:
    """A connector's client with a lender behind it, and another client that prefers the other replica."""

    def __init__(
        self, fleet_: Fleet, lender_client: RegistryClient, other: RegistryClient, lender: HoldingLender
    ) -> None:
        self.fleet: Final = fleet_
        self._clients: Final = (lender_client, other)
        self._lender: Final = lender
        self._name: Final = secrets.token_hex(4)
        """Leases of this place only."""
        self.steady: Final = LeaseId(f"{self._name}-0")
        lender.lend(self.steady)
        self.resolves: Final = (Gaps(), Gaps())
        self.publishes: Final = Gaps()
        self.blind: Final[list[str]] = []
        """Resolves that came to nothing after the first good one, and why."""

    @property
    def home(self) -> str:
        """The replica that the lender's session is at."""
        return self._at(self._clients[0])

    @property
    def other(self) -> str:
        return next(name for name in self.fleet.replica_names if name != self.home)

    def _at(self, client: RegistryClient) -> str:
        return next((x for x in self.fleet.replica_names if self.fleet.endpoint(x) == client.address), "nowhere")

    async def resolve(self, number: int, wait_ms: int = RESOLVE_MS) -> None:
        client, gaps = self._clients[number], self.resolves[number]
        while True:
            try:
                answer = await client.resolve(query(self.steady), timeout_ms=wait_ms)
                if isinstance(answer, Hit):
                    gaps.good_s.append(time.monotonic())
                elif gaps.good_s:
                    self.blind.append(f"a miss: {answer.reason}")
            except KvleaseError as error:
                if gaps.good_s:
                    self.blind.append(str(error) or type(error).__name__)
            await asyncio.sleep(RESOLVE_EVERY_S)

    async def publish(self) -> None:
        number = 0
        while True:
            number += 1
            lease_id = LeaseId(f"{self._name}-{number}")
            self._lender.lend(lease_id)
            while lease_id not in self._lender.published:  # noqa: ASYNC110 - told by a callback without an event
                await asyncio.sleep(PUBLISH_POLL_S)
            self.publishes.good_s.append(time.monotonic())
            self._lender.on_end(lease_id, EndReason.RELEASED)
            await asyncio.sleep(PUBLISH_EVERY_S)


Fault = Callable[[Place], Awaitable[None]]


async def nothing(place: Place) -> None:
    """What a window without a fault looks like."""


async def home_killed(place: Place) -> None:
    await place.fleet.replicas[place.home].kill()


async def home_stopped(place: Place) -> None:
    place.fleet.replicas[place.home].stop()


async def home_drained(place: Place) -> None:
    place.fleet.replicas[place.home].signal_end()


async def home_cut_off(place: Place) -> None:
    """The home and all of etcd do not reach each other any more."""
    home, members = place.home, place.fleet.member_names
    place.fleet.network.cut({(home, m) for m in members} | {(m, home) for m in members})


async def other_killed(place: Place) -> None:
    await place.fleet.replicas[place.other].kill()


async def other_stopped(place: Place) -> None:
    place.fleet.replicas[place.other].stop()


async def leader_killed(place: Place) -> None:
    (await place.fleet.cluster.leader()).kill()


async def leader_stopped(place: Place) -> None:
    (await place.fleet.cluster.leader()).stop()


async def follower_killed(place: Place) -> None:
    (await place.fleet.cluster.follower()).kill()


FAULTS: Final[dict[str, tuple[Fault, float]]] = {
    "no fault": (nothing, WINDOW_S),
    "home killed": (home_killed, WINDOW_S),
    "home stopped": (home_stopped, WINDOW_S),
    "home drained": (home_drained, WINDOW_S),
    "home cut off etcd": (home_cut_off, LONG_WINDOW_S),
    "other killed": (other_killed, WINDOW_S),
    "other stopped": (other_stopped, WINDOW_S),
    "etcd leader killed": (leader_killed, LONG_WINDOW_S),
    "etcd leader stopped": (leader_stopped, LONG_WINDOW_S),
    "etcd follower killed": (follower_killed, LONG_WINDOW_S),
}
CUTS: Final = ("home cut off etcd",)
MOONCAKE: Final = "Mooncake master killed"


@dataclass(frozen=True, slots=True)
class Row:
    fault: str
    resolve_s: tuple[float, ...]
    publish_s: tuple[float, ...]

    def text(self) -> str:
        def cell(values: Sequence[float]) -> str:
            return f"{statistics.median(values):6.2f} {max(values):6.2f}"

        return f"{self.fault:22} {cell(self.resolve_s)}   {cell(self.publish_s)}"

    @property
    def missed(self) -> bool:
        return max(statistics.median(self.resolve_s), statistics.median(self.publish_s)) > BUDGET_S


@asynccontextmanager
async def calling(parties: Fleet, wait_ms: int = RESOLVE_MS) -> AsyncIterator[Place]:
    """Callers of the first two replicas at work, once everything runs and was answered a few times."""
    await _heal(parties)
    first, second = (parties.endpoint(name) for name in parties.replica_names[:2])
    async with AsyncExitStack() as stack:
        lender_client = await stack.enter_async_context(RegistryClient(f"{first},{second}", fraction=lambda: 0.0))
        other = await stack.enter_async_context(RegistryClient(f"{second},{first}", fraction=lambda: 0.0))
        lender = await stack.enter_async_context(holding(lender_client, f"d-{secrets.token_hex(4)}", SystemClock()))
        place = Place(parties, lender_client, other, lender)
        work = (place.resolve(0, wait_ms), place.resolve(1, wait_ms), place.publish())
        running = [asyncio.create_task(one) for one in work]
        try:
            async with asyncio.timeout(READY_S):
                while any(len(x.good_s) < 5 for x in (*place.resolves, place.publishes)):  # noqa: ASYNC110
                    await asyncio.sleep(RESOLVE_EVERY_S)
            yield place
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def measure(parties: Fleet, fault: Fault, window_s: float) -> tuple[float, float]:
    """Once: (longest time without a good resolve, without an accepted publish), seconds."""
    async with calling(parties) as place:
        began_s = time.monotonic()
        await fault(place)
        await asyncio.sleep(window_s)
        end_s = time.monotonic()
        resolve_s = max(x.longest(began_s, end_s) for x in place.resolves)
        return resolve_s, place.publishes.longest(began_s, end_s)


async def _heal(parties: Fleet) -> None:
    """Everything runs, is connected and current, and knows no lender."""
    parties.network.mend(parties.network.cuts)
    await parties.cluster.heal()
    for party in parties.replicas.values():
        if party.stopped:
            party.resume()
        await party.start()
    async with asyncio.timeout(READY_S):
        for name in parties.replica_names:
            while not await _rests(parties.endpoint(name)):  # noqa: ASYNC110 - asked over the network
                await asyncio.sleep(0.1)


async def _rests(endpoint: str) -> bool:
    """Whether this replica answers, and has no lender's session."""
    async with RegistryClient(endpoint) as client:
        try:
            return not any(x.connected for x in await client.list_engines())
        except KvleaseError:
            return False


async def _mooncake(python: Path, times: int) -> list[Row]:
    """Beside ours: the same of Mooncake, which has no budget here."""
    try:
        seen = [await mooncake.failover(python) for _ in range(times)]
    except (mooncake.MooncakeFailed, OSError) as error:
        print(f"{MOONCAKE}: left out, {error}")
        return []
    row = Row(MOONCAKE, tuple(x for x, _ in seen), tuple(x for _, x in seen))
    print(row.text(), flush=True)
    return [row]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.failover", description=__doc__)
    parser.add_argument("--times", type=int, default=TIMES, help="each fault so often (default: %(default)s)")
    parser.add_argument("--only", choices=list(FAULTS), action="append", default=[])
    parser.add_argument("--max-staleness-ms", type=int, default=STALENESS_MS)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--mooncake", type=Path, help="a Python that has mooncake-transfer-engine-non-cuda")
    parser.add_argument("--peer-times", type=int, default=3, help="the same of Mooncake so often")
    parser.add_argument("--check", action="store_true", help=f"fail if a median is over {BUDGET_S:g} s")
    return parser.parse_args(arguments)


async def main(options: argparse.Namespace) -> int:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvlease-failover-", ignore_cleanup_errors=True) as folder:
        settings = FleetSettings(
            folder=Path(folder), replicas=2, lenders=0, borrowers=0, max_staleness_ms=options.max_staleness_ms
        )
        async with fleet(settings, Judge(bound_s=0, slack_s=0)) as parties:
            print(f"{'seconds without':22} {'good resolve':>13}   {'accepted publish':>13}")
            print(f"{'':22} {'median':>6} {'worst':>6}   {'median':>6} {'worst':>6}")
            for name, (fault, window_s) in FAULTS.items():
                if options.only and name not in options.only:
                    continue
                if name in CUTS and not parties.network.divisible:
                    print(f"{name:22} left out: network namespaces are not permitted here")
                    continue
                seen = [await measure(parties, fault, window_s) for _ in range(options.times)]
                rows.append(Row(name, tuple(x for x, _ in seen), tuple(x for _, x in seen)))
                print(rows[-1].text(), flush=True)
    rows += await _mooncake(options.mooncake, options.peer_times) if options.mooncake else []
    if options.json is not None:
        figures = {row.fault: {"resolve_s": row.resolve_s, "publish_s": row.publish_s} for row in rows}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    missed = [row.fault for row in rows if row.missed and row.fault != MOONCAKE]
    if missed:
        print(f"over the budget of {BUDGET_S:g} s: {', '.join(missed)}")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    enter_own_namespaces(["-m", "tests.chaos.failover", *sys.argv[1:]])
    sys.exit(asyncio.run(main(parse(sys.argv[1:]))))
