"""The lender's side of leases: which blocks are held, until when, and in which order they are given back.

Pure: commands in, effects out; time is a parameter in the lender's monotonic milliseconds. The vLLM adapter carries the
effects out *in the order given* on the engine's thread: that order is the safety contract's "break before touch".

Invariant: at any instant, a lease whose seal is whole holds references on all of its blocks (live), or none of its
blocks has been handed out since it gave them back (lapsed).

    LIVE --deadline--> LAPSED --reuse of one block--> ENDED(reused)
    LIVE, LAPSED --end(reason)--> ENDED(reason)         LAPSED --renewal--> LIVE
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Final

from kvlease.connector.lender_effects import (
    Announce,
    AnnounceEnded,
    AnnounceLapsed,
    AnnounceRenewed,
    BreakSeal,
    Effect,
    Free,
    Pin,
    RefuseRenewal,
    Unpin,
    WriteSeal,
)
from kvlease.connector.loan import LenderTerms, Loan, LoanRefused
from kvlease.connector.record import RecordContent, encode, record_hash
from kvlease.connector.seal import SealRef, next_value, slot_offset
from kvlease.registry.values import (
    DIGEST_BYTES,
    ConversationId,
    EndReason,
    LeaseId,
    LeaseState,
    OnDeadline,
    Publication,
    RenewStatus,
    TenantId,
)

LAPSES_PER_TICK: Final = 8
"""Deadlines handled in one tick: a mass expiry is spread over steps instead of stalling one."""

_STALE_DEADLINES: Final = 64
"""Entries of the heap that may be stale beyond one for each lease before it is rebuilt."""


@dataclass(slots=True)
class _Held:
    publication: Publication
    blocks: tuple[int, ...]
    slot: int
    state: LeaseState
    deadline_ms: int
    limit_ms: int | None
    """No renewal moves the deadline past it; None: no limit."""


class LeaseHolder:
    """All leases of one lender incarnation.

    `first_value` must be random and non-zero (an incarnation never shares values with another one).
    """

    def __init__(self, terms: LenderTerms, *, first_value: int) -> None:
        self._terms = terms
        self._value = first_value
        self._held: dict[LeaseId, _Held] = {}
        self._by_conversation: dict[tuple[TenantId, ConversationId], set[LeaseId]] = {}
        self._watched: dict[int, set[LeaseId]] = {}
        """Block id to the leases that have ever lapsed and list it: the engine keeps one reuse callback per block."""
        self._free_slots: deque[int] = deque(range(terms.slots))
        self._deadlines: list[tuple[int, LeaseId]] = []
        """Heap; an entry is stale if its lease is gone, not live, or has another deadline."""
        self._lapsed: dict[LeaseId, None] = {}
        """In the order in which they lapsed."""
        self._owed: list[Effect] = []
        """References that could not be given back where their lease ended; the next tick returns them."""
        self._live_blocks = 0

    # -- what is held ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self._held

    @property
    def live_blocks(self) -> int:
        """References held on blocks, counted once per live lease."""
        return self._live_blocks

    def count(self, state: LeaseState) -> int:
        lapsed = len(self._lapsed)
        return {LeaseState.LIVE: len(self._held) - lapsed, LeaseState.LAPSED: lapsed}.get(state, 0)

    def slot_of(self, lease_id: LeaseId) -> int | None:
        """The lease's slot in the seal tables; None if it is not held. Safe to call from any thread."""
        held = self._held.get(lease_id)
        return None if held is None else held.slot

    # -- commands -------------------------------------------------------------------------------------------------

    def lend(self, loan: Loan, now_ms: int) -> list[Effect]:
        """Makes a lease of a finished turn. Raises LoanRefused, without any change, if it cannot be made.

        Earlier leases of the same conversation that the new one extends end as superseded; if the limits are met, the
        lapsed and then the oldest live leases end as pressure.
        """
        terms = self._terms
        strides = len(loan.digests) // DIGEST_BYTES
        blocks_each = strides * terms.stride_tokens // terms.block_tokens
        if not strides or len(loan.digests) % DIGEST_BYTES:
            raise LoanRefused("a loan covers at least one whole stride")
        if not loan.block_ids or any(len(group) != blocks_each for group in loan.block_ids):
            raise LoanRefused(f"{strides} strides need {blocks_each} blocks in each KV group")
        if loan.lease_id in self._held:
            raise LoanRefused(f"lease {loan.lease_id} is held already")
        blocks = tuple(block for group in loan.block_ids for block in group)
        if len(blocks) > terms.max_blocks:
            raise LoanRefused(f"the loan needs {len(blocks)} blocks, leases may hold {terms.max_blocks}")

        effects: list[Effect] = [Pin(blocks=blocks)]
        superseded = self._supersede(loan)
        effects += (effect for effect in superseded if not isinstance(effect, AnnounceEnded))
        effects += self._make_room(len(blocks))
        slot = self._free_slots.popleft()
        self._value = next_value(self._value)
        record = encode(
            RecordContent(
                lease_id=loan.lease_id,
                engine_id=terms.engine_id,
                incarnation=terms.incarnation,
                fingerprint_hash=terms.fingerprint_hash,
                tenant=loan.tenant,
                stride_tokens=terms.stride_tokens,
                block_tokens=terms.block_tokens,
                tokens=strides * terms.stride_tokens,
                block_ids=loan.block_ids,
                seals=tuple(
                    SealRef(
                        pp_rank=table.pp_rank,
                        tp_rank=table.tp_rank,
                        address=table.address + slot_offset(slot),
                        value=self._value,
                    )
                    for table in terms.tables
                ),
                engine_params=loan.engine_params,
            ),
            loan.digests,
        )
        limit_ms = now_ms + terms.max_lifetime_ms if terms.max_lifetime_ms else None
        deadline_ms = _capped(now_ms + (terms.ttl_ms if loan.ttl_ms is None else loan.ttl_ms), limit_ms)
        publication = Publication(
            lease_id=loan.lease_id,
            tenant=loan.tenant,
            conversation=loan.conversation,
            stride_tokens=terms.stride_tokens,
            block_count=len(blocks),
            size_bytes=len(blocks) * terms.block_bytes,
            deadline_ms=deadline_ms,
            on_deadline=loan.on_deadline or terms.on_deadline,
            fingerprint_hash=terms.fingerprint_hash,
            record=record,
            traceparent=loan.traceparent,
        )
        self._held[loan.lease_id] = _Held(publication, blocks, slot, LeaseState.LIVE, deadline_ms, limit_ms)
        self._live_blocks += len(blocks)
        self._schedule(deadline_ms, loan.lease_id)
        if loan.conversation is not None:
            self._by_conversation.setdefault((loan.tenant, loan.conversation), set()).add(loan.lease_id)
        effects.append(WriteSeal(slot=slot, value=self._value, record_hash=record_hash(record)))
        effects.append(Announce(publication=publication))
        # Told last, so that there is no moment at which neither of the two can be resolved.
        effects += (effect for effect in superseded if isinstance(effect, AnnounceEnded))
        return effects

    def renew(self, lease_id: LeaseId, ttl_ms: int, now_ms: int) -> list[Effect]:
        """Moves a deadline ahead to at least `now_ms + ttl_ms` (0: the lender's ttl); a lapsed lease is live again.

        A renewal past the lease's longest lifetime is refused as AT_LIMIT. If that limit is still ahead, the deadline
        moves up to it, told after the refusal: whoever asked knows that asking again will not help.
        """
        held = self._held.get(lease_id)
        if held is None:
            return [RefuseRenewal(lease_id=lease_id, status=RenewStatus.ENDED)]
        if not self._terms.renewable:
            return [RefuseRenewal(lease_id=lease_id, status=RenewStatus.DISABLED)]
        wanted_ms = now_ms + (ttl_ms or self._terms.ttl_ms)
        deadline_ms = max(held.deadline_ms, _capped(wanted_ms, held.limit_ms))
        effects: list[Effect] = []
        if deadline_ms < wanted_ms:
            effects.append(RefuseRenewal(lease_id=lease_id, status=RenewStatus.AT_LIMIT))
            if deadline_ms <= now_ms or (deadline_ms == held.deadline_ms and held.state is LeaseState.LIVE):
                return effects
        if held.state is LeaseState.LAPSED:
            if self._live_blocks + len(held.blocks) > self._terms.max_blocks:
                return [RefuseRenewal(lease_id=lease_id, status=RenewStatus.PRESSURE)]
            effects.append(Pin(blocks=held.blocks))
            del self._lapsed[lease_id]
            held.state = LeaseState.LIVE
            self._live_blocks += len(held.blocks)
        held.deadline_ms = deadline_ms
        self._schedule(deadline_ms, lease_id)
        effects.append(AnnounceRenewed(lease_id=lease_id, deadline_ms=deadline_ms, publication=held.publication))
        return effects

    def end(self, lease_id: LeaseId, reason: EndReason) -> list[Effect]:
        """Ends a lease for good: seal broken, then blocks given back, then told. Ending what is gone does nothing."""
        held = self._held.get(lease_id)
        return [] if held is None else self._end(held, reason)

    def end_all(self, reason: EndReason) -> list[Effect]:
        return [effect for held in list(self._held.values()) for effect in self._end(held, reason)]

    def lapse_all(self) -> list[Effect]:
        """Gives all live leases' blocks back to the pool, still readable: before a reset or pause of the engine."""
        live = [held for held in self._held.values() if held.state is LeaseState.LIVE]
        return [effect for held in live for effect in self._lapse(held)]

    def relieve(self, wanted_blocks: int) -> list[Effect]:
        """Ends live leases, the one nearest its deadline first, until their blocks sum up to `wanted_blocks`."""
        effects: list[Effect] = []
        given = 0
        while given < wanted_blocks and (held := self._nearest_deadline()) is not None:
            heapq.heappop(self._deadlines)
            given += len(held.blocks)
            effects += self._end(held, EndReason.PRESSURE)
        return effects

    def on_reuse(self, block_id: int) -> list[Effect]:
        """The pool hands out a block that lapsed leases may list: their seals break before anyone can write to it.

        The effects are never calls into the pool. A live lease among them would be a bug of the engine or of ours; its
        seal breaks too, and its references are given back by the next tick.
        """
        effects: list[Effect] = []
        for lease_id in list(self._watched.get(block_id, ())):
            for effect in self._end(self._held[lease_id], EndReason.REUSED):
                (self._owed if isinstance(effect, Free) else effects).append(effect)
        return effects

    def tick(self, now_ms: int, limit: int = LAPSES_PER_TICK) -> list[Effect]:
        """Lapses or ends leases whose deadline has passed, at most `limit` of them."""
        effects, self._owed = self._owed, []
        while limit and (held := self._nearest_deadline()) is not None and held.deadline_ms <= now_ms:
            heapq.heappop(self._deadlines)
            limit -= 1
            if held.publication.on_deadline is OnDeadline.END:
                effects += self._end(held, EndReason.EXPIRED)
            else:
                effects += self._lapse(held)
        return effects

    def next_deadline_ms(self) -> int | None:
        """When the next live lease meets its deadline; None if there is none."""
        held = self._nearest_deadline()
        return None if held is None else held.deadline_ms

    # -- inside ---------------------------------------------------------------------------------------------------

    def _nearest_deadline(self) -> _Held | None:
        """The live lease whose deadline is next, at the top of the heap; stale entries above it are dropped."""
        while self._deadlines:
            deadline_ms, lease_id = self._deadlines[0]
            held = self._held.get(lease_id)
            if held is not None and held.deadline_ms == deadline_ms and held.state is LeaseState.LIVE:
                return held
            heapq.heappop(self._deadlines)
        return None

    def _schedule(self, deadline_ms: int, lease_id: LeaseId) -> None:
        """Puts a live lease's deadline in the heap, which is rebuilt when most of it is stale: renewals have no end."""
        heapq.heappush(self._deadlines, (deadline_ms, lease_id))
        if len(self._deadlines) > 2 * len(self._held) + _STALE_DEADLINES:
            self._deadlines = [(h.deadline_ms, i) for i, h in self._held.items() if h.state is LeaseState.LIVE]
            heapq.heapify(self._deadlines)

    def _supersede(self, loan: Loan) -> list[Effect]:
        if loan.conversation is None:
            return []
        earlier = [self._held[i] for i in self._by_conversation.get((loan.tenant, loan.conversation), ())]
        covered = [held for held in earlier if loan.digests.startswith(held.publication.record.digests)]
        return [effect for held in covered for effect in self._end(held, EndReason.SUPERSEDED)]

    def _make_room(self, blocks: int) -> list[Effect]:
        effects: list[Effect] = []
        if not self._free_slots:
            first_lapsed = next(iter(self._lapsed), None)
            effects += self.relieve(1) if first_lapsed is None else self.end(first_lapsed, EndReason.PRESSURE)
        if self._live_blocks + blocks > self._terms.max_blocks:
            effects += self.relieve(self._live_blocks + blocks - self._terms.max_blocks)
        return effects

    def _lapse(self, held: _Held) -> list[Effect]:
        lease_id = held.publication.lease_id
        held.state = LeaseState.LAPSED
        self._lapsed[lease_id] = None
        self._live_blocks -= len(held.blocks)
        for block in held.blocks:
            self._watched.setdefault(block, set()).add(lease_id)
        return [Unpin(blocks=held.blocks), AnnounceLapsed(lease_id=lease_id)]

    def _end(self, held: _Held, reason: EndReason) -> list[Effect]:
        lease_id = held.publication.lease_id
        del self._held[lease_id]
        self._lapsed.pop(lease_id, None)
        conversation = held.publication.conversation
        if conversation is not None:
            key = (held.publication.tenant, conversation)
            self._by_conversation[key].discard(lease_id)
            if not self._by_conversation[key]:
                del self._by_conversation[key]
        if self._watched:
            for block in held.blocks:
                watching = self._watched.get(block)
                if watching is not None:
                    watching.discard(lease_id)
                    if not watching:
                        del self._watched[block]
        self._free_slots.append(held.slot)
        effects: list[Effect] = [BreakSeal(slot=held.slot)]
        if held.state is LeaseState.LIVE:
            self._live_blocks -= len(held.blocks)
            effects.append(Free(blocks=held.blocks))
        effects.append(AnnounceEnded(lease_id=lease_id, reason=reason, publication=held.publication))
        return effects

    def check(self) -> None:
        """Rebuilds every index and compares; raises AssertionError on a difference. For tests and the simulation."""
        live = sum(len(h.blocks) for h in self._held.values() if h.state is LeaseState.LIVE)
        assert live == self._live_blocks, f"live blocks {self._live_blocks}, recounted {live}"
        assert set(self._lapsed) == {i for i, h in self._held.items() if h.state is LeaseState.LAPSED}
        slots = [h.slot for h in self._held.values()]
        assert len(set(slots)) == len(slots), "two leases share a slot"
        assert sorted([*slots, *self._free_slots]) == list(range(self._terms.slots)), "slots were lost or doubled"
        conversations: dict[tuple[TenantId, ConversationId], set[LeaseId]] = {}
        for lease_id, held in self._held.items():
            assert held.publication.lease_id == lease_id
            if held.publication.conversation is not None:
                conversations.setdefault((held.publication.tenant, held.publication.conversation), set()).add(lease_id)
        assert conversations == self._by_conversation, "the index of conversations differs"
        for block, leases in self._watched.items():
            assert leases, f"block {block} is watched for nobody"
            assert all(block in self._held[lease_id].blocks for lease_id in leases)
        for lease_id, held in self._held.items():
            if held.state is LeaseState.LAPSED:
                assert all(lease_id in self._watched.get(block, ()) for block in held.blocks)
        assert all(h.limit_ms is None or h.deadline_ms <= h.limit_ms for h in self._held.values())
        due = {(h.deadline_ms, i) for i, h in self._held.items() if h.state is LeaseState.LIVE}
        assert due.issubset(self._deadlines), "a live lease has no deadline entry"
        assert len(self._deadlines) <= 2 * self._terms.slots + _STALE_DEADLINES + 1, "stale deadlines pile up"


def _capped(deadline_ms: int, limit_ms: int | None) -> int:
    return deadline_ms if limit_ms is None else min(deadline_ms, limit_ms)
