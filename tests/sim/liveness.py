"""What must come of a seed once nothing is wrong any more, phase by phase.

All is healed and the registries are restarted in turn; what is under way must finish, every lease must lapse or end as
configured, every block come back, registries agree with lenders, and clean borrows succeed at each of them.
Invariant: every wait has a limit in virtual time; what is not so by then is a violation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvlease.registry.errors import RegistryUnavailable
from kvlease.registry.etcd_codec import decode_end_owed
from kvlease.registry.values import (
    ConversationId,
    EndOrder,
    EndReason,
    EndScope,
    LeaseId,
    LeaseState,
    OnDeadline,
    TenantId,
)

from tests.sim.borrower_turn import BorrowerTurn
from tests.sim.judge import Fault
from tests.sim.lender import LenderParty, LenderTurn
from tests.sim.lender_link import LATE_MS
from tests.sim.plan import DOWN_MS, NO_FAULTS
from tests.sim.registry import RegistryParty
from tests.sim.replica import ReplicaParty
from tests.sim.store import KEYS

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

_ONE_STRETCH_MS: Final = 200
_SESSIONS_BACK_MS: Final = 100
_IN_FLIGHT_MS: Final = 20
"""A lease may end at any time, and its registry hears of it a little later."""
_ENDED_MS: Final = 150
"""After so long an end that was asked for anywhere has reached everybody."""
_CLEAN: Final = TenantId("clean")


class Liveness:
    """The last phases of one seed."""

    def __init__(self, sim: Simulation) -> None:
        self._sim: Final = sim
        self._judge: Final = sim.judge
        self._world: Final = sim.world
        self._plan: Final = sim.plan
        self.agreed_ms = 0
        """How long it took at most until all agreed."""

    def run(self) -> None:
        """Up to the first phase that finds something wrong."""
        self._heal()
        if self._plan.replicated:
            self._agree()
        self._restart_in_turn()
        phases = [self._come_to_rest, self._agree, self._borrow_clean, self._renew_for_ever, self._drain]
        if self._plan.replicated:
            phases[3:3] = [self._end_anywhere, self._end_and_forget]
        for phase in phases:
            if not self._judge.violations:
                phase()

    def _heal(self) -> None:
        self._sim.network.faults = NO_FAULTS
        for borrower in self._sim.borrowers:
            borrower.preempt = 0.0
        for chat in self._sim.chats:
            chat.turns_left = 0
            chat.plan = self._plan.healed()
        for traffic in self._sim.traffic:
            traffic.turns_left = 0
        for twin in self._sim.twins:  # somebody sees the mistake
            if twin.up:
                twin.crash()
                twin.life += 1
                self._sim.missed(twin)
            if twin in self._sim.parties:
                self._sim.parties.remove(twin)
        for registry in self._sim.registries:
            if isinstance(registry, ReplicaParty):
                registry.cut.to_store_ms = registry.cut.from_store_ms = 0

    def _restart_in_turn(self) -> None:
        """One registry after the other is restarted. In the end everybody is with the first."""
        self._wait_for(self._all_up, 1_000)
        for registry in self._sim.registries:
            self._sim.crash(registry)
            self._world.run(self._world.now_ms + DOWN_MS + _SESSIONS_BACK_MS)

    def _all_up(self) -> bool:
        return all(party.up and party.paused_until_ms <= self._world.now_ms for party in self._sim.parties)

    def _come_to_rest(self) -> None:
        """Everything under way finishes, and everything lent comes back, within the terms and a fixed time beside."""
        limit_ms = self._world.now_ms + self._plan.ttl_ms + 200 + 2_000
        while self._world.now_ms < limit_ms and not self._at_rest():
            self._world.run(self._world.now_ms + _ONE_STRETCH_MS)
        for lender in self._sim.lenders:
            lender.unfinished()
            live = lender.holder.count(LeaseState.LIVE)
            self._judge.expect(not live, Fault.LEAK, f"{lender.name}: {live} live leases")
            if self._plan.on_deadline is OnDeadline.END:
                self._judge.expect(not len(lender.holder), Fault.LEAK, f"{lender.name}: leases after their deadline")
        for borrower in self._sim.borrowers:
            borrower.unfinished()
        for chat in self._sim.chats:
            self._judge.expect(chat.idle, Fault.UNFINISHED, chat.name)

    def _at_rest(self) -> bool:
        return (
            self._all_up()
            and all(chat.idle for chat in self._sim.chats)
            and all(borrower.idle for borrower in self._sim.borrowers)
            and all(lender.idle and not lender.holder.count(LeaseState.LIVE) for lender in self._sim.lenders)
        )

    def _agree(self) -> None:
        """Once sessions are back, registries know of exactly the leases that lenders hold.

        Each replica does; of registries without a store one does, and no other knows of any.
        """
        plan, began_ms = self._plan, self._world.now_ms
        if plan.replicated:
            self._wait_for(lambda: not self._differences(), plan.session_ttl_ms + plan.engine_ttl_ms + 200)
        else:
            self._world.run(self._world.now_ms + plan.suspect_ms)
            self._wait_for(lambda: not self._differences(), _IN_FLIGHT_MS)
        self.agreed_ms = max(self.agreed_ms, self._world.now_ms - began_ms)
        for difference in self._differences():
            self._judge.found(Fault.STUCK, difference)
        if plan.replicated:
            held = [lease_id for lender in self._sim.lenders for lease_id in lender.lifetimes.held]
            restored = self._sim.etcd.history > 0
            self._sim.promises.check_ends(self._sim.registries, held, restored=restored)

    def _differences(self) -> list[str]:
        """What registries believe that is not so."""
        if self._plan.replicated:
            return [x for replica in self._sim.registries for x in self._replica_differences(replica)]
        first, *others = self._sim.registries
        found: list[str] = []
        for lender in self._sim.lenders:
            engine_id = lender.engine_id
            known = first.known(engine_id)
            if len(known) != len(lender.holder) or not all(lease_id in lender.holder for lease_id in known):
                found.append(f"{lender.name} holds {len(lender.holder)} leases, the registry knows of {sorted(known)}")
            found += [f"{x.name} was left and knows of {lender.name}" for x in others if x.known(engine_id)]
        return found

    def _replica_differences(self, replica: RegistryParty) -> list[str]:
        found: list[str] = []
        for lender in self._sim.lenders:
            known, held = set(replica.known(lender.engine_id)), lender.lifetimes.held
            if known != held:
                found.append(
                    f"{lender.name} holds {sorted(held - known)} that {replica.name} does not know of, "
                    f"which believes in {sorted(known - held)}"
                )
        lenders = {lender.engine_id for lender in self._sim.lenders}
        engines = {status.engine.engine_id for status in replica.table.list_engines(now_ms=replica.now_ms())}
        if engines != lenders:
            found.append(f"{replica.name} knows of {sorted(engines)}")
        if len(replica.table) != sum(len(lender.holder) for lender in self._sim.lenders):
            found.append(f"{replica.name} has {len(replica.table)} leases")
        try:
            replica.check_current()
        except RegistryUnavailable:
            found.append(f"{replica.name} is not current")
        return found

    def _borrow_clean(self) -> None:
        """With nothing wrong, a prompt that goes on from a finished turn borrows what is common.

        Also from a turn that was lent before all registries were restarted: its lender has presented it again.
        """
        lender = self._clean_lender()
        if lender is None or (self._plan.on_deadline is OnDeadline.END and self._plan.ttl_ms < 60):
            return  # nothing to borrow from, or nothing for long enough
        places = len(self._sim.registries) if self._plan.replicated else 1
        for place in range(places):  # of registries without a store, all are at the first
            self._lend(lender, f"clean{place}", first_token=100 * place + 1_000)
            self._borrow(f"clean{place}", first_token=100 * place + 1_000)
            self._next_replica()
        kept = [self._lend(lender, f"kept{place}", first_token=100 * place + 2_000) for place in range(places)]
        self._restart_in_turn()
        self._agree()
        for place, lease_id in enumerate(kept):
            if lease_id is None:
                continue
            ends = self._plan.on_deadline is OnDeadline.END and lender.lifetimes.overdue(lease_id, in_ms=100)
            if lease_id in lender.holder and not ends:
                self._borrow(f"kept{place}", first_token=100 * place + 2_000)
                self._next_replica()

    def _end_anywhere(self) -> None:
        """A lease that somebody ends at any replica is over at its lender, and everywhere."""
        for replica, lender, lease_id in self._lent_to_end("ended", first_token=3_000):
            acknowledged: list[LeaseId] = []
            replica.end(_released(lease_id), acknowledged.extend)
            self._world.run(self._world.now_ms + _ENDED_MS)
            self._judge.expect(acknowledged == [lease_id], Fault.UNDONE, f"{replica.name} does not end {lease_id}")
            self._is_over(lease_id, lender, replica)

    def _end_and_forget(self) -> None:
        """An end is acknowledged, and in that instant all replicas die: its lender hears of it from those that come."""
        for replica, lender, lease_id in self._lent_to_end("forgotten", first_token=4_000):
            acknowledged: list[LeaseId] = []

            def die(leases: Sequence[LeaseId], acknowledged: list[LeaseId] = acknowledged) -> None:
                acknowledged.extend(leases)
                for registry in self._sim.registries:
                    self._world.hardware(0, lambda registry=registry: self._sim.crash(registry))  # type: ignore[misc]

            replica.end(_released(lease_id), die)
            self._wait_for(lambda acknowledged=acknowledged: bool(acknowledged))  # type: ignore[misc]
            self._judge.counts["ends_outlived_replicas"] += lease_id in lender.lifetimes.held
            self._world.run(self._world.now_ms + 1)
            self._wait_for(self._all_up, 1_000)
            self._world.run(self._world.now_ms + _SESSIONS_BACK_MS)
            self._agree()
            self._is_over(lease_id, lender, replica)

    def _lent_to_end(self, name: str, *, first_token: int) -> Iterator[tuple[RegistryParty, LenderParty, LeaseId]]:
        """For each replica a lease that it knows of; none if there was no room for it, or not for long enough."""
        lender = self._clean_lender()
        for place, replica in enumerate(self._sim.registries if lender is not None else ()):
            assert lender is not None
            lease_id = self._lend(lender, f"{name}{place}", first_token=100 * place + first_token)
            if lease_id is not None and lease_id in replica.known(lender.engine_id):
                yield replica, lender, lease_id

    def _is_over(self, lease_id: LeaseId, lender: LenderParty, replica: RegistryParty) -> None:
        known = [x.name for x in self._sim.registries if lease_id in x.known(lender.engine_id)]
        held = [*known, *([lender.name] if lease_id in lender.holder else [])]
        self._judge.expect(not held, Fault.UNDONE, f"{lease_id}, ended at {replica.name}, is held by {held}")

    def _renew_for_ever(self) -> None:
        """Somebody asks again and again to renew a lease: its blocks are back at its longest lifetime all the same."""
        lender, limit_ms = self._clean_lender(), self._plan.max_lifetime_ms
        if lender is None or not limit_ms or not self._plan.renewable:
            return
        lease_id = self._lend(lender, "renewed", first_token=300)
        until_ms = self._world.now_ms + limit_ms + _SESSIONS_BACK_MS
        while lease_id is not None and self._world.now_ms < until_ms:
            registry = self._sim.registries[0]
            if self._plan.replicated:
                registry = self._world.rng.choice(self._sim.registries)
            registry.ask_renewal(_CLEAN, lease_id, 40)
            self._world.run(self._world.now_ms + 10)
        live = lender.holder.count(LeaseState.LIVE)
        self._judge.expect(not live, Fault.OUTLIVED, f"{lender.name}: {live} leases are live after {limit_ms} ms")

    def _clean_lender(self) -> LenderParty | None:
        """A lender of the model that borrowers have."""
        return next((lender for lender in self._sim.lenders if not lender.updated), None)

    def _lend(self, lender: LenderParty, conversation: str, *, first_token: int) -> LeaseId | None:
        """A turn of 32 tokens, served and lent; its lease, once it can be resolved."""
        lent: list[LeaseId | None] = []
        lender.serve(
            LenderTurn(
                tenant=_CLEAN,
                conversation=ConversationId(conversation),
                text=self._sim.tokens.text(tuple(range(first_token, first_token + 32))),
                prompt_tokens=20,
                done=lent.append,
            )
        )
        self._wait_for(lambda: bool(lent))
        lease_id = lent[0] if lent else None
        if self._plan.replicated:
            self._wait_for(lambda: all(lease_id in x.known(lender.engine_id) for x in self._sim.registries), 100)
        else:
            self._world.run(self._world.now_ms + LATE_MS + 2 * self._sim.network.latency() + 2)
        return lease_id

    def _borrow(self, conversation: str, *, first_token: int) -> None:
        """A prompt that goes on from that turn must use what it left."""
        finished: list[bool] = []
        turn = BorrowerTurn(
            request_id=conversation,
            tenant=_CLEAN,
            conversation=ConversationId(conversation),
            lease_id=None,
            text=self._sim.tokens.text(tuple(range(first_token, first_token + 37))),
            done=finished.append,
        )
        self._sim.borrowers[0].submit(turn)
        self._wait_for(lambda: bool(finished))
        self._judge.expect(finished == [True], Fault.STUCK, f"the {conversation} request did not finish")
        self._judge.expect(
            turn.outcome == "used", Fault.STUCK, f"the {conversation} borrow came to {turn.outcome or 'nothing'}"
        )

    def _next_replica(self) -> None:
        if self._plan.replicated:
            self._sim.borrowers[0].endpoint.move()

    def _wait_for(self, reached: Callable[[], bool], limit_ms: int = 500) -> None:
        limit_ms += self._world.now_ms
        while self._world.now_ms < limit_ms and not reached():
            self._world.run(self._world.now_ms + 1)

    def _drain(self) -> None:
        """Every lender leaves in good order: nothing is held, here or in the registry."""
        for lender in self._sim.lenders:
            lender.drain()
        self._world.run(self._world.now_ms + 100)
        for lender in self._sim.lenders:
            self._judge.expect(not len(lender.holder), Fault.LEAK, f"{lender.name}: leases after the drain")
            lender.unfinished()
        left = sum(len(registry.table) for registry in self._sim.registries)
        self._judge.expect(not left, Fault.LEAK, f"registries believe in {left} leases of drained lenders")
        if self._plan.replicated:
            self._world.run(self._world.now_ms + LATE_MS + 2 * self._plan.engine_ttl_ms)
            kvs = self._sim.etcd.kvs
            keys = [key for key in kvs if key.startswith((KEYS.engines, KEYS.leases))]
            self._judge.expect(not keys, Fault.LEAK, f"the store keeps {keys[:3]} of drained lenders")
            drained = {lender.engine().incarnation for lender in self._sim.lenders}
            owed = [decode_end_owed(kv.value) for key, kv in kvs.items() if key.startswith(KEYS.ends)]
            names = [x.lease_id for x in owed if x.incarnation in drained]
            self._judge.expect(not names, Fault.LEAK, f"the store owes the ends of {names[:3]} to drained lenders")


def _released(lease_id: LeaseId) -> EndOrder:
    """What somebody says who needs a lease no longer."""
    return EndOrder(tenant=_CLEAN, scope=EndScope.LEASE, target=lease_id, reason=EndReason.RELEASED)
