"""What may happen to one lease: published, superseded, renewed, lapsed, ended. Each step is written down as it is done.

Pure. Every change of a lease in the table goes through here, so that index, revision, event, stored change and push to
the lender cannot disagree. Who may ask for a step, and when, is decided in `table.py`.

    (none) -publish-> LIVE -deadline-> LAPSED -end-> (remembered)
                      LIVE <-renewal-- LAPSED
                      LIVE -end------------------> (remembered)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvlease.registry.engines import EngineState
from kvlease.registry.errors import InvalidRequest
from kvlease.registry.table_changes import Draft, EndOwed, EndPush, LeaseGone, LeasePut
from kvlease.registry.table_ended import EndedLeases
from kvlease.registry.table_leases import (
    HeldLease,
    LeaseIndex,
    covers,
    has_lapsed,
    same_content,
    validate_publication,
)
from kvlease.registry.table_limits import TableLimits
from kvlease.registry.table_owed import OwedEnds
from kvlease.registry.table_renewals import Renewals
from kvlease.registry.values import (
    EndReason,
    LeaseEvent,
    LeaseEventType,
    LeaseId,
    LeaseState,
    LeaseView,
    OnDeadline,
    Publication,
    PublishResult,
    PublishStatus,
    RenewStatus,
)

INFERRED: Final = frozenset({EndReason.EXPIRED, EndReason.LENDER_LOST})
"""Ends that the registry concluded from silence or from its idea of the lender's clock. A lender that presents such a
lease in a snapshot knows better. Every other end was asked for or reported, and is for good."""


class Ledger:
    """The leases, the ends remembered, and the revision: one more with every event."""

    def __init__(self, limits: TableLimits, revision: int = 0) -> None:
        self.limits: Final = limits
        self.index: Final = LeaseIndex()
        self.ended: Final = EndedLeases(limit=limits.max_remembered_ends)
        self.owed: Final = OwedEnds(limit=limits.max_owed_ends)
        self.renewals: Final = Renewals(wait_ms=limits.renewal_wait_ms)
        self.revision = revision

    def end_due(self, lease: HeldLease, now_ms: int) -> EndReason | None:
        """Why the lease must not be answered any more although it is still in the table; None if it may be."""
        holder = lease.holder
        if lease.generation < holder.valid_from:
            return holder.void_reason
        if lease.ends_at_deadline and holder.remaining_ms(lease, now_ms) <= 0:
            return EndReason.EXPIRED
        return None

    def over(self, lease_id: LeaseId) -> EndReason | None:
        """Why the lease is over for good: somebody asked for its end, or its lender said so. None: it may be held."""
        owed = self.owed.get(lease_id)
        reason = owed.reason if owed is not None else self.ended.reason(lease_id)
        return None if reason in INFERRED else reason

    def state(self, lease: HeldLease, now_ms: int) -> LeaseState:
        """LIVE or LAPSED as of now, also between a deadline and the tick that records it."""
        if lease.lapsed or lease.holder.remaining_ms(lease, now_ms) <= 0:
            return LeaseState.LAPSED
        return LeaseState.LIVE

    def view(self, lease: HeldLease, now_ms: int, end_reason: EndReason | None = None) -> LeaseView:
        publication, holder = lease.publication, lease.holder
        return LeaseView(
            lease_id=publication.lease_id,
            tenant=publication.tenant,
            conversation=publication.conversation,
            engine_id=holder.engine.engine_id,
            incarnation=holder.engine.incarnation,
            tokens=publication.tokens,
            stride_tokens=publication.stride_tokens,
            blocks=publication.block_count,
            size_bytes=publication.size_bytes,
            state=LeaseState.ENDED if end_reason is not None else self.state(lease, now_ms),
            remaining_ms=holder.remaining_ms(lease, now_ms),
            end_reason=end_reason,
            suspect=holder.is_suspect(now_ms, self.limits.suspect_after_ms),
            traceparent=publication.traceparent,
            api_url=holder.engine.api_url,
        )

    def note(
        self, draft: Draft, kind: LeaseEventType, lease: HeldLease, now_ms: int, reason: EndReason | None = None
    ) -> None:
        """Write an event down under the next revision."""
        self.revision += 1
        draft.events.append(LeaseEvent(revision=self.revision, type=kind, lease=self.view(lease, now_ms, reason)))

    def publish(
        self, draft: Draft, publication: Publication, holder: EngineState, now_ms: int, *, presented: bool
    ) -> PublishResult:
        """Take one lease in; `presented` in a snapshot, where the lender's word about deadline and state counts.

        The answer says why not, and then nothing has changed.
        """
        lease_id = publication.lease_id
        try:
            validate_publication(publication)
        except InvalidRequest as error:
            return PublishResult(lease_id=lease_id, status=PublishStatus.INVALID, message=error.message)
        known = self.index.by_id.get(lease_id)
        if known is not None and (overdue := self.end_due(known, now_ms)) is not None:
            self.end(draft, known, overdue, now_ms, push=False)
            known = None
        if known is not None:
            if known.holder is not holder or not same_content(known.publication, publication):
                return PublishResult(lease_id=lease_id, status=PublishStatus.CONFLICT, message="another lease's id")
            if presented:
                self._present(draft, known, publication, now_ms)
            return PublishResult(lease_id=lease_id, status=PublishStatus.PUBLISHED)
        owed = self.owed.get(lease_id)
        if owed is not None:  # it has not heard of the end; as a refusal alone it would never confirm it
            self._push(draft, holder, lease_id, owed.reason)
            return PublishResult(lease_id=lease_id, status=PublishStatus.ENDED, message=owed.reason.value)
        ended = self.ended.reason(lease_id)
        if ended is not None and not (presented and ended in INFERRED):
            return PublishResult(lease_id=lease_id, status=PublishStatus.ENDED, message=ended.value)
        if publication.on_deadline is OnDeadline.END and publication.deadline_ms <= holder.clock.present_ms(now_ms):
            return PublishResult(
                lease_id=lease_id, status=PublishStatus.ENDED, message=f"{EndReason.EXPIRED.value} already"
            )
        branches = self.index.branches(publication.tenant, publication.conversation)
        covered = [] if publication.lapsed else [x for x in branches if covers(publication, x.publication)]
        limit = self._limit_met(publication, holder, covered)
        if limit is not None:
            return PublishResult(lease_id=lease_id, status=PublishStatus.QUOTA, message=limit)
        self.ended.forget(lease_id)
        self._insert(draft, publication, holder, now_ms)
        for lease in covered:
            self.end(draft, lease, EndReason.SUPERSEDED, now_ms)
        crowd = list(self.index.branches(publication.tenant, publication.conversation)[:-1])
        while len(crowd) >= self.limits.max_branches:
            oldest = min(crowd, key=lambda x: x.used_ms)
            crowd.remove(oldest)
            self.end(draft, oldest, EndReason.PRESSURE, now_ms)
        superseded = tuple(x.publication.lease_id for x in covered)
        return PublishResult(lease_id=lease_id, status=PublishStatus.PUBLISHED, superseded=superseded)

    def renew(self, draft: Draft, lease: HeldLease, deadline_ms: int, now_ms: int) -> None:
        """The lender moved the deadline, and pinned the blocks again if they had lapsed."""
        self.index.retime(lease, deadline_ms=deadline_ms, lapsed=False)
        draft.stored.append(self.put(lease))
        self.note(draft, LeaseEventType.RENEWED, lease, now_ms)
        remaining_ms = lease.holder.remaining_ms(lease, now_ms)
        self.renewals.settle(draft, lease.publication.lease_id, RenewStatus.RENEWED, remaining_ms)

    def lapse(self, draft: Draft, lease: HeldLease, now_ms: int) -> None:
        """The deadline has passed; the blocks are readable until the lender reuses one."""
        self.index.retime(lease, deadline_ms=lease.deadline_ms, lapsed=True)
        self.note(draft, LeaseEventType.LAPSED, lease, now_ms)

    def copy(self, draft: Draft, publication: Publication, holder: EngineState, now_ms: int) -> None:
        """Take in what the home of `holder` says of a lease: new, or with another deadline or state."""
        lease_id = publication.lease_id
        known: HeldLease | None = self.index.by_id.get(lease_id)
        if known is None:
            self.ended.forget(lease_id)
            lease = HeldLease(publication, holder, used_ms=now_ms)
            self.index.add(lease)
            self.note(draft, LeaseEventType.PUBLISHED, lease, now_ms)
            return
        lapsed = has_lapsed(publication)
        if known.generation < holder.valid_from:
            holder.present(known)
        if known.deadline_ms == publication.deadline_ms and (known.lapsed == lapsed or not lapsed):
            return  # nothing new; that it has lapsed we may have found out before its home said so
        self.index.retime(known, deadline_ms=publication.deadline_ms, lapsed=lapsed)
        self.note(draft, LeaseEventType.LAPSED if lapsed else LeaseEventType.RENEWED, known, now_ms)
        if not lapsed:
            self.renewals.settle(draft, lease_id, RenewStatus.RENEWED, holder.remaining_ms(known, now_ms))

    def end(
        self,
        draft: Draft,
        lease: HeldLease,
        reason: EndReason,
        now_ms: int,
        *,
        push: bool = True,
        store: bool = True,
    ) -> None:
        """For good. `push`: tell the lender, if it is here; False if it was the lender that told us.

        `store`: False for what another replica has to write, or has written.
        """
        lease_id = lease.publication.lease_id
        self.index.remove(lease)
        self.ended.remember(lease_id, lease.publication.tenant, reason)
        if store:
            draft.stored.append(LeaseGone(lease_id=lease_id, reason=reason))
        self.note(draft, LeaseEventType.ENDED, lease, now_ms, reason)
        if push:
            self._push(draft, lease.holder, lease_id, reason)
        self.renewals.settle(draft, lease_id, RenewStatus.ENDED, 0)

    def end_as_asked(self, draft: Draft, lease: HeldLease, reason: EndReason, now_ms: int) -> None:
        """As `end`, for good from the moment it is stored: until the lender confirms it, the store knows of it."""
        engine, limits = lease.holder.engine, self.limits
        left_ms = lease.holder.remaining_ms(lease, now_ms) + limits.suspect_after_ms
        owed = EndOwed(
            lease_id=lease.publication.lease_id,
            engine_id=engine.engine_id,
            incarnation=engine.incarnation,
            reason=reason,
            ttl_ms=min(max(left_ms, limits.owed_end_ttl_ms), limits.max_owed_end_ttl_ms),
        )
        draft.stored.append(owed)
        self.end(draft, lease, reason, now_ms)
        self.owed.add(owed)

    def ask_confirmation(self, draft: Draft, holder: EngineState, owed: EndOwed) -> None:
        """Tell the lender of an end that it may have reported already; it answers in any case."""
        self._push(draft, holder, owed.lease_id, owed.reason)

    def _push(self, draft: Draft, holder: EngineState, lease_id: LeaseId, reason: EndReason) -> None:
        if holder.session is not None:
            draft.ends.append(EndPush(session=holder.session, lease_id=lease_id, reason=reason))

    def _present(self, draft: Draft, lease: HeldLease, publication: Publication, now_ms: int) -> None:
        lapsed = has_lapsed(publication)
        moved = lease.deadline_ms != publication.deadline_ms or lease.lapsed != lapsed
        lease.holder.present(lease)
        if moved:
            self.index.retime(lease, deadline_ms=publication.deadline_ms, lapsed=lapsed)
            draft.stored.append(self.put(lease))
            kind = LeaseEventType.LAPSED if lapsed else LeaseEventType.RENEWED
            self.note(draft, kind, lease, now_ms)

    def _insert(self, draft: Draft, publication: Publication, holder: EngineState, now_ms: int) -> None:
        lease = HeldLease(publication, holder, used_ms=now_ms)
        self.index.add(lease)
        draft.stored.append(self.put(lease))
        self.note(draft, LeaseEventType.PUBLISHED, lease, now_ms)

    def put(self, lease: HeldLease) -> LeasePut:
        """The lease as the store has to have it."""
        publication, engine = lease.publication, lease.holder.engine
        if publication.deadline_ms != lease.deadline_ms or publication.lapsed != lease.lapsed:
            publication = replace(publication, deadline_ms=lease.deadline_ms, lapsed=lease.lapsed)
        return LeasePut(engine_id=engine.engine_id, incarnation=engine.incarnation, publication=publication)

    def _limit_met(self, publication: Publication, holder: EngineState, covered: list[HeldLease]) -> str | None:
        """The name of the limit that one more lease would exceed, counting what it supersedes as gone."""
        limits = self.limits
        on_engine = sum(1 for x in covered if x.holder is holder)
        if len(holder.leases) - on_engine >= limits.max_leases_per_engine:
            return "max_leases_per_engine"
        tenant = self.index.tenants.get(publication.tenant)
        if tenant is None:
            return "max_tenants" if len(self.index.tenants) >= limits.max_tenants else None
        if len(tenant.ids) - len(covered) >= limits.max_leases_per_tenant:
            return "max_leases_per_tenant"
        if limits.max_blocks_per_tenant and not publication.lapsed:
            freed = sum(x.publication.block_count for x in covered if not x.lapsed)
            if tenant.pinned_blocks - freed + publication.block_count > limits.max_blocks_per_tenant:
                return "max_blocks_per_tenant"
        return None
