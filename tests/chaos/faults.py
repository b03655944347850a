"""What a chaos run does to its parties, and how each of it is undone: chosen by the run's dice, logged as it is done.

Knows processes, networks and clocks; judges nothing, but tells the judge which replicas have contact to the store.
Invariant: after `heal` every process runs, nothing is cut or slow, and every clock is the machine's again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvlease.etcd import EtcdClient, EtcdError

from tests.chaos.fleet import Fleet
from tests.chaos.party import clocks_can_step
from tests.chaos.reach import in_contact
from tests.etcd.cluster import EtcdFailed

LONGEST_S: Final = 8.0
CLOCK_STEP_S: Final = 600
SLOWEST_S: Final = 0.6
ASK_ETCD_S: Final = 3.0


class Kind(StrEnum):
    """What can be done."""

    KILL_MEMBER = "kill_member"
    STOP_MEMBER = "stop_member"
    KILL_LEADER = "kill_leader"
    STOP_LEADER = "stop_leader"
    KILL_REPLICA = "kill_replica"
    STOP_REPLICA = "stop_replica"
    DRAIN_REPLICA = "drain_replica"
    KILL_LENDER = "kill_lender"
    STOP_LENDER = "stop_lender"
    KILL_BORROWER = "kill_borrower"
    STOP_BORROWER = "stop_borrower"
    CUT = "cut"
    CUT_ONE_WAY = "cut_one_way"
    CUT_OFF_AND_COMPACT = "cut_off_and_compact"
    SLOW = "slow"
    STEP_CLOCK = "step_clock"
    STORE_AWAY = "store_away"


CUTS: Final = frozenset({Kind.CUT, Kind.CUT_ONE_WAY, Kind.CUT_OFF_AND_COMPACT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One line of the log."""

    at_s: float
    text: str

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.text}"


class Faults:
    """Does them to one fleet."""

    def __init__(self, fleet: Fleet, dice: random.Random, say: Callable[[Deed], None]) -> None:
        self._fleet: Final = fleet
        self._dice: Final = dice
        self._say: Final = say
        self._began_s: Final = time.monotonic()
        self.done: Final[dict[Kind, int]] = {}
        self.log: Final[list[Deed]] = []
        network, kinds = fleet.network, list(Kind)
        left_out = set() if network.divisible else set(CUTS)
        if not clocks_can_step():
            left_out.add(Kind.STEP_CLOCK)
        self.left_out: Final = frozenset(left_out)
        """What cannot be done on this machine."""
        self.kinds: Final = tuple(kind for kind in kinds if kind not in left_out)

    # -- choosing -------------------------------------------------------------------------------------------------

    async def one(self, kind: Kind | None = None) -> None:
        """Some fault, from beginning to end; one that cannot be done now is left out."""
        chosen = kind or self._dice.choice(self.kinds)
        lasts_s = self._dice.uniform(0.5, LONGEST_S)
        try:
            await self._do(chosen, lasts_s)
            self.done[chosen] = self.done.get(chosen, 0) + 1
        except (EtcdFailed, EtcdError) as error:
            self._note(f"{chosen} came to nothing: {str(error).splitlines()[0]}")

    async def _do(self, kind: Kind, lasts_s: float) -> None:
        fleet, choose = self._fleet, self._dice.choice
        match kind:
            case Kind.KILL_MEMBER | Kind.STOP_MEMBER:
                await self._member(choose(fleet.member_names), lasts_s, stop=kind is Kind.STOP_MEMBER)
            case Kind.KILL_LEADER | Kind.STOP_LEADER:
                leader = await fleet.cluster.leader(ASK_ETCD_S)
                await self._member(leader.name, lasts_s, stop=kind is Kind.STOP_LEADER)
            case Kind.KILL_REPLICA:
                await self._kill(choose(fleet.replica_names), lasts_s)
            case Kind.KILL_LENDER:
                await self._kill(choose(fleet.lender_names), lasts_s)
            case Kind.KILL_BORROWER:
                await self._kill(choose(fleet.borrower_names), lasts_s)
            case Kind.STOP_REPLICA:
                await self._stop(choose(fleet.replica_names), lasts_s)
            case Kind.STOP_LENDER:
                await self._stop(choose(fleet.lender_names), lasts_s)
            case Kind.STOP_BORROWER:
                await self._stop(choose(fleet.borrower_names), lasts_s)
            case Kind.DRAIN_REPLICA:
                await self._drain(choose(fleet.replica_names))
            case Kind.CUT | Kind.CUT_ONE_WAY:
                await self._cut(lasts_s, one_way=kind is Kind.CUT_ONE_WAY)
            case Kind.CUT_OFF_AND_COMPACT:
                await self._cut_off_and_compact(choose(fleet.replica_names), lasts_s)
            case Kind.SLOW:
                await self._slow(choose(sorted(fleet.lines)), lasts_s)
            case Kind.STORE_AWAY:
                await self.store_away(lasts_s, stop=self._dice.random() < 0.5)
            case Kind.STEP_CLOCK:
                await self._step(choose(sorted(fleet.parties)), lasts_s)

    # -- doing ----------------------------------------------------------------------------------------------------

    async def _member(self, name: str, lasts_s: float, *, stop: bool) -> None:
        member = self._fleet.cluster.members[name]
        if not member.running or member.stopped:
            return
        self._note(f"{'stop' if stop else 'kill'} etcd {name} for {lasts_s:.1f} s")
        if stop:
            await asyncio.to_thread(member.stop)
        else:
            member.kill()
        self.tell_contact()
        await asyncio.sleep(lasts_s)
        if stop and member.stopped and member.running:
            member.resume()
        elif not stop:
            member.start()
        self._note(f"etcd {name} {'goes on' if stop else 'is started'}")
        self.tell_contact()

    async def store_away(self, lasts_s: float, *, stop: bool) -> None:
        """All members at once."""
        away = [x for x in self._fleet.cluster.members.values() if x.running and not x.stopped]
        self._note(f"{'stop' if stop else 'kill'} all of etcd for {lasts_s:.1f} s")
        for member in away:
            if stop:
                await asyncio.to_thread(member.stop)
            else:
                member.kill()
        self.tell_contact()
        await asyncio.sleep(lasts_s)
        for member in away:
            if stop and member.stopped and member.running:
                member.resume()
            elif not stop:
                member.start()
        self._note("etcd is back")
        self.tell_contact()

    async def _kill(self, name: str, lasts_s: float) -> None:
        party = self._fleet.parties[name]
        if not party.running:
            return
        self._note(f"kill {name} for {lasts_s:.1f} s")
        await party.kill()
        await asyncio.sleep(lasts_s)
        await party.start()
        self._note(f"{name} is started")
        self.tell_contact()

    async def _stop(self, name: str, lasts_s: float) -> None:
        party = self._fleet.parties[name]
        if not party.running or party.stopped:
            return
        self._note(f"stop {name} for {lasts_s:.1f} s")
        party.stop()
        await asyncio.sleep(lasts_s)
        party.resume()
        self._note(f"{name} goes on")

    async def _drain(self, name: str) -> None:
        party = self._fleet.parties[name]
        if not party.running or party.stopped:
            return
        self._note(f"drain {name} (SIGTERM)")
        await party.terminate()
        await party.start()
        self._note(f"{name} is started")
        self.tell_contact()

    async def _cut(self, lasts_s: float, *, one_way: bool) -> None:
        fleet, dice = self._fleet, self._dice
        members, replicas = fleet.member_names, fleet.replica_names
        lenders, borrowers = fleet.lender_names, fleet.borrower_names
        talking = [(members, members), (members, replicas), (replicas, lenders), (replicas, borrowers)]
        one, other = dice.choice([*talking, (members, replicas), (lenders, borrowers)])
        if dice.random() < 0.5:
            one, other = other, one
        mine = dice.sample(one, dice.randint(1, len(one)))
        theirs = [name for name in dice.sample(other, dice.randint(1, len(other))) if name not in mine]
        pairs = {(a, b) for a in mine for b in theirs}
        if not one_way:
            pairs |= {(b, a) for a, b in pairs}
        if pairs:
            arrow = "->" if one_way else "<->"
            await self._without(pairs, lasts_s, f"{','.join(mine)} {arrow} {','.join(theirs)}")

    async def _cut_off_and_compact(self, replica: str, lasts_s: float) -> None:
        """The replica's watch finds out that what it missed is forgotten."""
        members = self._fleet.member_names
        pairs = {(replica, m) for m in members} | {(m, replica) for m in members}
        compacting = asyncio.create_task(self._compact(lasts_s * 0.8))
        try:
            await self._without(pairs, lasts_s, f"{replica} <-> etcd")
        finally:
            await compacting

    async def _compact(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        try:
            async with asyncio.timeout(ASK_ETCD_S), EtcdClient(self._fleet.cluster.endpoints) as etcd:
                revision = (await etcd.get(b"nothing")).header.revision
                await etcd.compact(revision)
                self._note(f"etcd compacted at {revision}")
        except (EtcdError, TimeoutError) as error:
            self._note(f"etcd did not compact: {error}")

    async def _without(self, pairs: Iterable[tuple[str, str]], lasts_s: float, text: str) -> None:
        network = self._fleet.network
        fresh = set(pairs) - network.cuts
        self._note(f"cut {text} for {lasts_s:.1f} s")
        await asyncio.to_thread(network.cut, fresh)
        self.tell_contact()
        try:
            await asyncio.sleep(lasts_s)
        finally:
            await asyncio.to_thread(network.mend, fresh)
            self._note(f"mended {text}")
            self.tell_contact()

    async def _slow(self, party: str, lasts_s: float) -> None:
        delay_s = self._dice.uniform(0.02, SLOWEST_S)
        lines = self._dice.sample(self._fleet.lines[party], self._dice.randint(1, len(self._fleet.lines[party])))
        self._note(f"{len(lines)} lines of {party} are {delay_s * 1_000:.0f} ms slow for {lasts_s:.1f} s")
        for line in lines:
            line.delay_s = delay_s
        await asyncio.sleep(lasts_s)
        for line in lines:
            line.delay_s = 0.0

    async def _step(self, name: str, lasts_s: float) -> None:
        seconds = self._dice.choice((-CLOCK_STEP_S, CLOCK_STEP_S))
        self._note(f"wall clock of {name} steps by {seconds:+d} s for {lasts_s:.1f} s")
        self._fleet.parties[name].step_clock(seconds)
        await asyncio.sleep(lasts_s)
        self._fleet.parties[name].step_clock(0)

    # -- undoing --------------------------------------------------------------------------------------------------

    async def heal(self) -> None:
        """Everything runs again, and nothing is in its way. Raises EtcdFailed, TimeoutError if something does not."""
        fleet = self._fleet
        await asyncio.to_thread(fleet.network.mend, fleet.network.cuts)
        for lines in fleet.lines.values():
            for line in lines:
                line.delay_s = 0.0
        for party in fleet.parties.values():
            if party.stopped:
                party.resume()
            party.step_clock(0)
            await party.start()
        for member in fleet.cluster.members.values():
            if member.stopped:
                member.resume()
            member.start()
        await fleet.up()
        self.tell_contact()
        self._note("all faults are over")

    def tell_contact(self) -> None:
        """Tells the judge which replicas have contact to the store now."""
        fleet, now_s = self._fleet, time.monotonic()
        members = fleet.cluster.members
        running = frozenset(name for name, x in members.items() if x.running and not x.stopped)
        for name in fleet.replica_names:
            reached = in_contact(name, members, running, fleet.network.cuts)
            fleet.judge.contact(fleet.replica_run(name), reached, now_s)

    def _note(self, text: str) -> None:
        deed = Deed(at_s=time.monotonic() - self._began_s, text=text)
        self.log.append(deed)
        self._say(deed)
