"""The lease holder against a dict model, with a pool that hands blocks out as the engine's does.

The model knows which leases there should be, in which state, until when, and who goes first under pressure; the pool
and a seal table are driven by the effects alone, in the order given. Invariant checked after each step: a whole seal
means that each block of its lease is referred to, or has not been handed out since it was given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from kvlease.connector.lender import LeaseHolder
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
from kvlease.registry.values import ConversationId, EndReason, LeaseId, OnDeadline, RenewStatus, TenantId

from tests.sim.pool import BlockPool
from tests.stateful.lender_model import (
    BLOCKS,
    TTL_MS,
    Lease,
    Turn,
    all_terms,
    by_deadline,
    chain,
    cheapest,
    ends,
    held,
    live,
    room,
)

NEVER_MS: Final = 10**12


texts = st.text("ab", min_size=1, max_size=4)
conversations = st.sampled_from([None, "c", "d"])
tenants = st.sampled_from([TenantId("t"), TenantId("u")])


class LenderMachine(RuleBasedStateMachine):
    turns = Bundle("turns")

    @initialize(terms=all_terms)
    def start(self, terms: LenderTerms) -> None:
        self.terms = terms
        self.holder = LeaseHolder(self.terms, first_value=1 << 40)
        self.pool = BlockPool(BLOCKS, caching=True)
        self.model: dict[LeaseId, Lease] = {}
        self.lapse_order: list[LeaseId] = []
        self.seals: dict[int, Lease] = {}
        """Slot to the lease whose seal is whole there; absent when broken."""
        self.values: set[int] = set()
        self.handed_out: dict[int, int] = {}
        """Block to the number of its last hand-out."""
        self.sealed_at: dict[int, int] = {}
        self.hand_outs = 0
        self.requests: dict[int, int] = {}
        """References that requests hold on each block."""
        self.now_ms = 0
        self.numbers = 0

    # -- the engine -----------------------------------------------------------------------------------------------

    @rule(target=turns, text=texts)
    def compute(self, text: str) -> object:
        """A turn that stays for a while."""
        turn = self._compute(text)
        return multiple() if turn is None else turn

    @rule(blocks=st.sampled_from([BLOCKS, 6, 2]))
    def rush(self, blocks: int) -> None:
        """A large request comes and goes."""
        taken = self._take(min(blocks, self.pool.free))
        self.pool.give_back(taken)

    @rule(turn=consumes(turns))
    def leave(self, turn: Turn) -> None:
        """It goes without lending anything."""
        self._finish(turn)

    @rule(turn=consumes(turns), conversation=conversations, tenant=tenants)
    def lend_and_leave(self, turn: Turn, conversation: str | None, tenant: TenantId) -> None:
        self._lend(turn, conversation, None, tenant)
        self._finish(turn)

    @rule(text=texts, conversation=conversations, ttl_ms=st.sampled_from([None, 0, 30]), tenant=tenants)
    def serve(self, text: str, conversation: str | None, ttl_ms: int | None, tenant: TenantId) -> None:
        """A turn from beginning to end."""
        turn = self._compute(text)
        if turn is not None:
            self._lend(turn, conversation, ttl_ms, tenant)
            self._finish(turn)

    @rule(text=texts, tenant=tenants)
    def fork(self, text: str, tenant: TenantId) -> None:
        """Two leases of the same blocks, both lapsed: what consecutive turns and forks come to."""
        turn = self._compute(text)
        if turn is not None:
            self._lend(turn, "c", None, tenant)
            self._lend(turn, "d", None, tenant)
            self._carry_out(self.holder.lapse_all())
            self._finish(turn)

    def _compute(self, text: str) -> Turn | None:
        """The prefix that is cached is taken as it is, the rest in new blocks."""
        keys = [int.from_bytes(text[: n + 1].encode()) for n in range(len(text))]
        hits = self.pool.find(keys)
        self.pool.touch(hits)
        wanted = len(text) - len(hits)
        if wanted > self.pool.free:
            self.pool.give_back(hits)
            return None
        taken = self._take(wanted)
        for block, key in zip([*hits, *taken], keys, strict=True):
            self.pool.cache(block, key)
            self.requests[block] = self.requests.get(block, 0) + 1
        return Turn(text=text, blocks=(*hits, *taken))

    def _finish(self, turn: Turn) -> None:
        for block in turn.blocks:
            self.requests[block] -= 1
        self.pool.give_back(reversed(turn.blocks))

    # -- the holder -----------------------------------------------------------------------------------------------

    def _lend(self, turn: Turn, conversation: str | None, ttl_ms: int | None, tenant: TenantId) -> None:
        self.numbers += 1
        lease_id = LeaseId(f"lease{self.numbers:03}")
        loan = Loan(
            lease_id=lease_id,
            tenant=tenant,
            conversation=None if conversation is None else ConversationId(conversation),
            chain=chain(turn.text),
            block_ids=(turn.blocks,),
            engine_params=b"",
            ttl_ms=ttl_ms,
        )
        if len(turn.blocks) > min(self.terms.max_blocks, self.terms.blocks_for(tenant)):
            try:
                self.holder.lend(loan, self.now_ms)
            except LoanRefused:
                return
            raise AssertionError("a loan over the limit was made")
        extended = {
            other: lease
            for other, lease in self.model.items()
            if conversation is not None
            and (lease.tenant, lease.conversation) == (tenant, conversation)
            and turn.text.startswith(lease.text)
        }
        reads = max((lease.reads for lease in extended.values()), default=0)
        left = {other: lease for other, lease in self.model.items() if other not in extended}
        limit_ms = self.now_ms + (self.terms.max_lifetime_ms or NEVER_MS)
        deadline_ms = min(self.now_ms + (TTL_MS if ttl_ms is None else ttl_ms), limit_ms)
        own = self.terms.self_renewing and ttl_ms is None
        lease = Lease(
            turn.blocks, turn.text, conversation, deadline_ms, limit_ms, tenant, self.now_ms, reads, self_renewing=own
        )
        expected = [(other, EndReason.SUPERSEDED) for other in extended] + room(
            left, self.lapse_order, self.terms, lease
        )
        effects = self.holder.lend(loan, self.now_ms)
        assert sorted(ends(effects)) == sorted(expected)
        assert [x.draft.deadline_ms for x in effects if isinstance(x, Announce)] == [deadline_ms]
        self._carry_out(effects, lease)
        self.model[lease_id] = lease

    @rule(data=st.data(), ttl_ms=st.sampled_from([0, 1, 500]))
    def renew(self, data: st.DataObject, ttl_ms: int) -> None:
        lease_id = data.draw(st.sampled_from([*self.model, LeaseId("unknown")]))
        lease = self.model.get(lease_id)
        effects = self.holder.renew(lease_id, ttl_ms, self.now_ms)
        if lease is None or not self.terms.renewable:
            status = RenewStatus.ENDED if lease is None else RenewStatus.DISABLED
            assert effects == [RefuseRenewal(lease_id=lease_id, status=status)]
            return
        wanted_ms = self.now_ms + (ttl_ms or TTL_MS)
        deadline_ms = max(lease.deadline_ms, min(wanted_ms, lease.limit_ms))
        at_limit = RefuseRenewal(lease_id=lease_id, status=RenewStatus.AT_LIMIT)
        nothing_left = deadline_ms <= self.now_ms or (not lease.lapsed and deadline_ms == lease.deadline_ms)
        if wanted_ms > deadline_ms and nothing_left:
            assert effects == [at_limit]
            return
        over = lease.lapsed and (
            self._live(beside=lease) > self.terms.max_blocks
            or self._live(lease.tenant, beside=lease) > self.terms.blocks_for(lease.tenant)
        )
        if over:
            assert effects == [RefuseRenewal(lease_id=lease_id, status=RenewStatus.PRESSURE)]
            return
        assert (at_limit in effects) == (wanted_ms > deadline_ms)
        if lease.lapsed:
            lease.lapsed = False
            self.lapse_order.remove(lease_id)
        lease.deadline_ms, lease.used_ms = deadline_ms, self.now_ms
        told = effects[-1]
        assert isinstance(told, AnnounceRenewed)
        assert told.deadline_ms == lease.deadline_ms
        self._carry_out(effects)

    @rule(data=st.data(), late_ms=st.sampled_from([0, 60]))
    def promise(self, data: st.DataObject, late_ms: int) -> None:
        """A renewal answered by another thread, and kept by the engine's a while later."""
        lease_id = data.draw(st.sampled_from([*self.model, LeaseId("unknown")]))
        promised = self.holder.promise(lease_id, 0, self.now_ms)
        self.now_ms += late_ms
        if not isinstance(promised, int):
            return
        lease = self.model[lease_id]
        assert not lease.lapsed
        assert promised == max(lease.deadline_ms, self.now_ms - late_ms + TTL_MS) <= lease.limit_ms
        assert self.holder.keep_promise(lease_id, promised, self.now_ms) == []
        lease.deadline_ms, lease.used_ms = promised, self.now_ms

    @rule(data=st.data(), reason=st.sampled_from(EndReason))
    def end(self, data: st.DataObject, reason: EndReason) -> None:
        lease_id = data.draw(st.sampled_from([*self.model, LeaseId("unknown")]))
        known = lease_id in self.model
        effects = self.holder.end(lease_id, reason)
        assert ends(effects) == ([(lease_id, reason)] if known else [])
        self._carry_out(effects)

    @rule(sure=st.integers(0, 3))
    def end_all(self, sure: int) -> None:
        if sure:
            return
        everything = sorted((lease_id, EndReason.DRAINED) for lease_id in self.model)
        effects = self.holder.end_all(EndReason.DRAINED)
        assert sorted(ends(effects)) == everything
        self._carry_out(effects)

    @rule()
    def lapse_all(self) -> None:
        self._carry_out(self.holder.lapse_all())
        assert all(lease.lapsed for lease in self.model.values())

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from([*self.model, LeaseId("unknown")]))
        self.holder.was_read(lease_id, self.now_ms)
        if lease_id in self.model:
            lease = self.model[lease_id]
            lease.reads += 1
            lease.used_ms = lease.used_ms if lease.lapsed else self.now_ms

    @rule(wanted=st.integers(0, BLOCKS))
    def relieve(self, wanted: int) -> None:
        expected = [(lease_id, EndReason.PRESSURE) for lease_id in cheapest(self.model, wanted)]
        effects = self.holder.relieve(wanted)
        assert ends(effects) == expected
        self._carry_out(effects)

    @rule()
    def ease(self) -> None:
        """What is missing to the blocks that stay free is given back."""
        missing = self.terms.keep_free_blocks - self.pool.free
        expected = cheapest(self.model, missing)
        self._carry_out_deadlines(self.holder.ease(self.pool.free), expected, EndReason.PRESSURE)

    @rule(passed_ms=st.sampled_from([0, 1, 40, 80, 200]), limit=st.sampled_from([1, 8]))
    def tick(self, passed_ms: int, limit: int) -> None:
        self.now_ms += passed_ms
        plenty = self.pool.free > self.terms.keep_free_blocks
        effects = self.holder.tick(self.now_ms, limit, self.pool.free)
        for renewed in [x for x in effects if isinstance(x, AnnounceRenewed)]:
            lease = self.model[renewed.lease_id]
            assert plenty
            assert lease.self_renewing
            assert renewed.deadline_ms == min(self.now_ms + TTL_MS, lease.limit_ms) > lease.deadline_ms
            lease.deadline_ms = renewed.deadline_ms
        due = [i for i in by_deadline(self.model) if self.model[i].deadline_ms <= self.now_ms]
        over = [effect.lease_id for effect in effects if isinstance(effect, AnnounceLapsed | AnnounceEnded)]
        if self.terms.self_renewing:
            assert set(over) <= set(due)
            assert len(over) <= limit
            assert limit < 8 or set(over) == set(due), "up to the limit, nothing is left at its deadline"
        else:
            assert over == due[:limit]
        self._carry_out_deadlines(effects, over, EndReason.EXPIRED)

    def _carry_out_deadlines(self, effects: Sequence[Effect], over: list[LeaseId], reason: EndReason) -> None:
        """These leases, in this order, lapse, or end where leases do not lapse."""
        if self.terms.on_deadline is OnDeadline.END:
            assert ends(effects) == [(lease_id, reason) for lease_id in over]
        else:
            assert [effect.lease_id for effect in effects if isinstance(effect, AnnounceLapsed)] == over
        self._carry_out(effects)

    # -- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def the_holder_agrees_with_the_model(self) -> None:
        if not hasattr(self, "holder"):
            return
        self.holder.check()
        self.pool.check()
        assert len(self.holder) == len(self.model) == len(self.seals)
        assert all(lease_id in self.holder for lease_id in self.model)
        assert self.holder.live_blocks == self._live()
        nearest, told = next(iter(by_deadline(self.model)), None), self.holder.next_deadline_ms()
        assert (told is None) == (nearest is None)
        if told is not None and nearest is not None:
            early_ms = TTL_MS // 4 if self.terms.self_renewing else 0
            assert self.model[nearest].deadline_ms - early_ms <= told <= self.model[nearest].deadline_ms

    @invariant()
    def references_are_exactly_those_of_requests_and_live_leases(self) -> None:
        if not hasattr(self, "holder"):
            return
        expected = dict(self.requests)
        for lease in self.model.values():
            for block in () if lease.lapsed else lease.blocks:
                expected[block] = expected.get(block, 0) + 1
        assert all(self.pool.references(block) == expected.get(block, 0) for block in range(BLOCKS))

    @invariant()
    def a_whole_seal_speaks_for_untouched_blocks(self) -> None:
        if not hasattr(self, "holder"):
            return
        for slot, lease in self.seals.items():
            assert all(self.handed_out[block] <= self.sealed_at[slot] for block in lease.blocks)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> list[int]:
        """Blocks from the pool, whose taker may write to them from now on."""
        taken = self.pool.take(count)
        for block in taken:
            self.hand_outs += 1
            self.handed_out[block] = self.hand_outs
            for slot, lease in self.seals.items():
                assert block not in lease.blocks, f"block {block} was handed out under the whole seal of slot {slot}"
        return taken

    def _carry_out(self, effects: Sequence[Effect], lease: Lease | None = None) -> None:
        for effect in effects:
            match effect:
                case Pin(blocks=blocks):
                    self.pool.touch(blocks)
                case Free(blocks=blocks):
                    self.pool.give_back(reversed(blocks))
                    for sealed in self.seals.values():  # broken before free, in the order given
                        assert sealed.lapsed or all(map(self.pool.references, sealed.blocks))
                case Unpin(blocks=blocks):
                    self.pool.unpin(reversed(blocks), self._reused)
                case WriteSeal(slot=slot, value=value):
                    assert lease is not None
                    assert slot not in self.seals, "a whole seal was written over"
                    assert value not in self.values, "a value was used twice"
                    self.values.add(value)
                    self.seals[slot] = lease
                    self.sealed_at[slot] = self.hand_outs
                case BreakSeal(slot=slot):
                    del self.seals[slot]
                case AnnounceLapsed(lease_id=lease_id):
                    self.model[lease_id].lapsed = True
                    self.lapse_order.append(lease_id)
                case AnnounceEnded(lease_id=lease_id):
                    if self.model.pop(lease_id).lapsed:
                        self.lapse_order.remove(lease_id)
                case Announce() | AnnounceRenewed() | RefuseRenewal():
                    pass

    def _reused(self, block: int) -> None:
        """The pool's one callback: every lapsed lease that lists the block must end, and no other."""
        expected = sorted((i, EndReason.REUSED) for i, lease in self.model.items() if block in lease.blocks)
        assert all(self.model[lease_id].lapsed for lease_id, _ in expected), "a live lease's block was handed out"
        effects = self.holder.on_reuse(block)
        assert sorted(ends(effects)) == expected
        assert not any(isinstance(effect, Pin | Free | Unpin) for effect in effects)
        self._carry_out(effects)

    def _live(self, tenant: TenantId | None = None, beside: Lease | None = None) -> int:
        """Blocks that live leases hold, and this one."""
        return held([*live(self.model, tenant).values(), *([beside] if beside else [])])


TestLender = LenderMachine.TestCase
TestLender.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
