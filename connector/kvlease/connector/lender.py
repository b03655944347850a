"""The lender's side of leases: which blocks are held, until when, and in which order they are given back.

Pure: commands in, effects out; time is a parameter in the lender's monotonic milliseconds. The vLLM adapter carries the
effects out *in the order given* on the engine's thread: that order is the safety contract's "break before touch".

Invariant: at any instant, a lease whose seal is whole holds references on all of its blocks (live), or none of its
blocks has been handed out since it gave them back (lapsed).

    LIVE --deadline--> LAPSED --reuse of one block--> ENDED(reused)
    LIVE, LAPSED --end(reason)--> ENDED(reason)         LAPSED --renewal--> LIVE
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import Final

from kvlease.connector.lender_deadlines import Deadlines, Held
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
from kvlease.connector.lender_live import LiveLeases
from kvlease.connector.lender_publication import Draft
from kvlease.connector.loan import LenderTerms, Loan, LoanRefused, OverQuota
from kvlease.connector.seal import next_value
from kvlease.registry.values import (
    ConversationId,
    EndReason,
    LeaseId,
    LeaseState,
    OnDeadline,
    RenewStatus,
    TenantId,
)

LAPSES_PER_TICK: Final = 8
"""Deadlines handled in one tick: a mass expiry is spread over steps instead of stalling one."""
LAPSED_BLOCKS_PER_TICK: Final = 256
"""No further deadline is handled in a tick in which leases with so many blocks have met theirs."""


class LeaseHolder:
    """All leases of one lender incarnation.

    `first_value` must be random and non-zero (an incarnation never shares values with another one).
    """

    def __init__(self, terms: LenderTerms, *, first_value: int) -> None:
        self._terms = terms
        self._value = first_value
        self._held: dict[LeaseId, Held] = {}
        self._by_conversation: dict[tuple[TenantId, ConversationId], set[LeaseId]] = {}
        self._watched: dict[int, tuple[LeaseId, ...]] = {}
        """Block id to the leases that have ever lapsed and list it: the engine keeps one reuse callback per block.
        Leases that are gone stay in it until the block is reused or lapses again: an end must not cost by the block."""
        self._free_slots: deque[int] = deque(range(terms.slots))
        self._deadlines = Deadlines(self._held, terms.ttl_ms)
        self._lapsed: dict[LeaseId, None] = {}
        """In the order in which they lapsed."""
        self._owed: list[Effect] = []
        """References that could not be given back where their lease ended; the next tick returns them."""
        self._live = LiveLeases()

    # -- what is held ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self._held

    @property
    def live_blocks(self) -> int:
        """Blocks that live leases hold; those that several share count once."""
        return self._live.blocks()

    def count(self, state: LeaseState) -> int:
        lapsed = len(self._lapsed)
        if state is LeaseState.LAPSED:
            return lapsed
        return len(self._held) - lapsed if state is LeaseState.LIVE else 0

    def slot_of(self, lease_id: LeaseId) -> int | None:
        """The lease's slot in the seal tables; None if it is not held. Safe to call from any thread."""
        held = self._held.get(lease_id)
        return None if held is None else held.slot

    # -- commands -------------------------------------------------------------------------------------------------

    def lend(self, loan: Loan, now_ms: int) -> list[Effect]:
        """Makes a lease of a finished turn. Raises LoanRefused, without any change, if it cannot be made.

        Earlier leases of the same conversation that the new one extends end as superseded. At a limit others end, as
        pressure or quota: without a slot the first that lapsed, else the cheapest losses among those concerned.
        """
        terms = self._terms
        strides = len(loan.chain)
        blocks_each = strides * terms.stride_tokens // terms.block_tokens
        if not strides:
            raise LoanRefused("a loan covers at least one whole stride")
        if not loan.block_ids or any(len(group) != blocks_each for group in loan.block_ids):
            raise LoanRefused(f"{strides} strides need {blocks_each} blocks in each KV group")
        if loan.lease_id in self._held:
            raise LoanRefused(f"lease {loan.lease_id} is held already")
        blocks = loan.block_ids[0] if len(loan.block_ids) == 1 else tuple(chain.from_iterable(loan.block_ids))
        if len(blocks) > terms.max_blocks:
            raise LoanRefused(f"the loan needs {len(blocks)} blocks, leases may hold {terms.max_blocks}")
        if len(blocks) > terms.blocks_for(loan.tenant):
            raise OverQuota(f"the loan needs {len(blocks)} blocks, its tenant has {terms.blocks_for(loan.tenant)}")

        effects: list[Effect] = [Pin(blocks=blocks)]
        reads, superseded = self._supersede(loan)
        if superseded:
            effects += (effect for effect in superseded if not isinstance(effect, AnnounceEnded))
        effects += self._make_room(loan)
        slot = self._free_slots.popleft()
        self._value = next_value(self._value)
        limit_ms = now_ms + terms.max_lifetime_ms if terms.max_lifetime_ms else None
        deadline_ms = _capped(now_ms + (terms.ttl_ms if loan.ttl_ms is None else loan.ttl_ms), limit_ms)
        self_renewing = terms.self_renewing and loan.ttl_ms is None  # else somebody has chosen how long it may live
        held = Held(loan, blocks, slot, LeaseState.LIVE, deadline_ms, limit_ms, reads, self_renewing)
        self._held[loan.lease_id] = held
        self._live.add(loan.lease_id, loan.tenant, loan.block_ids, reads=reads, now_ms=now_ms)
        self._deadlines.schedule(held, ahead=True)
        if loan.conversation is not None:
            self._by_conversation.setdefault((loan.tenant, loan.conversation), set()).add(loan.lease_id)
        effects.append(WriteSeal(slot=slot, value=self._value))
        draft = Draft(terms=terms, loan=loan, slot=slot, value=self._value, deadline_ms=deadline_ms)
        effects.append(Announce(draft=draft))
        # Told last, so that there is no moment at which neither of the two can be resolved.
        if superseded:
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
            if self._excess(held.loan) > 0 or self._excess(held.loan, held.loan.tenant) > 0:
                return [RefuseRenewal(lease_id=lease_id, status=RenewStatus.PRESSURE)]
            effects.append(Pin(blocks=held.blocks))
            del self._lapsed[lease_id]
            held.state = LeaseState.LIVE
            self._live.add(lease_id, held.loan.tenant, held.loan.block_ids, reads=held.reads, now_ms=now_ms)
        else:
            self._live.used(lease_id, reads=held.reads, now_ms=now_ms)
        return [*effects, self._renewed(held, deadline_ms)]

    def promise(self, lease_id: LeaseId, ttl_ms: int, now_ms: int) -> RenewStatus | int | None:
        """What a renewal comes to if it moves no block: the new deadline, or why there is none; else None.

        Changes nothing, and is safe to call from any thread; a deadline is to be kept by `keep_promise`.
        """
        held = self._held.get(lease_id)
        if held is None:
            return RenewStatus.ENDED
        if not self._terms.renewable:
            return RenewStatus.DISABLED
        wanted_ms = now_ms + (ttl_ms or self._terms.ttl_ms)
        within = held.limit_ms is None or wanted_ms <= held.limit_ms
        return max(held.deadline_ms, wanted_ms) if within and held.state is LeaseState.LIVE else None

    def keep_promise(self, lease_id: LeaseId, deadline_ms: int, now_ms: int) -> list[Effect]:
        """Moves a deadline to where it was promised and told to be; a lease that has lapsed since is renewed."""
        held = self._held.get(lease_id)
        if held is None:
            return []  # ended since, and told
        if held.state is not LeaseState.LIVE:
            return self.renew(lease_id, deadline_ms - now_ms, now_ms) if deadline_ms > now_ms else []
        self._live.used(lease_id, reads=held.reads, now_ms=now_ms)
        if deadline_ms > held.deadline_ms:
            self._renewed(held, deadline_ms)
        return []

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

    def was_read(self, lease_id: LeaseId, now_ms: int) -> None:
        """A borrower has read the lease: its loss would cost more than that of one that nobody reads."""
        held = self._held.get(lease_id)
        if held is not None:
            held.reads += 1
            if held.state is LeaseState.LIVE:
                self._live.used(lease_id, reads=held.reads, now_ms=now_ms)

    def relieve(
        self, wanted_blocks: int, tenant: TenantId | None = None, reason: EndReason = EndReason.PRESSURE
    ) -> list[Effect]:
        """Ends live leases, the cheapest loss first, until those left hold `wanted_blocks` fewer."""
        effects: list[Effect] = []
        most = self._live.blocks(tenant) - wanted_blocks
        while self._live.blocks(tenant) > most and (cheapest := self._live.cheapest(tenant)) is not None:
            effects += self._end(self._held[cheapest], reason)
        return effects

    def ease(self, free_blocks: int) -> list[Effect]:
        """Gives back what is missing to the blocks that are to stay free, the cheapest loss first.

        Leases lapse where they may: what nobody needs after all stays readable. At most LAPSES_PER_TICK of them.
        """
        effects: list[Effect] = []
        most, left = self._live.blocks() - (self._terms.keep_free_blocks - free_blocks), LAPSES_PER_TICK
        while self._live.blocks() > most and left and (cheapest := self._live.cheapest()) is not None:
            held, left = self._held[cheapest], left - 1
            effects += self._lapse(held) if self._lapses(held) else self._end(held, EndReason.PRESSURE)
        return effects

    def on_reuse(self, block_id: int) -> list[Effect]:
        """The pool hands out a block that lapsed leases may list: their seals break before anyone can write to it.

        The effects are never calls into the pool. A live lease among them would be a bug of the engine or of ours; its
        seal breaks too, and its references are given back by the next tick.
        """
        effects: list[Effect] = []
        for lease_id in self._watched.pop(block_id, ()):
            held = self._held.get(lease_id)
            for effect in () if held is None else self._end(held, EndReason.REUSED):
                (self._owed if isinstance(effect, Free) else effects).append(effect)
        return effects

    def tick(
        self,
        now_ms: int,
        limit: int = LAPSES_PER_TICK,
        free_blocks: int = 0,
        most_blocks: int = LAPSED_BLOCKS_PER_TICK,
    ) -> list[Effect]:
        """Lapses or ends leases whose deadline has passed: at most `limit`, and no further one after `most_blocks`.

        A self-renewing lender renews those that are about to meet it instead, as far as their longest lifetime allows,
        while more than `keep_free_blocks` of its blocks are free.
        """
        effects, self._owed = self._owed, []
        plenty = free_blocks > self._terms.keep_free_blocks
        while limit and most_blocks > 0 and (held := self._deadlines.next()) is not None and held.wake_ms <= now_ms:
            limit -= 1
            most_blocks -= len(held.blocks)
            later_ms = _capped(now_ms + self._terms.ttl_ms, held.limit_ms) if plenty and held.self_renewing else 0
            if later_ms > held.deadline_ms:
                effects.append(self._renewed(held, later_ms))
            elif held.deadline_ms > now_ms:
                self._deadlines.schedule(held, ahead=False)
            elif self._lapses(held):
                effects += self._lapse(held)
            else:
                effects += self._end(held, EndReason.EXPIRED)
        return effects

    def next_deadline_ms(self) -> int | None:
        """When the next live lease meets its deadline, or may be renewed unasked; None if there is none."""
        held = self._deadlines.next()
        return None if held is None else held.wake_ms

    # -- inside ---------------------------------------------------------------------------------------------------

    def _renewed(self, held: Held, deadline_ms: int) -> AnnounceRenewed:
        held.deadline_ms = deadline_ms
        self._deadlines.schedule(held, ahead=True)
        return AnnounceRenewed(lease_id=held.loan.lease_id, deadline_ms=deadline_ms, loan=held.loan)

    def _supersede(self, loan: Loan) -> tuple[int, list[Effect]]:
        """Ends the leases that the loan extends; how often they were read, too."""
        if loan.conversation is None:
            return 0, []
        earlier = [self._held[i] for i in self._by_conversation.get((loan.tenant, loan.conversation), ())]
        covered = [held for held in earlier if loan.chain.extends(held.loan.chain)]
        reads = max((held.reads for held in covered), default=0)
        return reads, [effect for held in covered for effect in self._end(held, EndReason.SUPERSEDED)]

    def _make_room(self, loan: Loan) -> list[Effect]:
        effects: list[Effect] = []
        if not self._free_slots:
            gone = next(iter(self._lapsed), None) or self._live.cheapest()
            assert gone is not None
            effects += self.end(gone, EndReason.PRESSURE)
        # What an end gives back may be the loan's own, so that one look is not always enough.
        if self._terms.blocks_for(loan.tenant) < self._terms.max_blocks:
            while (excess := self._excess(loan, loan.tenant)) > 0:
                effects += self.relieve(excess, loan.tenant, EndReason.QUOTA)
        while (excess := self._excess(loan)) > 0:
            effects += self.relieve(excess)
        return effects

    def _excess(self, loan: Loan, tenant: TenantId | None = None) -> int:
        """Blocks that all live leases, or the tenant's, would hold above what they may with this one among them."""
        most = self._terms.max_blocks if tenant is None else self._terms.blocks_for(tenant)
        return self._live.blocks_with(loan.block_ids, tenant) - most

    def _lapses(self, held: Held) -> bool:
        """Whether it lapses when its blocks are given back, instead of ending."""
        return (held.loan.on_deadline or self._terms.on_deadline) is OnDeadline.LAPSE

    def _lapse(self, held: Held) -> list[Effect]:
        lease_id = held.loan.lease_id
        held.state = LeaseState.LAPSED
        self._lapsed[lease_id] = None
        self._live.drop(lease_id)
        self._watch(held.blocks, lease_id)
        return [Unpin(lease_id=lease_id, blocks=held.blocks), AnnounceLapsed(lease_id=lease_id)]

    def _watch(self, blocks: tuple[int, ...], lease_id: LeaseId) -> None:
        """Operations over all blocks at once, since a long lease has thousands; few are watched already, as a rule."""
        watched, alone = self._watched, (lease_id,)
        if watched.keys().isdisjoint(blocks):
            watched.update(dict.fromkeys(blocks, alone))
            return
        shared = [block for block in blocks if block in watched]
        kept = {
            others: tuple(i for i in others if i in self._held and i != lease_id)
            for others in {watched[block] for block in shared}
        }
        again = {block: (*kept[watched[block]], *alone) for block in shared}
        watched.update(dict.fromkeys(blocks, alone))
        watched.update(again)

    def _end(self, held: Held, reason: EndReason) -> list[Effect]:
        lease_id = held.loan.lease_id
        del self._held[lease_id]
        self._lapsed.pop(lease_id, None)
        conversation = held.loan.conversation
        if conversation is not None:
            key = (held.loan.tenant, conversation)
            self._by_conversation[key].discard(lease_id)
            if not self._by_conversation[key]:
                del self._by_conversation[key]
        self._free_slots.append(held.slot)
        effects: list[Effect] = [BreakSeal(slot=held.slot)]
        if held.state is LeaseState.LIVE:
            self._live.drop(lease_id)
            effects.append(Free(blocks=held.blocks))
        effects.append(AnnounceEnded(lease_id=lease_id, reason=reason, loan=held.loan))
        return effects

    def check(self) -> None:
        """Rebuilds every index and compares; raises AssertionError on a difference. For tests and the simulation."""
        self._live.check()
        assert len(self._live) == self.count(LeaseState.LIVE)
        assert self._live.blocks() <= self._terms.max_blocks, "live leases hold more than their share of the pool"
        for tenant in {h.loan.tenant for h in self._held.values()}:
            assert self._live.blocks(tenant) <= self._terms.blocks_for(tenant), f"{tenant} has more than its share"
        assert set(self._lapsed) == {i for i, h in self._held.items() if h.state is LeaseState.LAPSED}
        slots = [h.slot for h in self._held.values()]
        assert len(set(slots)) == len(slots), "two leases share a slot"
        assert sorted([*slots, *self._free_slots]) == list(range(self._terms.slots)), "slots were lost or doubled"
        conversations: dict[tuple[TenantId, ConversationId], set[LeaseId]] = {}
        for lease_id, held in self._held.items():
            assert held.loan.lease_id == lease_id
            if held.loan.conversation is not None:
                conversations.setdefault((held.loan.tenant, held.loan.conversation), set()).add(lease_id)
        assert conversations == self._by_conversation, "the index of conversations differs"
        for block, leases in self._watched.items():
            assert leases, f"block {block} is watched for nobody"
            known = [self._held[lease_id] for lease_id in leases if lease_id in self._held]
            assert all(block in lease.blocks for lease in known)
        for lease_id, held in self._held.items():
            if held.state is LeaseState.LAPSED:
                assert all(lease_id in self._watched.get(block, ()) for block in held.blocks)
        assert all(h.limit_ms is None or h.deadline_ms <= h.limit_ms for h in self._held.values())
        self._deadlines.check(self._terms.slots)


def _capped(deadline_ms: int, limit_ms: int | None) -> int:
    return deadline_ms if limit_ms is None else min(deadline_ms, limit_ms)
