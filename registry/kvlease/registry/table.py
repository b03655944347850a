"""The lease table: every command of lenders, borrowers, routers and operators, and what each brings about.

Pure and synchronous: commands and `now_ms` (our monotonic clock) in, `Changes` out; no I/O, no clock, no tasks. A
command either raises and has changed nothing, or returns all that it changed. The caller carries the changes out in
order: store them, tell watchers, then push and reply.
Invariant: `check` holds between any two commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from kvlease.registry.aliases import Aliases
from kvlease.registry.engines import EngineState
from kvlease.registry.errors import (
    InvalidRequest,
    LenderSilent,
)
from kvlease.registry.table_changes import (
    NOTHING,
    AliasPut,
    Batch,
    Changes,
    Draft,
    EngineBeat,
    RenewalAsked,
    RenewalRefused,
    RenewalSettled,
    RenewPush,
    SessionId,
    StoreChange,
    StoredView,
)
from kvlease.registry.table_leases import HeldLease, Tally
from kvlease.registry.table_ledger import INFERRED, Ledger
from kvlease.registry.table_limits import TICK_WORK, TableLimits
from kvlease.registry.table_replicas import Replicas
from kvlease.registry.table_roster import Roster
from kvlease.registry.table_search import Found, LeaseSearch
from kvlease.registry.table_time import TableTime
from kvlease.registry.values import (
    Alias,
    ConversationId,
    EndOrder,
    EndReason,
    EndScope,
    Engine,
    EngineId,
    EngineStatus,
    Hit,
    Incarnation,
    LeaseFilter,
    LeaseId,
    LeaseView,
    Located,
    Miss,
    Publication,
    PublishResult,
    RenewStatus,
    ResolveQuery,
    TenantId,
)


class LeaseTable:
    """All leases, engines and aliases that one registry believes in."""

    def __init__(self, limits: TableLimits | None = None, *, revision: int = 0) -> None:
        """`revision`: that of the last event before this table. Start where no earlier table can have been: a watcher
        that resumes after a restart must not mistake one history for another."""
        self.limits: Final = limits if limits is not None else TableLimits()
        self._ledger = Ledger(self.limits, revision)
        self._aliases = Aliases(max_per_tenant=self.limits.max_aliases_per_tenant, max_tenants=self.limits.max_tenants)
        self._roster = Roster(self.limits)
        self._search = LeaseSearch(self._ledger, self._aliases, self._roster.engines)
        self._time = TableTime(self._ledger, self._roster, self._aliases)
        self._replicas = Replicas(self._ledger, self._roster, self._aliases)

    @property
    def revision(self) -> int:
        """One more with every lease event."""
        return self._ledger.revision

    def __len__(self) -> int:
        """Leases held, those withdrawn and not yet ended included."""
        return len(self._ledger.index)

    # --- sessions

    def hello(self, engine: Engine, *, now_lender_ms: int, now_ms: int) -> tuple[SessionId, Changes]:
        """Open a session; message 1 of its stream. The newest session of an incarnation replaces older ones.

        Raises InvalidRequest; EngineIdInUse while another incarnation of the id has an open session and is heard in
        it (if not, it is fenced: its leases end, its session closes); LimitReached.
        """
        draft = Draft()
        session, state = self._roster.open(draft, engine, now_lender_ms=now_lender_ms, now_ms=now_ms)
        state.hear(now_lender_ms, now_ms)
        state.unnamed = dict.fromkeys(self._ledger.owed.of(engine.engine_id, engine.incarnation))
        return session, draft.done()

    def receive(self, session: SessionId, seq: int) -> None:
        """Account for the next numbered message of a session.

        Raises SessionGap if one is missing (the stream must be closed), SessionReplaced, NoSession.
        """
        self._roster.receive(session, seq)

    def heartbeat(
        self, session: SessionId, *, now_lender_ms: int, free_blocks: int, total_blocks: int, now_ms: int
    ) -> None:
        """The lender is alive, and this was its clock when it said so. Raises as `receive`."""
        state = self._roster.state(session)
        state.free_blocks, state.total_blocks = free_blocks, total_blocks
        state.hear(now_lender_ms, now_ms)

    def snapshot(
        self, session: SessionId, publications: Sequence[Publication], *, last: bool, now_ms: int
    ) -> tuple[list[PublishResult], Changes]:
        """Leases the lender still holds. They count at once; with `last`, those it did not present are withdrawn.

        Their end reads LENDER_LOST: the lender let them go while it was out of sight. Those whose end it has not
        heard of are refused, and it is told again. Raises as `receive`.
        """
        state = self._roster.state(session)
        if not state.presenting:
            raise InvalidRequest("a snapshot comes once, right after the hello", field="snapshot")
        results, draft = self._publish(state, publications, now_ms, presented=True)
        for publication in publications:
            state.unnamed.pop(publication.lease_id, None)
        if last:
            state.presenting = False
            self._confirmed(state, state.unnamed)
            state.unnamed = {}
            self._roster.withdraw(state, EndReason.LENDER_LOST, keep_current=True)
        return results, draft.done()

    def publish(
        self, session: SessionId, publications: Sequence[Publication], *, now_ms: int
    ) -> tuple[list[PublishResult], Changes]:
        """Make leases resolvable; answered one by one, in order. Raises as `receive`."""
        results, draft = self._publish(self._roster.state(session), publications, now_ms, presented=False)
        return results, draft.done()

    def session_of(self, engine_id: EngineId, incarnation: Incarnation) -> SessionId:
        """The open session of a lender that publishes by a call of its own. Raises NoSession."""
        return self._roster.session_of(engine_id, incarnation)

    def ended(self, session: SessionId, leases: Sequence[tuple[LeaseId, EndReason]], *, now_ms: int) -> Changes:
        """The lender ended these. Another lender's leases are left alone. Raises as `receive`."""
        state = self._roster.state(session)
        draft = Draft()
        self._confirmed(state, (lease_id for lease_id, _ in leases))
        for lease_id, reason in leases:
            lease = self._ledger.index.by_id.get(lease_id)
            if lease is None:  # its publish may still be on the way, by another path
                self._ledger.ended.remember(lease_id, TenantId(""), reason)
            elif lease.holder is state:
                self._ledger.end(draft, lease, reason, now_ms, push=False)
        return draft.done()

    def renewed(self, session: SessionId, leases: Sequence[tuple[LeaseId, int]], *, now_ms: int) -> Changes:
        """The lender moved these deadlines (its own clock, ms). Unknown leases are left out. Raises as `receive`."""
        state = self._roster.state(session)
        draft = Draft()
        for lease_id, deadline_ms in leases:
            lease = self._ledger.index.by_id.get(lease_id)
            if lease is None or lease.holder is not state or lease.generation < state.valid_from:
                continue
            self._ledger.renew(draft, lease, deadline_ms, now_ms)
        return draft.done()

    def refuse_renewal(self, session: SessionId, lease_id: LeaseId, status: RenewStatus, *, now_ms: int) -> Changes:
        """The lender declines to renew; everyone who asked is told. Raises as `receive`."""
        state = self._roster.state(session)
        draft = Draft()
        lease = self._ledger.index.by_id.get(lease_id)
        if lease is not None and lease.holder is state:
            remaining_ms = state.remaining_ms(lease, now_ms)
            if self._ledger.renewals.asked_elsewhere(lease_id):
                draft.stored.append(RenewalRefused(lease_id=lease_id, status=status, remaining_ms=remaining_ms))
            self._ledger.renewals.settle(draft, lease_id, status, remaining_ms)
        return draft.done()

    def goodbye(self, session: SessionId) -> Changes:
        """The lender leaves in good order: its leases end as DRAINED and it is forgotten. Raises as `receive`."""
        draft = Draft()
        state = self._roster.state(session)
        self._confirmed(state, self._ledger.owed.of(state.engine.engine_id, state.engine.incarnation))
        self._roster.depart(draft, state, EndReason.DRAINED, None)
        return draft.done()

    def disconnect(self, session: SessionId) -> None:
        """The stream is gone. What the lender holds stays believed until it has been silent for too long."""
        self._roster.disconnect(session)

    # --- callers

    def ask_renewal(
        self, tenant: TenantId, lease_id: LeaseId, *, ttl_ms: int, now_ms: int
    ) -> tuple[RenewalSettled | None, Changes]:
        """Ask the lender to move a deadline. Answered at once, or None: `Changes.settled` will tell, soon.

        Callers are joined: one push for all, and another only for a longer `ttl_ms`. Raises LenderSilent.
        """
        lease = self._ledger.index.of(tenant, lease_id)
        if lease is None or self._ledger.end_due(lease, now_ms) is not None:
            ended = lease is not None or self._ledger.ended.reason_for(lease_id, tenant) is not None
            status = RenewStatus.ENDED if ended else RenewStatus.UNKNOWN
            return RenewalSettled(lease_id=lease_id, status=status), NOTHING
        holder = lease.holder
        connected = holder.is_connected(now_ms, self.limits.home_silent_ms)
        if not connected or holder.is_suspect(now_ms, self.limits.suspect_after_ms):
            raise LenderSilent("the lender has no session")
        if not self._ledger.renewals.ask(lease_id, ttl_ms, now_ms):
            return None, NOTHING
        session = holder.session
        if session is None:
            return None, Changes(stored=(RenewalAsked(lease_id=lease_id, ttl_ms=ttl_ms),))
        return None, Changes(renewals=(RenewPush(session=session, lease_id=lease_id, ttl_ms=ttl_ms),))

    def end(self, order: EndOrder, *, now_ms: int, limit: int = TICK_WORK) -> tuple[int, bool, Changes]:
        """End at most `limit` of the leases named: how many, whether there may be more, and the changes.

        An order for many leases is repeated until there are no more, so that resolves are answered in between.
        What somebody asks for is never a conclusion: an order that gives such a reason releases.
        """
        draft = Draft()
        found = self._aimed_at(order, limit)
        reason = EndReason.RELEASED if order.reason in INFERRED else order.reason
        for lease in found:
            due = self._ledger.end_due(lease, now_ms)
            if due is not None:
                self._ledger.end(draft, lease, due, now_ms)
            else:
                self._ledger.end_as_asked(draft, lease, reason, now_ms)
        return len(found), len(found) == limit, draft.done()

    def name_conversation(
        self, tenant: TenantId, conversation: ConversationId, aliases: Sequence[Alias], *, ttl_ms: int, now_ms: int
    ) -> Changes:
        """Further names for a conversation, for `ttl_ms` (0: the default). Raises InvalidRequest, LimitReached."""
        if not 0 <= ttl_ms <= self.limits.max_alias_ttl_ms:
            limit = self.limits.max_alias_ttl_ms
            raise InvalidRequest(f"ttl_ms may be {limit} at most", field="ttl_ms", limit="max_alias_ttl_ms")
        ttl_ms = ttl_ms or self.limits.default_alias_ttl_ms
        self._aliases.name(tenant, conversation, aliases, expires_ms=now_ms + ttl_ms)
        puts = (AliasPut(tenant=tenant, alias=x, conversation=conversation, ttl_ms=ttl_ms) for x in aliases)
        return Changes(stored=tuple(puts))

    def find(self, queries: Sequence[ResolveQuery], *, now_ms: int) -> list[Found | Miss]:
        """See `LeaseSearch.find`; one answer for each query, in order."""
        find = self._search.find
        return [find(query, now_ms) for query in queries]

    def resolve(self, query: ResolveQuery, *, now_ms: int) -> Hit | Miss:
        """The same for one, as a value that outlives the table's next change. Raises InvalidRequest."""
        found = self._search.find(query, now_ms)
        return found.hit() if isinstance(found, Found) else found

    def locate(
        self, tenant: TenantId, conversation: ConversationId | None, aliases: Sequence[Alias], *, now_ms: int
    ) -> Located:
        """See `LeaseSearch.locate`."""
        return self._search.locate(tenant, conversation, aliases, now_ms)

    def list_leases(
        self, wanted: LeaseFilter, *, after: LeaseId | None = None, limit: int, now_ms: int
    ) -> tuple[list[LeaseView], LeaseId | None]:
        """See `LeaseSearch.list_leases`."""
        return self._search.list_leases(wanted, after=after, limit=limit, now_ms=now_ms)

    def owner(self, lease_id: LeaseId) -> TenantId | None:
        """Whose lease this is, for the log; None if it is not held. No tenant may ever be told."""
        lease = self._ledger.index.by_id.get(lease_id)
        return None if lease is None else lease.publication.tenant

    def list_engines(self, *, now_ms: int) -> list[EngineStatus]:
        """Every engine that has not departed, by id."""
        return self._search.list_engines(now_ms)

    def tallies(self) -> list[tuple[EngineId, TenantId, Tally]]:
        """How much each engine lends to each tenant; engines that departed are left out."""
        return [
            (engine_id, tenant, tally)
            for engine_id, state in self._roster.engines.items()
            for tenant, tally in state.tallies.items()
        ]

    # --- other replicas

    def beats(self, *, now_ms: int) -> tuple[EngineBeat, ...]:
        """See `Replicas.beats`."""
        return self._replicas.beats(now_ms)

    def apply(self, batch: Batch, *, now_ms: int) -> Changes:
        """See `Replicas.apply`."""
        return self._replicas.apply(batch, now_ms)

    def replace(
        self, view: StoredView, pending: Iterable[StoreChange], *, now_ms: int, rest_follows: bool = False
    ) -> Changes:
        """See `Replicas.replace`."""
        return self._replicas.replace(view, pending, now_ms, rest_follows=rest_follows)

    def all_heard(self) -> bool:
        """Whether each lender that is elsewhere has been heard of from its home."""
        return all(not x.elsewhere or x.home_heard_ms is not None for x in self._roster.engines.values())

    def forgive(self, *, now_ms: int) -> None:
        """After a time in which no lender could be heard, each has as long to come back as one that is just suspect."""
        self._roster.forgive(now_ms)

    # --- time

    def next_wake_ms(self) -> int | None:
        """When `tick` will next have something to do, on our clock; not later than the last tick: at once."""
        return self._time.next_wake_ms()

    def tick(self, now_ms: int) -> Changes:
        """Do what time brings: lapses, expiries, silent and lost lenders. At most TICK_WORK leases at a time."""
        return self._time.tick(now_ms)

    def check(self) -> None:
        """Rebuild every index from the leases and compare. Raises AssertionError, naming what differs. Slow."""
        ledger, roster = self._ledger, self._roster
        ledger.index.check()
        ledger.renewals.check()
        roster.check()
        self._aliases.check()
        ledger.owed.check()
        assert len(ledger.ended) <= self.limits.max_remembered_ends, "remembered ends"
        for lease_id, lease in ledger.index.by_id.items():
            state = lease.holder
            assert lease_id not in ledger.ended, f"{lease_id} is held and ended"
            assert ledger.owed.get(lease_id) is None, f"{lease_id} is held and its end is owed"
            assert id(state) in roster.sweeps or roster.engines.get(state.engine.engine_id) is state, lease_id
        states = {**roster.sweeps, **{id(x): x for x in roster.engines.values()}}
        assert sum(len(x.leases) for x in states.values()) == len(ledger.index), "leases of engines"
        for lease_id in ledger.renewals:
            assert lease_id in ledger.index.by_id, f"renewal of {lease_id}, which is not held"

    def _confirmed(self, state: EngineState, lease_ids: Iterable[LeaseId]) -> None:
        """A lender says that it does not hold these; the next ticks tell the store, some at a time."""
        engine = state.engine
        for lease_id in lease_ids:
            self._ledger.owed.confirmed(lease_id, engine.engine_id, engine.incarnation)

    def _publish(
        self, state: EngineState, publications: Sequence[Publication], now_ms: int, *, presented: bool
    ) -> tuple[list[PublishResult], Draft]:
        draft = Draft()
        return [self._ledger.publish(draft, x, state, now_ms, presented=presented) for x in publications], draft

    def _aimed_at(self, order: EndOrder, limit: int) -> list[HeldLease]:
        index = self._ledger.index
        match order.scope:
            case EndScope.LEASE:
                lease = index.of(order.tenant, LeaseId(order.target))
                return [lease] if lease is not None else []
            case EndScope.CONVERSATION:
                return list(index.branches(order.tenant, ConversationId(order.target))[:limit])
            case EndScope.ENGINE:
                state = self._roster.engines.get(EngineId(order.target))
                return list(islice(state.leases.values(), limit)) if state is not None else []
            case EndScope.TENANT:
                return list(islice(index.of_tenant(order.tenant), limit))
