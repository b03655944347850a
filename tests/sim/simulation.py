"""One seed from beginning to end: parties, faults, a safety phase, healing, a liveness phase, the verdict.

The safety phase has every fault of the plan; then all is healed, what is under way must finish, every lease must lapse
or end as configured, every block come back, and a clean borrow succeed. Invariant: (seed, break) decides everything.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a seed. `counts` are of things that happened; the judge's word is `violations`."""

    seed: int
    plan: Plan
    violations: tuple[Violation, ...]
    counts: Counter[str]
    steps: int


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
        self.registry = RegistryParty("registry", self.network, self.plan, clock_offset_ms=rng.randrange(_CLOCKS_MS))
        self.lenders = [
            LenderParty(
                f"lender{n}",
                self.plan,
                fabric,
                self.registry,
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
                self.registry,
                by_name,
                tokens,
                self.judge,
                makings,
                clock_offset_ms=rng.randrange(_CLOCKS_MS),
            )
            for n in range(self.plan.borrowers)
        ]
        self.chats = [
            Conversation(n, self.plan, self.network, self.registry, self.borrowers, self.lenders, tokens)
            for n in range(self.plan.conversations)
        ]
        self.traffic = [Traffic(n, self.plan, self.world, x, tokens) for n, x in enumerate(self.lenders)]
        self._parties: list[RegistryParty | LenderParty | BorrowerParty] = [
            self.registry,
            *self.lenders,
            *self.borrowers,
        ]

    def run(self) -> Outcome:
        self.registry.start()
        for lender in self.lenders:
            lender.start()
        for chat in self.chats:
            chat.start()
        for traffic in self.traffic:
            traffic.start()
        self._strike()
        self.world.run(self.plan.safety_ms)
        self._heal()
        self._come_to_rest()
        if not self.judge.violations:
            self._agree()
        if not self.judge.violations:
            self._borrow_clean()
        if not self.judge.violations:
            self._drain()
        self.judge.counts["lies"] += self.registry.lies
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
            world.hardware(self._instant(), lambda: self._break_line(world.rng.choice(self.lenders)))

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
        self.world.hardware(self.world.between(1, 60), lambda: self._restart(party))

    def _restart(self, party: RegistryParty | LenderParty | BorrowerParty) -> None:
        if isinstance(party, LenderParty) and self.world.chance(0.2):
            party.update_weights()
        party.up = True
        if not isinstance(party, RegistryParty):
            party.boot()
        if not isinstance(party, BorrowerParty):
            party.start()

    def _break_line(self, lender: LenderParty) -> None:
        if lender.up and lender.session.line is not None:
            lender.session.line.close()

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
            all(party.up and party.paused_until_ms <= self.world.now_ms for party in self._parties)
            and all(chat.idle for chat in self.chats)
            and all(borrower.idle for borrower in self.borrowers)
            and all(lender.idle and not lender.holder.count(LeaseState.LIVE) for lender in self.lenders)
        )

    def _agree(self) -> None:
        """Once sessions are back, the registry knows of exactly the leases that the lenders hold."""
        self.world.run(self.world.now_ms + self.plan.suspect_ms)
        for lender in self.lenders:
            known = self.registry.known(EngineId(lender.name))
            self.judge.expect(
                len(known) == len(lender.holder) and all(lease_id in lender.holder for lease_id in known),
                Fault.STUCK,
                f"{lender.name} holds {len(lender.holder)} leases, the registry knows of {sorted(known)}",
            )

    def _borrow_clean(self) -> None:
        """With nothing wrong, a prompt that goes on from a finished turn borrows what is common."""
        lender = next((lender for lender in self.lenders if not lender.updated), None)
        if lender is None or (self.plan.on_deadline is OnDeadline.END and self.plan.ttl_ms < 60):
            return  # nothing to borrow from, or nothing for long enough
        tenant, conversation = TenantId("clean"), ConversationId("clean")
        lent: list[LeaseId | None] = []
        lender.serve(
            LenderTurn(
                tenant=tenant,
                conversation=conversation,
                text=self.tokens.text(tuple(range(100, 132))),
                prompt_tokens=20,
                done=lent.append,
            )
        )
        self._wait_for(lambda: bool(lent))
        self.world.run(self.world.now_ms + 2 * self.network.latency() + 2)
        finished: list[bool] = []
        turn = BorrowerTurn(
            request_id="clean",
            tenant=tenant,
            conversation=conversation,
            lease_id=None,
            text=self.tokens.text(tuple(range(100, 137))),
            done=finished.append,
        )
        self.borrowers[0].submit(turn)
        self._wait_for(lambda: bool(finished))
        self.judge.expect(finished == [True], Fault.STUCK, "a clean request did not finish")
        self.judge.expect(turn.outcome == "used", Fault.STUCK, f"a clean borrow came to {turn.outcome or 'nothing'}")

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        limit_ms = self.world.now_ms + 500
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
        left = len(self.registry.table)
        self.judge.expect(not left, Fault.LEAK, f"the registry believes in {left} leases of drained lenders")


def run_seed(seed: int, makings: Straight | None = None, *, sharpen: Callable[[Plan], Plan] | None = None) -> Outcome:
    """Runs a seed: honestly unless `makings` says otherwise, on its own plan unless `sharpen` alters it."""
    makings = makings or Straight()
    return Simulation(seed, makings, sharpen or makings.sharpen).run()
