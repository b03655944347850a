"""How the table takes in what other replicas wrote, in the store's order, so that all replicas come to agree.

Pure. Every engine has one home, the replica with its session; all others hold a copy of its leases and only say so.
The home's table is right about its engine: what another replica, or the store by itself, does to one of its keys is
either carried out (an end) or written again (everything else). What comes from elsewhere is never written back but
for that.
Invariant: when nobody writes any more, every replica's leases are those of the homes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kvlease.registry.aliases import Aliases
from kvlease.registry.engines import EngineState
from kvlease.registry.errors import LimitReached, SessionReplaced
from kvlease.registry.table_changes import (
    AliasPut,
    Batch,
    Changes,
    Draft,
    EndHeard,
    EndOwed,
    EngineBeat,
    EngineGone,
    EnginePut,
    LeaseGone,
    LeasePut,
    RenewalAsked,
    RenewalRefused,
    RenewPush,
    StoreChange,
    StoredView,
)
from kvlease.registry.table_leases import HeldLease
from kvlease.registry.table_ledger import INFERRED, Ledger
from kvlease.registry.table_passed_over import PassedOver
from kvlease.registry.table_roster import Roster
from kvlease.registry.values import EndReason, EngineId, LeaseId, TenantId


class Replicas:
    """The other replicas' part in the table."""

    def __init__(self, ledger: Ledger, roster: Roster, aliases: Aliases) -> None:
        self._ledger: Final = ledger
        self._roster: Final = roster
        self._aliases: Final = aliases
        self._passed_over: Final = PassedOver()

    def beats(self, now_ms: int) -> tuple[EngineBeat, ...]:
        """What the other replicas are to know of the lenders whose sessions are here."""
        return tuple(x.beat(now_ms) for x in self._roster.engines.values() if x.session is not None)

    def apply(self, batch: Batch, now_ms: int) -> Changes:
        """Take in one batch. What it returns to be stored are corrections of our own engines' keys."""
        draft = Draft()
        corrections: list[StoreChange] = []
        if batch.own:
            for change in batch.changes:
                if isinstance(change, EnginePut):
                    corrections.extend(self._confirm(draft, change, now_ms))
                elif isinstance(change, EngineGone):
                    self._confirm_gone(draft, change)
                elif isinstance(change, LeasePut):
                    corrections.extend(self._confirm_lease(draft, change, now_ms))
                elif isinstance(change, LeaseGone):
                    corrections.extend(self._confirm_lease_gone(draft, change, now_ms))
                elif isinstance(change, EndOwed):
                    corrections.extend(self._owe(draft, change, now_ms, own=True))
                elif isinstance(change, EndHeard):
                    self._ledger.owed.drop(change.lease_id)
            draft.stored = corrections
            return draft.done()
        followed = {x.engine.engine_id for x in batch.changes if isinstance(x, EnginePut)}
        again: set[LeaseId] = set()
        for change in batch.changes:
            if isinstance(change, EngineGone) and change.engine_id in followed:
                continue  # made room for its next incarnation, which comes with it
            for written in self._apply(draft, change, now_ms, expired=batch.expired):
                if isinstance(written, LeasePut):
                    if written.publication.lease_id in again:
                        continue  # it expired together with its engine, with which it is written again already
                    again.add(written.publication.lease_id)
                corrections.append(written)
        for beat in batch.beats:
            self._hear(beat, now_ms)
        draft.stored = corrections
        return draft.done()

    def replace(
        self, view: StoredView, pending: Iterable[StoreChange], now_ms: int, *, rest_follows: bool = False
    ) -> Changes:
        """Make the table agree with all that is in the store, and the store with what only we can know.

        `pending`: what we have yet to write, all of it later than `view`. `rest_follows`: its leases and aliases are
        not taken in here, but come as batches next, as many at a time as the caller likes.
        """
        draft = Draft()
        pending = tuple(pending)
        self._passed_over.clear()  # what is still in the store comes again
        self._recount(pending, {x.put.engine.engine_id: x.put for x in view.engines if x.own})
        corrections: list[StoreChange] = []
        stored: dict[LeaseId, LeasePut] = {x.publication.lease_id: x for x in view.leases}
        for engine in view.engines:
            state = self._roster.engines.get(engine.put.engine.engine_id)
            same = state is not None and state.engine.incarnation == engine.put.engine.incarnation
            # Own and not known as such: the store went back to when we were its home.
            if not engine.own or state is None or (state.elsewhere and not same):
                corrections.extend(self._meet(draft, engine.put, now_ms, heard=False))
        for beat in view.beats:
            state = self._roster.engines.get(beat.engine_id)
            if state is not None and state.elsewhere and state.engine.incarnation == beat.incarnation:
                state.clock.hear(beat.now_lender_ms, now_ms)  # a lower bound, however old; no sign of life
        present = {x.put.engine.engine_id: x.put.engine.incarnation for x in view.engines}
        for engine_id, state in list(self._roster.engines.items()):
            if present.get(engine_id) == state.engine.incarnation:  # the store may have gone back to an earlier one
                continue
            if state.elsewhere:
                self._roster.depart(draft, state, EndReason.LENDER_LOST, None)
            else:
                corrections.append(_again(state))
        written = {x.lease_id for x in (*view.owed, *pending) if isinstance(x, EndOwed)}
        for lease_id in [x for x in self._ledger.owed if x not in written]:
            self._ledger.owed.drop(lease_id)  # the lender has confirmed it elsewhere meanwhile
        for owed in view.owed:  # before our own leases are written again
            corrections.extend(self._owe(draft, owed, now_ms))
        for lease in list(self._ledger.index.by_id.values()):
            lease_id, engine = lease.publication.lease_id, lease.holder.engine
            put = stored.get(lease_id)
            # Without its engine's key beside it, other replicas have passed it over.
            if put is not None and put.incarnation == engine.incarnation == present.get(engine.engine_id):
                continue
            if _is_ours(lease):
                corrections.append(self._ledger.put(lease))
            elif not lease.holder.departed:
                self._ledger.end(draft, lease, EndReason.LENDER_LOST, now_ms, push=False)
        if not rest_follows:
            for put in view.leases:
                corrections.extend(self._take_in(draft, put, now_ms))
            for alias in view.aliases:
                self._name(alias, now_ms)
        draft.stored = corrections
        return draft.done()

    # --- one change

    def _apply(self, draft: Draft, change: StoreChange, now_ms: int, *, expired: bool) -> Iterable[StoreChange]:
        match change:
            case EnginePut():
                return self._meet(draft, change, now_ms, heard=True)
            case EngineGone():
                return self._miss(draft, change, now_ms)
            case LeasePut():
                return self._take_in(draft, change, now_ms)
            case LeaseGone():
                return self._let_go(draft, change, now_ms, expired=expired)
            case EndOwed():
                return self._owe(draft, change, now_ms)
            case EndHeard():
                self._ledger.owed.drop(change.lease_id)
            case AliasPut():
                self._name(change, now_ms)
            case RenewalAsked():
                self._pass_on(draft, change, now_ms)
            case RenewalRefused():
                self._ledger.renewals.settle(draft, change.lease_id, change.status, change.remaining_ms)
        return ()

    def _confirm(self, draft: Draft, put: EnginePut, now_ms: int) -> Iterable[StoreChange]:
        """Our own hello has its place in the store's order: what comes from others from now on is later."""
        state = self._roster.engines.get(put.engine.engine_id)
        if state is None or (state.elsewhere and state.engine.incarnation != put.engine.incarnation):
            # It was overtaken while it was on its way. To all others it is the last word; so it has to be to us.
            self._meet(draft, put, now_ms, heard=False)
            self._roster.engines[put.engine.engine_id].elsewhere = False
            if state is not None:
                state.elsewhere = False  # whoever fences clears away
            return ()
        if state.engine.incarnation != put.engine.incarnation:
            return ()
        state.elsewhere = False
        if state.awaited_ms is not None and put.now_lender_ms >= state.awaited_ms:
            state.awaited_ms = None
        if state.awaited_ms is not None:
            return ()
        strays = self._passed_over.take(put.engine.engine_id)
        lost = EndReason.LENDER_LOST
        ended, held = self._ledger.ended, self._ledger.index.by_id
        return tuple(LeaseGone(lease_id=x, reason=ended.reason(x) or lost) for x in strays if x not in held)

    def _confirm_gone(self, draft: Draft, gone: EngineGone) -> None:
        """The end of an engine that we wrote after a hello which has just been confirmed."""
        state = self._roster.engines.get(gone.engine_id)
        if state is not None and state.engine.incarnation == gone.incarnation and state.session is None:
            state.elsewhere = True
            self._roster.depart(draft, state, EndReason.LENDER_LOST, None)

    def _recount(self, pending: Iterable[StoreChange], written: Mapping[EngineId, EnginePut]) -> None:
        for state in self._roster.engines.values():
            state.awaited_ms = None
        for change in pending:
            if isinstance(change, EnginePut):
                engine = change.engine
                known, done = self._roster.engines.get(engine.engine_id), written.get(engine.engine_id)
                same = done is not None and done.engine.incarnation == engine.incarnation
                if done is not None and same and done.now_lender_ms >= change.now_lender_ms:
                    continue
                if known is not None and known.engine.incarnation == engine.incarnation:
                    known.awaited_ms = change.now_lender_ms

    def _confirm_lease(self, draft: Draft, put: LeasePut, now_ms: int) -> Iterable[StoreChange]:
        """A lease that we wrote and that nobody has any more goes out of the store again.

        If the engine has moved on meanwhile, it is a copy like any other: its home may not have it to take it out.
        """
        lease_id = put.publication.lease_id
        state = self._roster.engines.get(put.engine_id)
        if state is not None and state.elsewhere and state.engine.incarnation == put.incarnation:
            return self._take_in(draft, put, now_ms)
        lease: HeldLease | None = self._ledger.index.by_id.get(lease_id)
        if lease is not None and not lease.holder.departed:
            return ()
        if (lease is not None and not lease.holder.elsewhere) or (state is not None and state.elsewhere):
            return ()  # its end is being written, or its home corrects
        return (LeaseGone(lease_id=lease_id, reason=self._ledger.ended.reason(lease_id) or EndReason.LENDER_LOST),)

    def _confirm_lease_gone(self, draft: Draft, gone: LeaseGone, now_ms: int) -> Iterable[StoreChange]:
        """What we took out of the store is no copy here, though its home may have written it in between.

        If the engine has come here meanwhile, what it has presented is written again. What it has not is no longer in
        the store for its next home to take out.
        """
        lease: HeldLease | None = self._ledger.index.by_id.get(gone.lease_id)
        if lease is None:
            return ()
        if _is_ours(lease):
            return (self._ledger.put(lease),)
        self._ledger.end(draft, lease, gone.reason, now_ms, push=False)
        return ()

    def _meet(self, draft: Draft, put: EnginePut, now_ms: int, *, heard: bool) -> Iterable[StoreChange]:
        """Another replica has this engine's session now, unless ours is the later one."""
        state = self._roster.engines.get(put.engine.engine_id)
        if state is not None and state.awaited_ms is not None:
            return ()  # ours is on its way to the store and will overwrite it
        if (
            state is not None
            and state.session is not None
            and state.engine.incarnation == put.engine.incarnation
            and put.now_lender_ms < state.hello_ms
        ):
            return (_again(state),)  # the lender came here from there, and its hello there was held up
        if state is not None and state.engine.incarnation != put.engine.incarnation:
            fenced = SessionReplaced("fenced by a new incarnation of the same engine id at another replica")
            self._roster.depart(draft, state, EndReason.LENDER_LOST, fenced)
            state.elsewhere = True  # what its leases' end means to the store is the other replica's business
            state = None
        if state is None:
            self._roster.follow(put, now_ms, heard=heard)
        else:
            self._roster.yield_home(draft, state, put, now_ms, heard=heard)
        return ()

    def _miss(self, draft: Draft, gone: EngineGone, now_ms: int) -> Iterable[StoreChange]:
        state = self._roster.engines.get(gone.engine_id)
        if state is None or state.engine.incarnation != gone.incarnation:
            return ()
        if state.session is None:
            state.elsewhere = True
            self._roster.depart(draft, state, EndReason.LENDER_LOST, None)
            return ()
        return (
            _again(state),
            *(self._ledger.put(x) for x in state.leases.values() if x.generation >= state.valid_from),
        )

    def _take_in(self, draft: Draft, put: LeasePut, now_ms: int) -> Iterable[StoreChange]:
        publication = put.publication
        lease_id = publication.lease_id
        state = self._roster.engines.get(put.engine_id)
        lease: HeldLease | None = self._ledger.index.by_id.get(lease_id)
        self._passed_over.discard(lease_id)
        if state is None:
            self._pass_over(put)  # of an engine that is gone: the store clears it away, or it comes back
            return ()
        if state.engine.incarnation != put.incarnation:
            if state.elsewhere:
                self._pass_over(put)
                return ()
            if state.awaited_ms is not None:
                self._pass_over(put)
                return ()
            return (LeaseGone(lease_id=lease_id, reason=EndReason.LENDER_LOST),)  # its incarnation was fenced here
        if lease is not None and lease.holder is not state and lease.generation < lease.holder.valid_from:
            self._ledger.end(draft, lease, lease.holder.void_reason, now_ms, push=False)
            lease = None
        if not state.elsewhere:
            if lease is not None and lease.holder is state:
                mine = self._ledger.put(lease)
                return () if mine.publication == publication else (mine,)
            if state.awaited_ms is not None:
                self._pass_over(put)
                return ()
            reason = self._ledger.over(lease_id) or self._ledger.ended.reason(lease_id) or EndReason.LENDER_LOST
            return (LeaseGone(lease_id=lease_id, reason=reason),)
        if lease is not None and lease.holder is not state:
            return ()  # two lenders under one id: the first one stays, as at a publish
        ended = self._ledger.over(lease_id)
        if lease is None and ended is not None:
            return (LeaseGone(lease_id=lease_id, reason=ended),)  # its home has yet to hear of it, or never will
        self._ledger.copy(draft, publication, state, now_ms)
        return ()

    def _pass_over(self, put: LeasePut) -> None:
        """In the store and not taken in. If its engine is or comes here and does not present it, it is to go."""
        self._passed_over.add(put.publication.lease_id, put.engine_id)

    def _let_go(self, draft: Draft, gone: LeaseGone, now_ms: int, *, expired: bool) -> Iterable[StoreChange]:
        self._passed_over.discard(gone.lease_id)
        lease: HeldLease | None = self._ledger.index.by_id.get(gone.lease_id)
        if lease is None:
            if not expired:
                self._ledger.ended.remember(gone.lease_id, TenantId(""), gone.reason)
            return ()
        if lease.holder.elsewhere:
            self._ledger.end(draft, lease, gone.reason, now_ms, push=False)
            return ()
        if expired or gone.reason in INFERRED:
            if not _is_ours(lease):
                self._ledger.end(draft, lease, gone.reason, now_ms, push=False)
                return ()
            return (self._ledger.put(lease),)  # neither the store's clock decides, nor what others conclude
        self._ledger.end(draft, lease, gone.reason, now_ms)
        return (gone,)  # again, after whatever we may have written of this lease meanwhile

    def _owe(self, draft: Draft, owed: EndOwed, now_ms: int, *, own: bool = False) -> Iterable[StoreChange]:
        """An end that the lender has yet to confirm. Its home tells it; what the lender answers clears it away.

        The lender may have ended the lease already, and said so before this was known here: then it is asked, too.
        """
        lease_id, held = owed.lease_id, self._ledger.index.by_id
        gone = LeaseGone(lease_id=lease_id, reason=owed.reason)
        state = self._roster.engines.get(owed.engine_id)
        told_already = lease_id not in held
        corrections = self._let_go(draft, gone, now_ms, expired=False)
        if lease_id not in held:
            self._ledger.owed.add(owed)
        if told_already and not own and state is not None and state.engine.incarnation == owed.incarnation:
            self._ledger.ask_confirmation(draft, state, owed)
        return corrections

    def _name(self, put: AliasPut, now_ms: int) -> None:
        try:
            self._aliases.name(put.tenant, put.conversation, (put.alias,), expires_ms=now_ms + put.ttl_ms)
        except LimitReached:
            return  # a cache that is full: it costs reuse only

    def _pass_on(self, draft: Draft, asked: RenewalAsked, now_ms: int) -> None:
        lease: HeldLease | None = self._ledger.index.by_id.get(asked.lease_id)
        if lease is None or lease.holder.session is None or self._ledger.end_due(lease, now_ms) is not None:
            return
        if self._ledger.renewals.ask(asked.lease_id, asked.ttl_ms, now_ms, elsewhere=True):
            push = RenewPush(session=lease.holder.session, lease_id=asked.lease_id, ttl_ms=asked.ttl_ms)
            draft.renewals.append(push)

    def _hear(self, beat: EngineBeat, now_ms: int) -> None:
        state = self._roster.engines.get(EngineId(beat.engine_id))
        if state is not None and state.elsewhere and state.engine.incarnation == beat.incarnation:
            state.hear_from_home(beat, now_ms, self._ledger.limits.suspect_after_ms)


def _is_ours(lease: HeldLease) -> bool:
    """Whether the store has to have the lease because this home says so: its lender is here, and said that it holds it.

    Until it has presented what it holds, the rest is a copy still.
    """
    holder = lease.holder
    return not holder.elsewhere and lease.generation >= (holder.generation if holder.presenting else holder.valid_from)


def _again(state: EngineState) -> EnginePut:
    """Our engine, to be written once more; until that is confirmed, what others wrote of it is older."""
    state.awaited_ms = state.hello_ms
    return EnginePut(engine=state.engine, now_lender_ms=state.hello_ms)
