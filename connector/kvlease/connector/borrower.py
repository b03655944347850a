"""The borrower's decisions on the scheduler's side: what to ask, what to read, when to stop waiting.

Pure: answers and times come in, decisions go out. Nothing here is ever an error for the request: each way out is a
decision to read, or a reason to compute. Judging an answer is a function of values, for any thread.

Invariant: a request commits to at most one READ, only of whole blocks under a digest that its own prompt has as well,
and always leaves at least one token to compute.

    ASKING --answer--> PROBING --probe--> READY --commit--> READING --outcome--> BORROWED | COMPUTED(reason)
       any of them --miss, mismatch, time up--> COMPUTED(reason)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvlease.connector.digests import Chain
from kvlease.connector.record import RecordContent, RecordInvalid, decode, record_hash
from kvlease.connector.seal import Proof
from kvlease.registry.values import (
    ConversationId,
    EngineId,
    Hit,
    LeaseId,
    Miss,
    ResolveQuery,
    TenantId,
    common_strides,
)

MAX_BORROWS: Final = 65_536
"""Requests tracked at once; beyond it, requests compute (reason `limit`)."""


class ComputeReason(StrEnum):
    """Why a request computes what a lease might have given it. The registry's reasons come first, by the same names."""

    UNKNOWN = "unknown"
    ENDED = "ended"
    SUSPECT = "suspect"
    DIVERGED = "diverged"
    FINGERPRINT = "fingerprint"
    INVALID = "invalid"
    OVERLOADED = "overloaded"
    REGISTRY_UNAVAILABLE = "registry_unavailable"
    RESOLVE_TIMEOUT = "resolve_timeout"
    RECORD_INVALID = "record_invalid"
    OWN_LEASE = "own_lease"
    """What this engine lends itself is in its own prefix cache, or it is computed: it never reads from itself."""
    LENDER_UNREACHABLE = "lender_unreachable"
    BELOW_THRESHOLD = "below_threshold"
    LOCAL_HIT = "local_hit"
    SHORT_PROMPT = "short_prompt"
    UNSUPPORTED = "unsupported"
    LIMIT = "limit"
    READ_FAILED = "read_failed"
    READ_TIMEOUT = "read_timeout"
    SEAL_BROKEN = "seal_broken"
    SEAL_OTHER_RECORD = "seal_other_record"
    SEAL_UNREADABLE = "seal_unreadable"
    ADAPTER_UNKNOWN = "adapter_unknown"
    ADAPTER_CHANGED = "adapter_changed"
    ABORTED = "aborted"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowTerms:
    fingerprint_hash: bytes
    block_tokens: int
    stride_tokens: int
    wait_ms: int = 50
    """How long a request may be held back for a resolve and a probe, from its arrival."""
    threshold_tokens: int = 64
    """A READ of fewer tokens is not worth its latency."""
    engine_id: EngineId | None = None
    """Of this engine, if it lends as well: it never reads from itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is known of a request when it arrives."""

    request_id: str
    tenant: TenantId
    conversation: ConversationId | None
    lease_id: LeaseId | None
    chain: Chain
    prompt_tokens: int
    threshold_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What an answer of the registry gives a request: a lease whose record fits, and how far."""

    lease_id: LeaseId
    matched_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    """Per KV group, from position 0 up to the match."""
    proofs: tuple[Proof, ...]
    content: RecordContent
    traceparent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a request asks the registry, and how the answer is judged. Any thread may do both."""

    ask: Ask
    terms: BorrowTerms

    def query(self) -> ResolveQuery:
        ask = self.ask
        return ResolveQuery(
            tenant=ask.tenant,
            lease_id=ask.lease_id,
            conversation=ask.conversation,
            digests=ask.chain.digests,
            stride_tokens=self.terms.stride_tokens,
            fingerprint_hash=self.terms.fingerprint_hash,
        )

    def judge(self, answer: Hit | Miss) -> Match | ComputeReason:
        """What the answer is good for, by the record itself and not by what the registry says of it."""
        ask, terms = self.ask, self.terms
        if isinstance(answer, Miss):
            return ComputeReason(answer.reason.value)
        try:
            content = decode(answer.record)
        except RecordInvalid:
            return ComputeReason.RECORD_INVALID
        if content.engine_id == terms.engine_id:
            return ComputeReason.OWN_LEASE
        if content.fingerprint_hash != terms.fingerprint_hash:
            return ComputeReason.FINGERPRINT
        if (
            content.block_tokens != terms.block_tokens
            or content.stride_tokens != terms.stride_tokens
            or content.engine_id != answer.engine_id
            or content.tenant != ask.tenant
        ):
            return ComputeReason.RECORD_INVALID
        matched = common_strides(ask.chain.digests, answer.record.digests) * content.stride_tokens
        if not matched:
            return ComputeReason.DIVERGED
        matched = min(matched, _cap(ask, terms))
        expected = record_hash(answer.record)
        return Match(
            lease_id=answer.lease_id,
            matched_tokens=matched,
            block_ids=tuple(group[: matched // terms.block_tokens] for group in content.block_ids),
            proofs=tuple(Proof(seal=seal, record_hash=expected) for seal in content.seals),
            content=content,
            traceparent=answer.traceparent,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Ask again in the next step: the answer is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Read nothing; `first` is True the first time this request is told so."""

    reason: ComputeReason
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """READ these blocks: the first `matched_tokens` tokens of the prompt, of which `load_tokens` are not here yet."""

    lease_id: LeaseId
    matched_tokens: int
    load_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    """Per KV group, from position 0 up to the match."""
    proofs: tuple[Proof, ...]
    engine_params: bytes
    content: RecordContent
    traceparent: str


Decision = Wait | Compute | Read


@dataclass(slots=True)
class _Borrow:
    ask: Ask
    begun_ms: int
    match: Match | None = None
    reachable: bool = False
    reading: bool = False
    reason: ComputeReason | None = None
    told: bool = False


class Borrower:
    """All borrows of one engine."""

    def __init__(self, terms: BorrowTerms) -> None:
        self._terms = terms
        self._borrows: dict[str, _Borrow] = {}

    def __len__(self) -> int:
        return len(self._borrows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._borrows

    def rebase(self, terms: BorrowTerms) -> None:
        """Other terms from now on: every borrow that has not committed to its READ computes."""
        self._terms = terms
        for borrow in self._borrows.values():
            if not borrow.reading and borrow.reason is None:
                borrow.reason = ComputeReason.FINGERPRINT

    def begin(self, ask: Ask, now_ms: int) -> Question | None:
        """A request has arrived: what to ask the registry, or None if nothing can be borrowed for it."""
        borrow = _Borrow(ask=ask, begun_ms=now_ms)
        if len(self._borrows) >= MAX_BORROWS:
            return None
        self._borrows[ask.request_id] = borrow
        if not len(ask.chain) or _cap(ask, self._terms) < self._threshold(ask):
            borrow.reason = ComputeReason.SHORT_PROMPT
            return None
        return Question(ask=ask, terms=self._terms)

    def answered(self, request_id: str, found: Match | ComputeReason) -> None:
        """The registry's answer has been judged. Those for requests that are gone, and second ones, are dropped."""
        borrow = self._borrows.get(request_id)
        if borrow is None or borrow.reason is not None or borrow.match is not None:
            return
        if isinstance(found, Match):
            borrow.match = found
        else:
            borrow.reason = found

    def probed(self, request_id: str, *, reachable: bool) -> None:
        """Whether the lender's side channel answered for the engine that the record names."""
        borrow = self._borrows.get(request_id)
        if borrow is None or borrow.reason is not None:
            return
        borrow.reachable = reachable
        if not reachable:
            borrow.reason = ComputeReason.LENDER_UNREACHABLE

    def failed(self, request_id: str, reason: ComputeReason) -> None:
        """Asking failed, or the request cannot borrow after all."""
        borrow = self._borrows.get(request_id)
        if borrow is not None and borrow.reason is None:
            borrow.reason = reason

    def decide(self, request_id: str, computed_tokens: int, now_ms: int) -> Decision:
        """The scheduler asks, `computed_tokens` of the prompt being here already.

        A READ may be offered again until `commit`, since the engine may find no room for its blocks; after it, never.
        """
        borrow = self._borrows.get(request_id)
        if borrow is None:
            return Compute(reason=ComputeReason.UNSUPPORTED, first=False)
        if borrow.reading:
            return self._compute(borrow, borrow.reason or ComputeReason.PREEMPTED)
        if borrow.reason is not None:
            return self._compute(borrow, borrow.reason)
        match = borrow.match
        if not borrow.reachable or match is None:
            if now_ms - borrow.begun_ms < self._terms.wait_ms:
                return Wait()
            return self._compute(borrow, ComputeReason.RESOLVE_TIMEOUT)
        load_tokens = match.matched_tokens - computed_tokens
        if load_tokens <= 0:
            return self._compute(borrow, ComputeReason.LOCAL_HIT)
        if load_tokens < self._threshold(borrow.ask):
            return self._compute(borrow, ComputeReason.BELOW_THRESHOLD)
        return Read(
            lease_id=match.lease_id,
            matched_tokens=match.matched_tokens,
            load_tokens=load_tokens,
            block_ids=match.block_ids,
            proofs=match.proofs,
            engine_params=match.content.engine_params,
            content=match.content,
            traceparent=match.traceparent,
        )

    def commit(self, request_id: str) -> None:
        """The engine has allocated the local blocks: the READ offered last is under way."""
        borrow = self._borrows.get(request_id)
        if borrow is not None:
            borrow.reading = True

    def read_failed(self, request_id: str, reason: ComputeReason) -> None:
        """The READ under way came to nothing, for a reason that its report has counted: computing now is no news."""
        borrow = self._borrows.get(request_id)
        if borrow is not None and borrow.reading:
            borrow.reason = reason
            borrow.told = True

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        self._borrows.pop(request_id, None)

    def _threshold(self, ask: Ask) -> int:
        return self._terms.threshold_tokens if ask.threshold_tokens is None else ask.threshold_tokens

    @staticmethod
    def _compute(borrow: _Borrow, reason: ComputeReason) -> Compute:
        first = not borrow.told
        borrow.told = True
        borrow.reason = reason
        return Compute(reason=reason, first=first)


def _cap(ask: Ask, terms: BorrowTerms) -> int:
    """Whole blocks that leave at least one token of the prompt to compute."""
    return max(0, ask.prompt_tokens - 1) // terms.block_tokens * terms.block_tokens
