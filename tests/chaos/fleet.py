"""All processes of a chaos run, and what they report: three etcd members, registries on them, lenders, borrowers.

Starts them, knows where each is and who speaks through which line, and hands what they say to the judge. Which faults
there are, and when, is decided elsewhere. Invariant: leaving `fleet` ends every process and line.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvlease.connector.seal_table import sweep

from tests.chaos.delay_line import DelayLine, delay_line
from tests.chaos.judge import Judge
from tests.chaos.messages import ChaosBorrowerSettings, ChaosLenderSettings, to_line
from tests.chaos.network import Network
from tests.chaos.party import REPOSITORY, Line, Party
from tests.etcd.cluster import Cluster, ClusterSettings
from tests.nixl.messages import Fault, Transport
from tests.ports import free_ports

STORE_PREFIX: Final = "/chaos/"
STALENESS_MS: Final = 5_000
ANSWER_S: Final = 5.0
RECENT: Final = 50
START_S: Final = 60.0
"""A Python process that imports gRPC and NIXL, on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    folder: Path
    seed: int = 1
    replicas: int = 3
    lenders: int = 2
    borrowers: int = 2
    max_staleness_ms: int = STALENESS_MS
    turn_ms: int = 80
    fault: str = Fault.NONE
    """The contract broken in borrowers, by a double of `tests.nixl.faults`."""
    registry_break: str = ""
    """The same in registries, by one of `tests.chaos.breaks`."""
    flags: Sequence[str] = ()
    """More for every registry."""
    older: Path | None = None
    """A checkout of another release, which the first replica runs."""


class Journal:
    """What happened to leases, in the run's folder, to be looked up when something was wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began_s = time.monotonic()

    def note(self, who: str, what: str, lease_ids: Iterable[str]) -> None:
        at_s = time.monotonic() - self._began_s
        with self._path.open("a") as lines:
            lines.writelines(f"{at_s:8.2f} s  {who} {what} {lease_id}\n" for lease_id in lease_ids)

    def about(self, lease_id: str) -> list[str]:
        if not self._path.exists():
            return []
        return [line.rstrip() for line in self._path.read_text().splitlines() if line.endswith(f" {lease_id}")]


class LenderNews:
    """What one lender has said."""

    def __init__(self, name: str, judge: Judge, journal: Journal) -> None:
        self._name = name
        self._judge = judge
        self._journal = journal
        self.held: dict[str, str] = {}
        self.answers = 0
        self.connects = 0
        self.pid = 0
        self.wall_s = 0.0
        self.recent: list[str] = []
        """Acknowledged of late and not over, for those who ask for ends and renewals."""
        self.acknowledged = 0

    def take(self, line: Line) -> None:
        self.pid, self.connects, self.wall_s = line["pid"], line["connects"], line["wall_s"]
        self._journal.note(self._name, "publish acknowledged", line["acknowledged"])
        for what in ("ended", "ordered", "refused"):
            for lease_id, why in line[what]:
                self._journal.note(self._name, f"{what} ({why})", [lease_id])
        for lease_id in line["acknowledged"]:
            self._judge.publish_acknowledged(lease_id)
            self.acknowledged += 1
            self.recent.append(lease_id)
        over = {lease_id for lease_id, _ in line["ended"]}
        self.recent = [lease_id for lease_id in self.recent[-RECENT:] if lease_id not in over]
        for lease_id, reason in line["ordered"]:
            self._judge.end_ordered(lease_id, reason)
        for lease_id, status in line["refused"]:
            self._judge.publish_refused(lease_id, status)
        if line["answers"]:
            self.answers, self.held = line["answers"], line["held"]


@dataclass(slots=True)
class BorrowerNews:
    """What one borrower has said, all runs of it together."""

    name: str
    judge: Judge
    before: list[Line] = field(default_factory=list)
    last: Line = field(default_factory=dict)

    def take(self, line: Line) -> None:
        if self.last and self.last["pid"] != line["pid"]:
            self.before.append(self.last)
        self.last = line
        counts = line["counts"]
        self.judge.bytes_read(
            self.name,
            wrong=counts["wrong"],
            wrong_in_use=counts["wrong_in_use"],
            old_accepted=counts["old_incarnation_accepted"],
        )

    def total(self, name: str) -> int:
        return sum(int(line["counts"][name]) for line in [*self.before, self.last] if line)

    def reasons(self) -> dict[str, int]:
        """Turns that came to nothing, and READs that were refused, by reason."""
        found: dict[str, int] = {}
        for line in [*self.before, self.last]:
            if line:
                for reason, count in (*line["computed"].items(), *line["counts"]["refused"].items()):
                    found[reason] = found.get(reason, 0) + count
        return found


class Fleet:
    """Running processes. `fleet` makes it."""

    def __init__(self, settings: FleetSettings, judge: Judge) -> None:
        self.settings: Final = settings
        self.judge: Final = judge
        self.member_names: Final = ("m1", "m2", "m3")
        self.replica_names: Final = tuple(f"r{number}" for number in range(settings.replicas))
        self.lender_names: Final = tuple(f"d{number}" for number in range(settings.lenders))
        self.borrower_names: Final = tuple(f"p{number}" for number in range(settings.borrowers))
        names = (*self.member_names, *self.replica_names, *self.lender_names, *self.borrower_names)
        self.network: Final = Network(names)
        self.cluster: Final = Cluster(
            ClusterSettings(
                folder=settings.folder / "etcd",
                hosts=[self.network.host(name) for name in self.member_names],
                prefix=self.network.prefix,
            )
        )
        self.ports: Final = dict(zip(self.replica_names, free_ports(len(self.replica_names)), strict=True))
        self.lines: Final[dict[str, list[DelayLine]]] = {}
        """By party: those that it speaks to others through."""
        self.replicas: Final[dict[str, Party]] = {}
        self.lenders: Final[dict[str, Party]] = {}
        self.borrowers: Final[dict[str, Party]] = {}
        self.journal: Final = Journal(settings.folder / "journal.log")
        self.lender_news: Final = {name: LenderNews(name, judge, self.journal) for name in self.lender_names}
        self.borrower_news: Final = {name: BorrowerNews(name, judge) for name in self.borrower_names}
        self._questions = 0
        self._ucx_aborts = 0

    @property
    def parties(self) -> dict[str, Party]:
        """All but the members."""
        return {**self.replicas, **self.lenders, **self.borrowers}

    def endpoint(self, replica: str) -> str:
        return f"{self.network.host(replica)}:{self.ports[replica]}"

    def replica_run(self, replica: str) -> str:
        """The name of its present process."""
        return f"{replica}#{self.replicas[replica].runs}"

    # -- starting -------------------------------------------------------------------------------------------------

    async def start(self, stack: AsyncExitStack) -> None:
        """Raises EtcdMissing, EtcdFailed, NetworkFailed."""
        stack.callback(self.cluster.close)
        await self.cluster.start()
        for name in self.replica_names:
            slow = name == self.replica_names[-1]
            await self._add_replica(stack, name, slow=slow)
        for number, name in enumerate(self.lender_names):
            await self._add_lender(stack, name, number)
        for number, name in enumerate(self.borrower_names):
            await self._add_borrower(stack, name, number)

    async def _line(self, stack: AsyncExitStack, party: str, target: str) -> str:
        line = await stack.enter_async_context(delay_line(self.network, party, target))
        self.lines.setdefault(party, []).append(line)
        return line.endpoint

    async def _add_replica(self, stack: AsyncExitStack, name: str, *, slow: bool) -> None:
        """The last one speaks to etcd through lines that can be slow."""
        members = list(self.cluster.endpoints)
        if slow:
            members = [await self._line(stack, name, member) for member in members]
        module = (
            ["tests.chaos.breaks", self.settings.registry_break] if self.settings.registry_break else ["kvlease.cli"]
        )
        command = [sys.executable, "-m", *module, "registry", "--listen", self.endpoint(name), "--insecure"]
        command += ["--metrics-listen", "none", "--replica-id", name, "--store", "etcd://" + ",".join(members)]
        command += ["--store-prefix", STORE_PREFIX, "--max-staleness-ms", str(self.settings.max_staleness_ms)]
        party = Party(
            name,
            [*command, *self.settings.flags],
            self.network,
            self.settings.folder,
            environment=self._release(name),
        )
        self.replicas[name] = party
        stack.push_async_callback(party.kill)
        await party.start()

    def _release(self, replica: str) -> dict[str, str]:
        older = self.settings.older
        if older is None or replica != self.replica_names[0]:
            return {}
        parts = ("registry", "connector", "router", "proto")
        return {"PYTHONPATH": ":".join(str(older / part) for part in parts)}

    async def _registry_list(self, stack: AsyncExitStack, name: str, number: int) -> str:
        """Replicas as this client is to know them: a list, another one first for each; the last client's is slow."""
        names = [*self.replica_names[number % len(self.replica_names) :], *self.replica_names]
        endpoints = [self.endpoint(x) for x in dict.fromkeys(names)]
        if name in self.borrower_names[-1:]:
            endpoints = [await self._line(stack, name, endpoint) for endpoint in endpoints]
        return ",".join(endpoints)

    def _socket(self, lender: str) -> str:
        return str(self.settings.folder / f"{lender}.sock")

    async def _add_lender(self, stack: AsyncExitStack, name: str, number: int) -> None:
        settings = ChaosLenderSettings(
            engine=name,
            registry=await self._registry_list(stack, name, number),
            socket=self._socket(name),
            seed=self.settings.seed * 1_000 + number,
            turn_ms=self.settings.turn_ms,
        )
        command = [sys.executable, "-m", "tests.chaos.lender", to_line(settings)]
        party = Party(
            name,
            command,
            self.network,
            self.settings.folder,
            environment=self._nixl(number),
            on_line=self.lender_news[name].take,
        )
        self.lenders[name] = party
        stack.push_async_callback(party.kill)
        await party.start()

    async def _add_borrower(self, stack: AsyncExitStack, name: str, number: int) -> None:
        settings = ChaosBorrowerSettings(
            registry=await self._registry_list(stack, name, number),
            sockets=tuple(self._socket(lender) for lender in self.lender_names),
            seed=self.settings.seed * 1_000 + 500 + number,
            fault=self.settings.fault,
        )
        command = [sys.executable, "-m", "tests.chaos.borrower", to_line(settings)]
        party = Party(
            name,
            command,
            self.network,
            self.settings.folder,
            environment=self._nixl(number),
            on_line=self.borrower_news[name].take,
        )
        self.borrowers[name] = party
        stack.push_async_callback(party.kill)
        await party.start()

    def _nixl(self, number: int) -> dict[str, str]:
        """The first borrower reads over shared memory where it can, all others over the network."""
        transport = Transport.SM if number == 0 else Transport.TCP
        device = {"UCX_NET_DEVICES": "eth0"} if self.network.divisible else {}
        return {
            "UCX_TLS": transport.ucx_tls,
            "UCX_LOG_LEVEL": "error",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **device,
        }

    # -- asking ---------------------------------------------------------------------------------------------------

    async def held(self) -> dict[str, dict[str, str]]:
        """What each lender holds now; a lender that does not answer in time is left out."""
        self._questions += 1
        number = self._questions
        for name in self.lender_names:
            self.lenders[name].say(f"held {number}")
        end_s = time.monotonic() + ANSWER_S
        for news in self.lender_news.values():
            while news.answers != number and time.monotonic() < end_s:  # noqa: ASYNC110 - said by another process
                await asyncio.sleep(0.02)
        return {name: news.held for name, news in self.lender_news.items() if news.answers == number}

    async def up(self) -> None:
        """Wait until what was started has come so far that it can be spoken to. Raises PartyFailed."""
        async with asyncio.timeout(START_S):
            for name, lender in self.lenders.items():
                while lender.running and self.lender_news[name].pid != lender.pid:  # noqa: ASYNC110 - it says so
                    await asyncio.sleep(0.05)
            for name, replica in self.replicas.items():
                while replica.running and not await self._listens(name):  # noqa: ASYNC110 - asked over the network
                    await asyncio.sleep(0.05)

    async def _listens(self, replica: str) -> bool:
        try:
            _, writer = await asyncio.open_connection(self.network.host(replica), self.ports[replica])
        except OSError:
            return False
        writer.close()
        return True

    def tell_lenders(self, word: str) -> None:
        for party in self.lenders.values():
            party.say(word)

    async def note_deaths(self) -> bool:
        """Processes that ended by themselves go to the judge; whether one that UCX ended was started again."""
        again = False
        for party in self.parties.values():
            if party.ended_by_ucx:
                self._ucx_aborts += 1
                await party.start()
                again = True
            elif party.died:
                self.judge.ended_by_itself(party.died)
        if again:
            await self.up()
        return again

    def figures(self) -> dict[str, Any]:
        """What was done so far."""
        borrowers = self.borrower_news.values()
        reasons: dict[str, int] = {}
        for news in borrowers:
            for reason, count in news.reasons().items():
                reasons[reason] = reasons.get(reason, 0) + count
        return {
            "acknowledged": sum(news.acknowledged for news in self.lender_news.values()),
            "reads": sum(news.total("reads") for news in borrowers),
            "right": sum(news.total("right") for news in borrowers),
            "wrong": sum(news.total("wrong") for news in borrowers),
            "overlapped": sum(news.total("overlap") for news in borrowers),
            "late": sum(news.total("late") for news in borrowers),
            "aborted_by_ucx": self._ucx_aborts,
            "computed": dict(sorted(reasons.items())),
        }


@asynccontextmanager
async def fleet(settings: FleetSettings, judge: Judge) -> AsyncIterator[Fleet]:
    """All of it, running. Raises EtcdMissing, EtcdFailed, NetworkFailed."""
    made = Fleet(settings, judge)
    os.environ.setdefault("PYTHONPATH", str(REPOSITORY))
    async with AsyncExitStack() as stack:
        stack.callback(sweep)
        await made.start(stack)
        yield made
