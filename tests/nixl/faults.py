"""The contract broken on purpose, one double per fault. Nothing here is reachable from the product.

Each double replaces one decision of the product or of its adapter and leaves everything else as it is; a run with any
of them must end with wrong bytes accepted, or the judge is blind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from kvlease.connector.borrower import Borrower, BorrowTerms, Decision, Read
from kvlease.connector.lender import LeaseHolder
from kvlease.connector.lender_effects import Effect
from kvlease.connector.loan import LenderTerms, Loan
from kvlease.connector.prover import Prover, ReadSeals, Release
from kvlease.connector.quarantine import Quarantine
from kvlease.connector.seal import SLOT_BYTES, VALUE_BYTES, Proof, pack_value
from kvlease.connector.seal_table import SealTable
from kvlease.registry.values import EndReason, LeaseId, Publication

from tests.nixl.lending import Lending
from tests.nixl.messages import Fault
from tests.nixl.pool import OnReuse, Pool


class StuckValues(LeaseHolder):
    """Each lease gets the same seal value."""

    def __init__(self, terms: LenderTerms, *, first_value: int) -> None:
        super().__init__(terms, first_value=first_value)
        self._stuck = first_value

    def lend(self, loan: Loan, now_ms: int) -> list[Effect]:
        self._value = self._stuck
        return super().lend(loan, now_ms)


class LateBreaks(Lending):
    """Breaks seals once their blocks have been written and the next ones too, instead of before."""

    _owed: tuple[tuple[int, ...], ...] = ((), ())

    def break_seal(self, slot: int) -> None:
        older, newer = self._owed
        self._owed = (older, (*newer, slot))

    def written(self) -> None:
        older, newer = self._owed
        for slot in older:
            super().break_seal(slot)
        self._owed = (newer, ())


class CallbackPerLease(Lending):
    """Gives the pool a callback for each lease; the pool keeps only the last one of a block."""

    def callback(self, lease_id: LeaseId) -> OnReuse:
        return lambda block: self.carry_out(self.holder.end(lease_id, EndReason.REUSED))


class SealNotRead(Prover):
    """Takes the blocks as soon as they are here."""

    def landed(
        self, request_id: str, now_ms: int, ranks: Collection[tuple[int, int]] | None = None
    ) -> ReadSeals | Release:
        answer = super().landed(request_id, now_ms, ranks)
        if isinstance(answer, Release):
            return answer
        return self._say(answer, [pack_value(p.seal.value) + p.record_hash for p in answer.proofs], now_ms)

    def _say(self, asked: ReadSeals, slots: Sequence[bytes], now_ms: int) -> Release:
        releases = [self.seal_read(asked.request_id, index, slot, now_ms) for index, slot in enumerate(slots)]
        return next(release for release in releases if release is not None)


class SealReadBefore(SealNotRead):
    """Asks the seals as they were before the READ was posted."""

    def __init__(self, before: Mapping[str, bytes | None], read_limit_ms: int) -> None:
        super().__init__(read_limit_ms)
        self._before = before

    def _say(self, asked: ReadSeals, slots: Sequence[bytes], now_ms: int) -> Release:
        return super()._say(asked, [self._before.get(asked.request_id) or bytes(SLOT_BYTES)], now_ms)


class HashNotCompared(Prover):
    """Asks the seal's value only."""

    def __init__(self, read_limit_ms: int) -> None:
        super().__init__(read_limit_ms)
        self._hashes: dict[str, bytes] = {}

    def posted(self, request_id: str, proofs: tuple[Proof, ...], now_ms: int) -> None:
        self._hashes[request_id] = proofs[0].record_hash
        super().posted(request_id, proofs, now_ms)

    def seal_read(self, request_id: str, index: int, slot: bytes | None, now_ms: int) -> Release | None:
        claimed = None if slot is None else slot[:VALUE_BYTES] + self._hashes[request_id]
        return super().seal_read(request_id, index, claimed, now_ms)


class FromTail(Borrower):
    """Reads as many blocks as match, counted from the lease's end."""

    def decide(self, request_id: str, computed_tokens: int, now_ms: int) -> Decision:
        decision = super().decide(request_id, computed_tokens, now_ms)
        if not isinstance(decision, Read):
            return decision
        blocks = len(decision.block_ids[0])
        return replace(decision, block_ids=tuple(group[-blocks:] for group in decision.content.block_ids))


class NoQuarantine(Quarantine):
    """Lets the blocks of a late READ go at once."""

    def enter(self, request_id: str, rank: int, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return ()


def lease_holder(fault: str, terms: LenderTerms, first_value: int) -> LeaseHolder:
    kind = StuckValues if fault == Fault.SLOT_VALUE_REUSED else LeaseHolder
    return kind(terms, first_value=first_value)


def lending(
    fault: str, holder: LeaseHolder, pool: Pool, table: SealTable, announced: Callable[[Publication], None]
) -> Lending:
    kinds: dict[str, type[Lending]] = {
        Fault.SEAL_BROKEN_AFTER_REUSE: LateBreaks,
        Fault.REUSE_CALLBACK_PER_LEASE: CallbackPerLease,
    }
    return kinds.get(fault, Lending)(holder, pool, table, announced)


def prover(fault: str, before: Mapping[str, bytes | None], read_limit_ms: int) -> Prover:
    match fault:
        case Fault.SEAL_NOT_READ:
            return SealNotRead(read_limit_ms)
        case Fault.SEAL_READ_BEFORE_BLOCKS:
            return SealReadBefore(before, read_limit_ms)
        case Fault.RECORD_HASH_NOT_COMPARED:
            return HashNotCompared(read_limit_ms)
        case _:
            return Prover(read_limit_ms)


def borrower(fault: str, terms: BorrowTerms) -> Borrower:
    return FromTail(terms) if fault == Fault.MAPPED_FROM_TAIL else Borrower(terms)


def quarantine(fault: str) -> Quarantine:
    return NoQuarantine() if fault == Fault.QUARANTINE_LEFT_OUT else Quarantine()
