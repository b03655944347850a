"""Doubles that break one rule of several registries on a store each, to show that the judges see it.

As in `breaks.py`; here the table's part for other replicas is replaced, or what is around it. Broken rules that cost
reuse only are not here, since nothing is owed then: to take one's own hello that is still on its way for older than
what others write, and to send a doubtful transaction again unseen, are made good by the home's corrections.
Invariant: each is red within a modest number of seeds, on plans with more of what it is about.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvlease.registry.errors import KvleaseError, SessionReplaced
from kvlease.registry.staleness import Staleness
from kvlease.registry.table import LeaseTable
from kvlease.registry.table_changes import (
    Batch,
    Changes,
    Draft,
    EndOwed,
    LeaseGone,
    LeasePut,
    StoreChange,
)
from kvlease.registry.table_limits import TableLimits
from kvlease.registry.table_replicas import Replicas
from kvlease.registry.values import EndReason

from tests.sim.breaks import Straight
from tests.sim.judge import Fault
from tests.sim.plan import Plan, replicated


class _Replicated(Straight):
    """With more that goes wrong between replicas and store, and more ends and renewals."""

    shows = frozenset({Fault.LOST, Fault.UNDONE, Fault.STUCK, Fault.LEAK})
    rules: type[Replicas] = Replicas

    def sharpen(self, plan: Plan) -> Plan:
        faults = replace(
            plan.faults,
            store_slow=0.2,
            store_cuts=4,
            store_expiries=4,
            compactions=4,
            line_breaks=6,
            crashes=2,
            pauses=5,
            long_ms=60,
        )
        plan = replace(plan, faults=faults, end=0.3, renew=0.3, renewable=True, ttl_ms=400, engine_ttl_ms=100)
        return replicated(plan)

    def table(self, limits: TableLimits) -> LeaseTable:
        table = super().table(limits)
        table._replicas = self.rules(table._ledger, table._roster, table._aliases)
        return table


class EndsElsewhereIgnored(_Replicated):
    """A home takes an end that was asked for at another replica for a mistake, and writes its lease again."""

    name = "ends_elsewhere_ignored"

    class rules(Replicas):  # noqa: N801
        def _let_go(self, draft: Draft, gone: LeaseGone, now_ms: int, *, expired: bool) -> Iterable[StoreChange]:
            return super()._let_go(draft, replace(gone, reason=EndReason.LENDER_LOST), now_ms, expired=expired)


class ConclusionsObeyed(_Replicated):
    """A home ends what another replica concluded to be lost."""

    name = "conclusions_obeyed"
    begin = 16

    class rules(Replicas):  # noqa: N801
        def _let_go(self, draft: Draft, gone: LeaseGone, now_ms: int, *, expired: bool) -> Iterable[StoreChange]:
            lease = self._ledger.index.by_id.get(gone.lease_id)
            if lease is None or lease.holder.elsewhere or expired:
                return super()._let_go(draft, gone, now_ms, expired=expired)
            self._ledger.end(draft, lease, gone.reason, now_ms)
            return (gone,)


class CopiesWriteBack(_Replicated):
    """A copy that its home takes out of the store is written again."""

    name = "copies_write_back"

    class rules(Replicas):  # noqa: N801
        def _let_go(self, draft: Draft, gone: LeaseGone, now_ms: int, *, expired: bool) -> Iterable[StoreChange]:
            lease = self._ledger.index.by_id.get(gone.lease_id)
            if lease is not None and lease.holder.elsewhere:
                return (self._ledger.put(lease),)
            return super()._let_go(draft, gone, now_ms, expired=expired)


class ExpiryDecides(_Replicated):
    """Keys that the store let go are over, whoever keeps them."""

    name = "expiry_decides"
    begin = 5

    class rules(Replicas):  # noqa: N801
        def _let_go(self, draft: Draft, gone: LeaseGone, now_ms: int, *, expired: bool) -> Iterable[StoreChange]:
            lease = self._ledger.index.by_id.get(gone.lease_id)
            if expired and lease is not None:
                self._ledger.end(draft, lease, gone.reason, now_ms)
                return ()
            return super()._let_go(draft, gone, now_ms, expired=expired)


class OwnEchoIgnored(_Replicated):
    """What comes back of one's own writes is not looked at: neither hellos nor leases find their place in the order."""

    name = "own_echo_ignored"
    begin = 10

    class rules(Replicas):  # noqa: N801
        def apply(self, batch: Batch, now_ms: int) -> Changes:
            return Changes() if batch.own else super().apply(batch, now_ms)


class LoadCorrectsNothing(_Replicated):
    """A home that loads the store does not make it right about its own leases."""

    name = "load_corrects_nothing"
    begin = 23

    def sharpen(self, plan: Plan) -> Plan:
        plan = super().sharpen(plan)
        return replace(plan, faults=replace(plan.faults, restores=2))

    class rules(Replicas):  # noqa: N801
        def _take_in(self, draft: Draft, put: LeasePut, now_ms: int) -> Iterable[StoreChange]:
            super()._take_in(draft, put, now_ms)
            return ()


class EndsForgotten(_Replicated):
    """What lenders have yet to confirm is not read from the store: whoever knew of an end takes it along."""

    name = "ends_forgotten"
    shows = frozenset({Fault.UNDONE})

    class rules(Replicas):  # noqa: N801
        def _owe(self, draft: Draft, owed: EndOwed, now_ms: int, *, own: bool = False) -> Iterable[StoreChange]:
            return ()


class StaleAnswers(_Replicated):
    """A replica answers however long it has not heard of the store."""

    name = "stale_answers"
    shows = frozenset({Fault.STALE})

    def may_answer(self, staleness: Staleness, now_ms: int) -> bool:
        return staleness.age_ms(now_ms) is not None


class BeatCountsWhenWritten(_Replicated):
    """A beat counts when the store has it, and not when it has come back: reads may lag behind for ever."""

    name = "beat_counts_when_written"
    shows = frozenset({Fault.STALE})

    def staleness(self, max_ms: int) -> Staleness:
        return _Hasty(max_ms=max_ms, max_under_way=16)


class _Hasty(Staleness):
    def send(self, now_ms: int) -> int:
        number = super().send(now_ms)
        self.came_back(number)
        return number


class ReplacedForGood(_Replicated):
    """A lender whose session was replaced does not come back."""

    name = "replaced_for_good"
    begin = 26

    def comes_back(self, why: KvleaseError) -> bool:
        return not isinstance(why, SessionReplaced)


REPLICA_BREAKS = (
    EndsElsewhereIgnored,
    ConclusionsObeyed,
    CopiesWriteBack,
    ExpiryDecides,
    OwnEchoIgnored,
    LoadCorrectsNothing,
    EndsForgotten,
    StaleAnswers,
    BeatCountsWhenWritten,
    ReplacedForGood,
)
