"""One seed from beginning to end: parties, faults, a safety phase, healing, a liveness phase, the verdict.

The safety phase has every fault of the plan; what must come of it when all is healed is in `liveness.py`.
Invariant: (seed, break) decides everything.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tests.sim.borrower import BorrowerParty
from tests.sim.breaks import Straight
from tests.sim.clients import Conversation, Traffic
from tests.sim.etcd import Etcd
from tests.sim.fabric import Fabric
from tests.sim.judge import Fault, Judge, Violation
from tests.sim.lender import LenderParty
from tests.sim.liveness import Liveness
from tests.sim.network import Network
from tests.sim.plan import DOWN_MS, Plan, draw
from tests.sim.promises import Promises
from tests.sim.registry import RegistryParty
from tests.sim.replica import ReplicaParty
from tests.sim.tokens import Tokens
from tests.sim.world import World

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
    agreed_ms: int
    """Virtual time from healing, or a restart, until registries and lenders agreed, at most."""


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
        self.promises = promises = Promises(self.judge)
        fabric = Fabric(self.network)
        self.etcd = Etcd(self.world)
        self.registries: list[RegistryParty] = [self._registry(n, makings) for n in range(self.plan.registries)]
        names = [(f"lender{n}", "") for n in range(self.plan.lenders)]
        names += [(f"twin{n}", f"lender{n}") for n in range(min(self.plan.faults.twins, self.plan.lenders))]
        lenders = [
            LenderParty(
                name,
                self.plan,
                fabric,
                self.registries,
                tokens,
                self.judge,
                makings,
                promises,
                clock_offset_ms=rng.randrange(_CLOCKS_MS),
                engine_id=engine_id,
            )
            for name, engine_id in names
        ]
        by_name = {lender.name: lender for lender in lenders}
        self.lenders = lenders[: self.plan.lenders]
        self.twins = lenders[self.plan.lenders :]
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
            Conversation(n, self.plan, self.network, self.registries, self.borrowers, lenders, tokens, promises)
            for n in range(self.plan.conversations)
        ]
        self.traffic = [Traffic(n, self.plan, self.world, x, tokens) for n, x in enumerate(lenders)]
        self.parties: list[RegistryParty | LenderParty | BorrowerParty] = [
            *self.registries,
            *self.lenders,
            *self.borrowers,
        ]
        self.connected: list[Client] = [*lenders, *self.borrowers, *self.chats]

    def run(self) -> Outcome:
        for registry in self.registries:
            registry.start()
        for lender in self.lenders:
            lender.start()
        for twin in self.twins:
            twin.up = False
            self.world.hardware(self._instant(), lambda twin=twin: self._start_twin(twin))  # type: ignore[misc]
        for chat in self.chats:
            chat.start()
        for traffic in self.traffic:
            traffic.start()
        self._strike()
        self.world.run(self.plan.safety_ms)
        liveness = Liveness(self)
        liveness.run()
        self._count()
        return Outcome(
            seed=self.seed,
            plan=self.plan,
            violations=tuple(self.judge.violations),
            counts=self.judge.counts,
            steps=self.world.steps,
            agreed_ms=liveness.agreed_ms,
        )

    # -- faults ---------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        """Lays down when who pauses, crashes, or loses its line."""
        world, faults = self.world, self.plan.faults
        for _ in range(faults.pauses):
            party, length = world.rng.choice(self.parties), world.between(5, 4 * faults.long_ms)
            world.hardware(self._instant(), lambda party=party, length=length: world.pause(party, length))  # type: ignore[misc]
        for _ in range(faults.crashes):
            world.hardware(self._instant(), lambda: self.crash(world.rng.choice(self.parties)))
        for _ in range(faults.line_breaks):
            world.hardware(self._instant(), lambda: self._break_line(world.rng.choice(self.connected)))
        for roll in range(self.plan.rolls):
            start_ms = self._instant()
            apart_ms = 0 if roll and self.plan.replicated else DOWN_MS
            for turn, registry in enumerate(self.registries):
                world.hardware(start_ms + turn * apart_ms, lambda registry=registry: self.crash(registry))  # type: ignore[misc]
        if self.plan.replicated:
            self._strike_store()

    def _strike_store(self) -> None:
        """And when what happens to the store, or between it and a replica."""
        world, faults, etcd = self.world, self.plan.faults, self.etcd
        replicas = [x for x in self.registries if isinstance(x, ReplicaParty)]
        for _ in range(faults.store_cuts):
            world.hardware(self._instant(), lambda: self._cut([world.rng.choice(replicas)]))
        for _ in range(faults.store_outages):
            world.hardware(self._instant(), lambda: self._cut(replicas))
        for _ in range(faults.store_expiries):
            world.hardware(self._instant(), etcd.expire_one)
        for _ in range(faults.compactions):
            world.hardware(self._instant(), etcd.compact)
        for _ in range(faults.restores):
            saved_ms = self._instant()
            world.hardware(saved_ms, etcd.save)
            world.hardware(world.between(saved_ms, self.plan.safety_ms), etcd.restore)

    def _cut(self, replicas: Sequence[ReplicaParty]) -> None:
        """In one direction or in both."""
        world = self.world
        until_ms, way = world.now_ms + world.between(20, 6 * self.plan.faults.long_ms), world.between(0, 2)
        for replica in replicas:
            if way != 0:
                replica.cut.to_store_ms = max(replica.cut.to_store_ms, until_ms)
            if way != 1:
                replica.cut.from_store_ms = max(replica.cut.from_store_ms, until_ms)

    def _start_twin(self, twin: LenderParty) -> None:
        twin.up = True
        twin.boot()
        twin.start()
        self.parties.append(twin)
        self.judge.counts["twins"] += 1

    def _instant(self) -> int:
        return self.world.between(20, self.plan.safety_ms - 20)

    def crash(self, party: RegistryParty | LenderParty | BorrowerParty) -> None:
        if not party.up:
            return
        self.judge.counts["crashed"] += 1
        party.crash()
        party.life += 1
        self.missed(party)
        self.world.hardware(self.world.between(1, DOWN_MS), lambda: self._restart(party))

    def _restart(self, party: RegistryParty | LenderParty | BorrowerParty) -> None:
        if party not in self.parties:
            return
        if isinstance(party, LenderParty) and self.world.chance(0.2):
            party.update_weights()
        party.up = True
        if not isinstance(party, RegistryParty):
            party.boot()
        if not isinstance(party, BorrowerParty):
            party.start()

    def missed(self, party: RegistryParty | LenderParty | BorrowerParty) -> None:
        """A party is gone, and its clients see it."""
        for chat in self.chats:
            chat.crashed(party)
        for client in self.connected:
            if not isinstance(client, LenderParty):
                client.endpoint.registry()  # it misses its connection at once; a lender is told by its line

    def _registry(self, number: int, makings: Straight) -> RegistryParty:
        name, plan, rng = f"registry{number}", self.plan, self.world.rng
        clock_offset_ms = rng.randrange(_CLOCKS_MS)
        if not plan.replicated:
            return RegistryParty(name, self.network, plan, makings, clock_offset_ms=clock_offset_ms)
        pace_ms = rng.choice((2, 5, 20))
        return ReplicaParty(
            name, self.network, plan, makings, self.etcd, pace_ms=pace_ms, clock_offset_ms=clock_offset_ms
        )

    def _count(self) -> None:
        counts = self.judge.counts
        counts["lies"] += sum(registry.lies for registry in self.registries)
        counts["moved"] += sum(client.endpoint.moves for client in self.connected)
        for registry in self.registries:
            if isinstance(registry, ReplicaParty):
                counts["loads"] += registry.loads
                beyond_ms = registry.beyond_ms
                self.judge.expect(beyond_ms <= 0, Fault.STALE, f"{registry.name}: by {beyond_ms} ms")
        counts["expiries"] += self.etcd.expiries
        counts["restores"] += self.etcd.history
        counts["revisions"] += self.etcd.revision - 1

    def _break_line(self, client: Client) -> None:
        if not isinstance(client, LenderParty):
            client.endpoint.move()
        elif client.up and client.session.line is not None:
            client.session.line.close()


def run_seed(seed: int, makings: Straight | None = None, *, sharpen: Callable[[Plan], Plan] | None = None) -> Outcome:
    """Runs a seed: honestly unless `makings` says otherwise, on its own plan unless `sharpen` alters it."""
    makings = makings or Straight()
    return Simulation(seed, makings, sharpen or makings.sharpen).run()
