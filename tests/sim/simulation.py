"""One seed from beginning to end: parties, faults, a safety phase, healing, a liveness phase, the verdict.

The safety phase has every fault of the plan; then all is healed and the registries are restarted in turn, what is under
way must finish, every lease must lapse or end as configured, every block come back, and clean borrows succeed.
Invariant: (seed, break) decides everything.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvlease.registry.values import ConversationId, EngineId, LeaseId, LeaseState, OnDeadline, TenantId

from tests.sim.borrower import BorrowerParty, BorrowerTurn
from tests.sim.breaks import Straight
from tests.sim.clients import Conversation, Traffic
from tests.sim.fabric import Fabric
from tests.sim.judge import Fault, Judge, Violation
from tests.sim.lender import LenderParty, LenderTurn
from tests.sim.network import Network
from tests.sim.plan import NO_FAULTS, Plan, draw
from tests.sim.registry import RegistryParty
from tests.sim.tokens import Tokens
from tests.sim.world import World

_ONE_STRETCH_MS: Final = 200
_CLOCKS_MS: Final = 10**9
"""Everybody's clock starts somewhere else."""
_DOWN_MS: Final = 60
"""A party that crashed is back after so long at most."""
_SESSIONS_BACK_MS: Final = 100
_IN_FLIGHT_MS: Final = 20
"""A lease may end at any time, and its registry hears of it a little later."""
_CLEAN: Final = TenantId("clean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a seed. `counts` are of things that happened; the judge's word is `violations`."""

    seed: int
    plan: Plan
    violations: tuple[Violation, ...]
    counts: Counter[str]
    steps: int


Client = LenderParty | BorrowerParty | Conversation
"""Who is with one registry at a time."""


class Simulation:
    def __init__(self, seed: int, makings: Straight, sharpen: Callable[[Plan], Plan]) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.plan = sharpen(draw(rng))
        self.world = World(rng)
        self.network = Network(self.world, self.plan.faults)
        self.judge = Judge(self.world)
        self.tokens = tokens = Tokens()
        fabric = Fabric(self.network)
        self.registries = [
            RegistryParty(f"registry{n}", self.network, self.plan, clock_offset_ms=rng.randrange(_CLOCKS_MS))
            for n in range(self.plan.registries)
        ]
        self.lenders = [
            LenderParty(
                f"lender{n}",
                self.plan,
                fabric,
                self.registries,
                tokens,
                self.judge,
                makings,
                clock_offset_ms=rng.randrange(_CLOCKS_MS),
            )
            for n in range(self.plan.lenders)
        ]
        by_name = {lender.name: lender for lender in self.lenders}
        self.borrowers = [
            BorrowerParty(
                f"borrower{n}",
                self.plan,
                fabric,
                self.registries,
                by_name,
                tokens,
                self.judge,
                makings,
                clock_offset_ms=rng.randrange(_CLOCKS_MS),
            )
            for n in range(self.plan.borrowers)
        ]
        self.chats = [
            Conversation(n, self.plan, self.network, self.registries, self.borrowers, self.lenders, tokens)
            for n in range(self.plan.conversations)
        ]
        self.traffic = [Traffic(n, self.plan, self.world, x, tokens) for n, x in enumerate(self.lenders)]
        self._parties: list[RegistryParty | LenderParty | BorrowerParty] = [
            *self.registries,
            *self.lenders,
            *self.borrowers,
        ]
        self._connected: list[Client] = [*self.lenders, *self.borrowers, *self.chats]

    def run(self) -> Outcome:
        for registry in self.registries:
            registry.start()
        for lender in self.lenders:
            lender.start()
        for chat in self.chats:
            chat.start()
        for traffic in self.traffic:
            traffic.start()
        self._strike()
        self.world.run(self.plan.safety_ms)
        self._heal()
        self._restart_in_turn()
        for phase in (self._come_to_rest, self._agree, self._borrow_clean, self._renew_for_ever, self._drain):
            if not self.judge.violations:
                phase()
        self.judge.counts["lies"] += sum(registry.lies for registry in self.registries)
        self.judge.counts["moved"] += sum(client.endpoint.moves for client in self._connected)
        return Outcome(
            seed=self.seed,
            plan=self.plan,
            violations=tuple(self.judge.violations),
            counts=self.judge.counts,
            steps=self.world.steps,
        )

    # -- faults ---------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        """Lays down when who pauses, crashes, or loses its line."""
        world, faults = self.world, self.plan.faults
        for _ in range(faults.pauses):
            party, length = world.rng.choice(self._parties), world.between(5, 4 * faults.long_ms)
            world.hardware(self._instant(), lambda party=party, length=length: world.pause(party, length))  # type: ignore[misc]
        for _ in range(faults.crashes):
            world.hardware(self._instant(), lambda: self._crash(world.rng.choice(self._parties)))
        for _ in range(faults.line_breaks):
            world.hardware(self._instant(), lambda: self._break_line(world.rng.choice(self._connected)))
        for _ in range(self.plan.rolls):
            start_ms = self._instant()
            for turn, registry in enumerate(self.registries):
                world.hardware(start_ms + turn * _DOWN_MS, lambda registry=registry: self._crash(registry))  # type: ignore[misc]

    def _instant(self) -> int:
        return self.world.between(20, self.plan.safety_ms - 20)

    def _crash(self, party: RegistryParty | LenderParty | BorrowerParty) -> None:
        if not party.up:
            return
        self.judge.counts["crashed"] += 1
        party.crash()
        party.life += 1
        for chat in self.chats:
            chat.crashed(party)
        for client in self._connected:
            if not isinstance(client, LenderParty):
                client.endpoint.registry()  # it misses its connection at once; a lender is told by its line
        self.world.hardware(self.world.between(1, _DOWN_MS), lambda: self._restart(party))

    def _restart(self, party: RegistryParty | LenderParty | BorrowerParty) -> None:
        if isinstance(party, LenderParty) and self.world.chance(0.2):
            party.update_weights()
        party.up = True
        if not isinstance(party, RegistryParty):
            party.boot()
        if not isinstance(party, BorrowerParty):
            party.start()

    def _break_line(self, client: Client) -> None:
        if not isinstance(client, LenderParty):
            client.endpoint.move()
        elif client.up and client.session.line is not None:
            client.session.line.close()

    # -- liveness -------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        self.network.faults = NO_FAULTS
        for borrower in self.borrowers:
            borrower.preempt = 0.0
        for chat in self.chats:
            chat.turns_left = 0
            chat.plan = self.plan.healed()
        for traffic in self.traffic:
            traffic.turns_left = 0

    def _restart_in_turn(self) -> None:
        """One registry after the other is restarted. In the end everybody is with the first."""
        self._wait_for(self._all_up, 1_000)
        for registry in self.registries:
            self._crash(registry)
            self.world.run(self.world.now_ms + _DOWN_MS + _SESSIONS_BACK_MS)

    def _all_up(self) -> bool:
        return all(party.up and party.paused_until_ms <= self.world.now_ms for party in self._parties)

    def _come_to_rest(self) -> None:
        """Everything under way finishes, and everything lent comes back, within the terms and a fixed time beside."""
        limit_ms = self.world.now_ms + self.plan.ttl_ms + 200 + 2_000
        while self.world.now_ms < limit_ms and not self._at_rest():
            self.world.run(self.world.now_ms + _ONE_STRETCH_MS)
        for lender in self.lenders:
            lender.unfinished()
            live = lender.holder.count(LeaseState.LIVE)
            self.judge.expect(not live, Fault.LEAK, f"{lender.name}: {live} live leases")
            if self.plan.on_deadline is OnDeadline.END:
                self.judge.expect(not len(lender.holder), Fault.LEAK, f"{lender.name}: leases after their deadline")
        for borrower in self.borrowers:
            borrower.unfinished()
        for chat in self.chats:
            self.judge.expect(chat.idle, Fault.UNFINISHED, chat.name)

    def _at_rest(self) -> bool:
        return (
            self._all_up()
            and all(chat.idle for chat in self.chats)
            and all(borrower.idle for borrower in self.borrowers)
            and all(lender.idle and not lender.holder.count(LeaseState.LIVE) for lender in self.lenders)
        )

    def _agree(self) -> None:
        """Once sessions are back, one registry knows of exactly the leases that lenders hold, and no other of any."""
        self.world.run(self.world.now_ms + self.plan.suspect_ms)
        self._wait_for(lambda: not self._differences(), _IN_FLIGHT_MS)
        for difference in self._differences():
            self.judge.found(Fault.STUCK, difference)

    def _differences(self) -> list[str]:
        """What registries believe that is not so."""
        first, *others = self.registries
        found: list[str] = []
        for lender in self.lenders:
            engine_id = EngineId(lender.name)
            known = first.known(engine_id)
            if len(known) != len(lender.holder) or not all(lease_id in lender.holder for lease_id in known):
                found.append(f"{lender.name} holds {len(lender.holder)} leases, the registry knows of {sorted(known)}")
            found += [f"{x.name} was left and knows of {lender.name}" for x in others if x.known(engine_id)]
        return found

    def _borrow_clean(self) -> None:
        """With nothing wrong, a prompt that goes on from a finished turn borrows what is common.

        Also from a turn that was lent before all registries were restarted: its lender has presented it again.
        """
        lender = self._clean_lender()
        if lender is None or (self.plan.on_deadline is OnDeadline.END and self.plan.ttl_ms < 60):
            return  # nothing to borrow from, or nothing for long enough
        self._lend(lender, "clean", first_token=100)
        self._borrow("clean", first_token=100)
        kept = self._lend(lender, "kept", first_token=200)
        self._restart_in_turn()
        self._agree()
        if kept is not None and kept in lender.holder:
            self._borrow("kept", first_token=200)

    def _renew_for_ever(self) -> None:
        """Somebody asks again and again to renew a lease: its blocks are back at its longest lifetime all the same."""
        lender, limit_ms = self._clean_lender(), self.plan.max_lifetime_ms
        if lender is None or not limit_ms or not self.plan.renewable:
            return
        lease_id = self._lend(lender, "renewed", first_token=300)
        until_ms = self.world.now_ms + limit_ms + _SESSIONS_BACK_MS
        while lease_id is not None and self.world.now_ms < until_ms:
            self.registries[0].ask_renewal(_CLEAN, lease_id, 40)
            self.world.run(self.world.now_ms + 10)
        live = lender.holder.count(LeaseState.LIVE)
        self.judge.expect(not live, Fault.OUTLIVED, f"{lender.name}: {live} leases are live after {limit_ms} ms")

    def _clean_lender(self) -> LenderParty | None:
        """A lender of the model that borrowers have."""
        return next((lender for lender in self.lenders if not lender.updated), None)

    def _lend(self, lender: LenderParty, conversation: str, *, first_token: int) -> LeaseId | None:
        """A turn of 32 tokens, served and lent; its lease, once it can be resolved."""
        lent: list[LeaseId | None] = []
        lender.serve(
            LenderTurn(
                tenant=_CLEAN,
                conversation=ConversationId(conversation),
                text=self.tokens.text(tuple(range(first_token, first_token + 32))),
                prompt_tokens=20,
                done=lent.append,
            )
        )
        self._wait_for(lambda: bool(lent))
        self.world.run(self.world.now_ms + 2 * self.network.latency() + 2)
        return lent[0] if lent else None

    def _borrow(self, conversation: str, *, first_token: int) -> None:
        """A prompt that goes on from that turn must use what it left."""
        finished: list[bool] = []
        turn = BorrowerTurn(
            request_id=conversation,
            tenant=_CLEAN,
            conversation=ConversationId(conversation),
            lease_id=None,
            text=self.tokens.text(tuple(range(first_token, first_token + 37))),
            done=finished.append,
        )
        self.borrowers[0].submit(turn)
        self._wait_for(lambda: bool(finished))
        self.judge.expect(finished == [True], Fault.STUCK, f"the {conversation} request did not finish")
        self.judge.expect(
            turn.outcome == "used", Fault.STUCK, f"the {conversation} borrow came to {turn.outcome or 'nothing'}"
        )

    def _wait_for(self, reached: Callable[[], bool], limit_ms: int = 500) -> None:
        limit_ms += self.world.now_ms
        while self.world.now_ms < limit_ms and not reached():
            self.world.run(self.world.now_ms + 1)

    def _drain(self) -> None:
        """Every lender leaves in good order: nothing is held, here or in the registry."""
        for lender in self.lenders:
            lender.drain()
        self.world.run(self.world.now_ms + 100)
        for lender in self.lenders:
            self.judge.expect(not len(lender.holder), Fault.LEAK, f"{lender.name}: leases after the drain")
            lender.unfinished()
        left = sum(len(registry.table) for registry in self.registries)
        self.judge.expect(not left, Fault.LEAK, f"registries believe in {left} leases of drained lenders")


def run_seed(seed: int, makings: Straight | None = None, *, sharpen: Callable[[Plan], Plan] | None = None) -> Outcome:
    """Runs a seed: honestly unless `makings` says otherwise, on its own plan unless `sharpen` alters it."""
    makings = makings or Straight()
    return Simulation(seed, makings, sharpen or makings.sharpen).run()
