"""Doubles that break one rule of the safety contract each, to show that the judge sees it.

`Straight` is how the parties are made for an honest run; each double replaces one thing and leaves the cores alone.
None of this exists in the product: no flag there switches a rule off.
Each has a way to sharpen plans, towards where its rule matters, and names what gives it away. Invariant: under
sharpened plans the judge finds a violation with the double within a modest number of seeds, and none without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvlease.connector.borrower import ComputeReason, Match, Question, Read
from kvlease.connector.digests import Chain
from kvlease.connector.lender import LeaseHolder
from kvlease.connector.lender_effects import Effect, Free
from kvlease.connector.loan import LenderTerms, Loan
from kvlease.connector.quarantine import Quarantine
from kvlease.connector.seal import VALUE_BYTES, Proof, pack_value
from kvlease.registry.errors import KvleaseError
from kvlease.registry.lender_mirror import LenderMirror
from kvlease.registry.staleness import Staleness
from kvlease.registry.table import LeaseTable
from kvlease.registry.table_limits import TableLimits
from kvlease.registry.values import DIGEST_BYTES, EndReason, Hit, LeaseId, Miss, OnDeadline, Publication

from tests.sim.fabric import Fabric, SlotRead
from tests.sim.judge import Fault
from tests.sim.plan import Plan
from tests.sim.pool import OnReuse
from tests.sim.tokens import BLOCK_TOKENS

if TYPE_CHECKING:
    from tests.sim.lender import LenderParty

IN_BYTES: Final = frozenset({Fault.WRONG_BYTES, Fault.OVERWRITTEN})
"""Somebody used what was not right."""


class Straight:
    """Everything by the contract."""

    name = ""
    shows: frozenset[Fault] = IN_BYTES
    """One of these faults gives the broken rule away."""
    begin = 0
    """The seed from which on it does soon."""

    def sharpen(self, plan: Plan) -> Plan:
        """The plan with more of what this double is about."""
        return plan

    # -- lender ---------------------------------------------------------------------------------------------------

    def holder(self, terms: LenderTerms, first_value: int) -> LeaseHolder:
        return LeaseHolder(terms, first_value=first_value)

    def mirror(self) -> LenderMirror:
        return LenderMirror()

    def break_seal(self, lender: LenderParty, slot: int) -> None:
        lender.memory.break_seal(slot)

    def on_reuse(self, lender: LenderParty, lease_id: LeaseId) -> OnReuse:
        """The callback to leave with a lapsed lease's blocks: one and the same for all."""
        del lease_id
        return lender.on_reuse

    # -- registry -------------------------------------------------------------------------------------------------

    def table(self, limits: TableLimits) -> LeaseTable:
        return LeaseTable(limits)

    def staleness(self, max_ms: int) -> Staleness:
        return Staleness(max_ms=max_ms, max_under_way=16)

    def may_answer(self, staleness: Staleness, now_ms: int) -> bool:
        """Whether a replica that is so current may answer."""
        return staleness.is_current(now_ms)

    def comes_back(self, why: KvleaseError) -> bool:
        """Whether a lender whose session the registry closed opens another one."""
        del why
        return True

    # -- borrower -------------------------------------------------------------------------------------------------

    def quarantine(self) -> Quarantine:
        return Quarantine()

    def judge(self, question: Question, answer: Hit | Miss) -> Match | ComputeReason:
        return question.judge(answer)

    def remote_blocks(self, read: Read, computed_tokens: int) -> tuple[int, ...]:
        """Which remote blocks to READ into the local blocks of the positions from `computed_tokens` on."""
        return read.block_ids[0][computed_tokens // BLOCK_TOKENS :]

    def early_slots(self, fabric: Fabric, engine_id: str, proofs: tuple[Proof, ...]) -> list[SlotRead] | None:
        """Seal READs posted together with the blocks' READ: never."""
        del fabric, engine_id, proofs
        return None

    def slot(self, proof: Proof, slot: bytes) -> bytes:
        """What the prover is told of a slot that was read."""
        del proof
        return slot


def _slow(plan: Plan) -> Plan:
    return replace(plan, faults=replace(plan.faults, read_slow=0.8, long_ms=60))


def _lying(plan: Plan) -> Plan:
    return replace(plan, faults=replace(plan.faults, lie=0.6))


class SealNotRead(Straight):
    name = "seal_not_read"

    def sharpen(self, plan: Plan) -> Plan:
        return _slow(plan)

    def slot(self, proof: Proof, slot: bytes) -> bytes:
        del slot
        return pack_value(proof.seal.value) + proof.record_hash


class SealReadBeforeBlocks(Straight):
    name = "seal_read_before_blocks"
    begin = 49

    def sharpen(self, plan: Plan) -> Plan:
        return _slow(plan)

    def early_slots(self, fabric: Fabric, engine_id: str, proofs: tuple[Proof, ...]) -> list[SlotRead] | None:
        return [SlotRead(fabric, engine_id, proof) for proof in proofs]


class SealBrokenAfterReuse(Straight):
    """The break is late by less than the time that a writer takes for a few blocks."""

    name = "seal_broken_after_reuse"

    def sharpen(self, plan: Plan) -> Plan:
        return _slow(plan)

    def break_seal(self, lender: LenderParty, slot: int) -> None:
        memory, sealings = lender.memory, lender.sealings(slot)

        def late() -> None:
            if lender.sealings(slot) == sealings:
                memory.break_seal(slot)

        lender.world.after(lender.world.between(5, 40), lender, late)


class SlotValueReused(Straight):
    name = "slot_value_reused"
    begin = 101

    def sharpen(self, plan: Plan) -> Plan:
        return replace(_slow(plan), slots=2, faults=replace(_slow(plan).faults, seal_torn=0.7))

    def holder(self, terms: LenderTerms, first_value: int) -> LeaseHolder:
        return _OneValue(terms, first_value=first_value)


class _OneValue(LeaseHolder):
    def lend(self, loan: Loan, now_ms: int) -> list[Effect]:
        self._value = 41
        return super().lend(loan, now_ms)


class RecordHashNotCompared(Straight):
    name = "record_hash_not_compared"

    def sharpen(self, plan: Plan) -> Plan:
        return _lying(plan)

    def slot(self, proof: Proof, slot: bytes) -> bytes:
        return slot[:VALUE_BYTES] + proof.record_hash


class DigestsNotCompared(Straight):
    """The registry's `matched_strides` is believed: the request's own digests are taken from the record."""

    name = "digests_not_compared"

    def sharpen(self, plan: Plan) -> Plan:
        return _lying(plan)

    def judge(self, question: Question, answer: Hit | Miss) -> Match | ComputeReason:
        if isinstance(answer, Hit):
            believed = Chain.of(answer.record.digests[: answer.matched_strides * DIGEST_BYTES])
            question = replace(question, ask=replace(question.ask, chain=believed))
        return question.judge(answer)


class MappedFromTail(Straight):
    """Where counts differ, the last remote blocks are taken for the local ones."""

    name = "mapped_from_tail"

    def sharpen(self, plan: Plan) -> Plan:
        return replace(plan, borrower_caching=True)

    def remote_blocks(self, read: Read, computed_tokens: int) -> tuple[int, ...]:
        wanted = (read.matched_tokens - computed_tokens) // BLOCK_TOKENS
        return read.content.block_ids[0][-wanted:]


class NoQuarantine(Straight):
    name = "no_quarantine"

    def sharpen(self, plan: Plan) -> Plan:
        return replace(plan, faults=replace(plan.faults, read_hangs=0.2, long_ms=60))

    def quarantine(self) -> Quarantine:
        return _Open()


class _Open(Quarantine):
    def enter(self, request_id: str, rank: int, blocks: tuple[int, ...]) -> tuple[int, ...]:
        del request_id, rank, blocks
        return ()


class CallbackPerLease(Straight):
    """Each lapse leaves a callback of its own with the pool, which keeps the last one per block."""

    name = "callback_per_lease"

    def sharpen(self, plan: Plan) -> Plan:
        return replace(
            plan,
            anonymous=1.0,
            lender_caching=True,
            borrower_caching=False,
            on_deadline=OnDeadline.LAPSE,
            ttl_ms=min(plan.ttl_ms, 60),
            slots=16,
            max_leased=plan.lender_blocks,
        )

    def on_reuse(self, lender: LenderParty, lease_id: LeaseId) -> OnReuse:
        def reused(block: int) -> None:
            del block
            effects = lender.holder.end(lease_id, EndReason.REUSED)
            lender.carry_out([effect for effect in effects if not isinstance(effect, Free)])

        return reused


class LifetimeIgnored(Straight):
    """Renewals keep a lease as long as somebody asks."""

    name = "lifetime_ignored"
    shows = frozenset({Fault.OUTLIVED})

    def sharpen(self, plan: Plan) -> Plan:
        return replace(plan, max_lifetime_ms=80, ttl_ms=60, renewable=True, renew=0.5)

    def holder(self, terms: LenderTerms, first_value: int) -> LeaseHolder:
        return LeaseHolder(replace(terms, max_lifetime_ms=0), first_value=first_value)


class NothingPresented(Straight):
    """A lender that comes to a registry says nothing of the leases it holds already."""

    name = "nothing_presented"
    shows = frozenset({Fault.STUCK})

    def sharpen(self, plan: Plan) -> Plan:
        return replace(plan, registries=2, on_deadline=OnDeadline.LAPSE)

    def mirror(self) -> LenderMirror:
        return _Silent()


class _Silent(LenderMirror):
    def present(self) -> tuple[Publication, ...]:
        super().present()
        return ()


LENDER_BREAKS: Final = (
    SealNotRead,
    SealReadBeforeBlocks,
    SealBrokenAfterReuse,
    SlotValueReused,
    RecordHashNotCompared,
    DigestsNotCompared,
    MappedFromTail,
    NoQuarantine,
    CallbackPerLease,
    LifetimeIgnored,
    NothingPresented,
)
