"""The borrower's decisions: what is asked, what is read, and that waiting always ends.

Time is a parameter and answers are made here; that a READ's bytes are right is for the simulation and real engines.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlease.connector.borrower import Ask, Borrower, BorrowTerms, Compute, ComputeReason, Match, Question, Read, Wait
from kvlease.connector.digests import Chain, chain
from kvlease.connector.record import RecordContent, encode, record_hash
from kvlease.connector.seal import SealRef
from kvlease.registry.values import (
    DIGEST_BYTES,
    ConversationId,
    EngineId,
    Hit,
    Incarnation,
    LeaseId,
    LeaseState,
    Miss,
    MissReason,
    Record,
    ResolveQuery,
    TenantId,
)

BLOCK, STRIDE = 16, 64
FINGERPRINT = b"f" * 16
TENANT = TenantId("t")
TERMS = BorrowTerms(fingerprint_hash=FINGERPRINT, block_tokens=BLOCK, stride_tokens=STRIDE, wait_ms=50)


def digests(strides: int, *, changed_at: int | None = None) -> bytes:
    """A chain of so many strides; from stride `changed_at` on, of other tokens."""
    words = [bytes([s if changed_at is None or s < changed_at else 200 + s]) * 16 for s in range(strides)]
    return chain(bytes(range(32)), words, hash_tokens=STRIDE, stride_tokens=STRIDE, tokens=strides * STRIDE).digests


def hit(strides: int = 4, *, changed_at: int | None = None, **changes: object) -> Hit:
    content = RecordContent(
        lease_id=LeaseId("lease"),
        engine_id=EngineId("lender"),
        incarnation=Incarnation(b"i" * 16),
        fingerprint_hash=FINGERPRINT,
        tenant=TENANT,
        stride_tokens=STRIDE,
        block_tokens=BLOCK,
        tokens=strides * STRIDE,
        block_ids=(tuple(range(100, 100 + strides * STRIDE // BLOCK)),),
        seals=(SealRef(pp_rank=0, tp_rank=0, address=64, value=7),),
        engine_params=b"{}",
    )
    content = replace(content, **changes)  # type: ignore[arg-type]  # field names and values of the cases below
    return Hit(
        lease_id=LeaseId("lease"),
        engine_id=EngineId("lender"),
        incarnation=Incarnation(b"i" * 16),
        conversation=None,
        record=encode(content, digests(strides, changed_at=changed_at)),
        matched_strides=strides,
        state=LeaseState.LIVE,
        remaining_ms=1_000,
    )


def ask(prompt_tokens: int, *, threshold_tokens: int | None = None) -> Ask:
    return Ask(
        request_id="r",
        tenant=TENANT,
        conversation=ConversationId("c"),
        lease_id=None,
        chain=Chain.of(digests(prompt_tokens // STRIDE)),
        prompt_tokens=prompt_tokens,
        threshold_tokens=threshold_tokens,
    )


def judged(answer: Hit | Miss, prompt_tokens: int = 300) -> Match | ComputeReason:
    return Question(ask=ask(prompt_tokens), terms=TERMS).judge(answer)


def ready(prompt_tokens: int, answer: Hit | None = None, *, threshold_tokens: int | None = None) -> Borrower:
    """A borrower whose request has its answer and whose lender is reachable."""
    borrower = Borrower(TERMS)
    borrower.begin(ask(prompt_tokens, threshold_tokens=threshold_tokens), 0)
    borrower.answered("r", judged(answer or hit(), prompt_tokens))
    borrower.probed("r", reachable=True)
    return borrower


def reason(borrower: Borrower, computed_tokens: int = 0, now_ms: int = 1) -> ComputeReason | None:
    """Why it computes; None if it does not."""
    decision = borrower.decide("r", computed_tokens, now_ms)
    return decision.reason if isinstance(decision, Compute) else None


def test_a_prompt_that_goes_on_from_a_lease_reads_its_blocks_by_position() -> None:
    answer = hit()
    read = ready(300, answer).decide("r", 64, 1)
    assert isinstance(read, Read)
    assert (read.matched_tokens, read.load_tokens) == (256, 192)
    assert read.block_ids == (tuple(range(100, 116)),), "from position 0 on, whatever is here already"
    assert [proof.record_hash for proof in read.proofs] == [record_hash(answer.record)]
    assert [proof.seal.value for proof in read.proofs] == [7]


def test_the_query_says_all_that_is_known() -> None:
    asked = Borrower(TERMS).begin(ask(300), 0)
    assert asked is not None
    assert asked.query() == ResolveQuery(
        tenant=TENANT,
        conversation=ConversationId("c"),
        digests=digests(4),
        stride_tokens=STRIDE,
        fingerprint_hash=FINGERPRINT,
    )


@pytest.mark.parametrize(
    ("prompt_tokens", "matched_tokens"),
    [
        (257, 256),  # one token is left
        (256, 240),  # the prompt ends with the lease: its last block is computed
        (255, 192),  # the last stride is not whole
        (193, 192),
        (192, 176),
        (65, 64),
    ],
)
def test_at_least_one_token_is_left_to_compute(prompt_tokens: int, matched_tokens: int) -> None:
    read = ready(prompt_tokens, threshold_tokens=1).decide("r", 0, 1)
    assert isinstance(read, Read)
    assert read.matched_tokens == matched_tokens
    assert len(read.block_ids[0]) * BLOCK == matched_tokens


@pytest.mark.parametrize("changed_at", [1, 2, 3])
def test_only_the_common_prefix_is_read_whatever_the_registry_says(changed_at: int) -> None:
    lying = replace(hit(changed_at=changed_at), matched_strides=4)
    read = ready(300, lying, threshold_tokens=1).decide("r", 0, 1)
    assert isinstance(read, Read)
    assert read.matched_tokens == changed_at * STRIDE
    assert len(read.block_ids[0]) == changed_at * STRIDE // BLOCK


@given(st.integers(1, 400), st.integers(1, 6), st.integers(0, 6), st.integers(0, 25), st.integers(1, 128))
def test_a_read_is_always_within_the_common_prefix_and_leaves_a_token(
    prompt_tokens: int, strides: int, changed_at: int, computed_blocks: int, threshold: int
) -> None:
    borrower = Borrower(TERMS)
    borrower.begin(ask(prompt_tokens, threshold_tokens=threshold), 0)
    borrower.answered("r", judged(hit(strides, changed_at=changed_at), prompt_tokens))
    borrower.probed("r", reachable=True)
    computed = min(computed_blocks * BLOCK, (prompt_tokens - 1) // BLOCK * BLOCK)
    decision = borrower.decide("r", computed, 1)
    assert not isinstance(decision, Wait)
    if isinstance(decision, Read):
        common = min(strides, changed_at, prompt_tokens // STRIDE) * STRIDE
        assert decision.matched_tokens <= min(common, prompt_tokens - 1)
        assert decision.matched_tokens % BLOCK == 0
        assert decision.load_tokens == decision.matched_tokens - computed >= threshold
        assert len(decision.block_ids[0]) * BLOCK == decision.matched_tokens


def test_a_read_below_the_threshold_is_not_worth_it() -> None:
    assert reason(ready(300), 256 - 63 // BLOCK * BLOCK) is ComputeReason.BELOW_THRESHOLD
    assert isinstance(ready(300).decide("r", 256 - 64, 1), Read)
    assert reason(ready(300, threshold_tokens=200), 64) is ComputeReason.BELOW_THRESHOLD


@pytest.mark.parametrize("computed", [256, 272])
def test_what_is_here_already_is_not_read(computed: int) -> None:
    assert reason(ready(300), computed) is ComputeReason.LOCAL_HIT


@pytest.mark.parametrize("prompt_tokens", [1, 63, 64, 79])
def test_a_short_prompt_asks_nobody(prompt_tokens: int) -> None:
    """79: one stride is whole, and the blocks before the last token hold 64; but 64 tokens hold only 48 to read."""
    borrower = Borrower(TERMS)
    asked = borrower.begin(ask(prompt_tokens), 0)
    assert (asked is None) == (prompt_tokens < 65)
    if asked is None:
        assert reason(borrower) is ComputeReason.SHORT_PROMPT


def test_a_read_is_offered_until_the_engine_has_room_and_never_again() -> None:
    borrower = ready(300)
    first = borrower.decide("r", 0, 1)
    assert borrower.decide("r", 0, 2) == first
    borrower.commit("r")
    assert borrower.decide("r", 0, 3) == Compute(reason=ComputeReason.PREEMPTED, first=True)
    assert borrower.decide("r", 0, 4) == Compute(reason=ComputeReason.PREEMPTED, first=False)


def test_a_failed_read_is_no_news_when_the_request_computes() -> None:
    borrower = ready(300)
    borrower.commit("r")
    borrower.read_failed("r", ComputeReason.SEAL_BROKEN)
    assert borrower.decide("r", 0, 3) == Compute(reason=ComputeReason.SEAL_BROKEN, first=False)


def test_a_reason_is_told_as_new_once() -> None:
    borrower = Borrower(TERMS)
    borrower.begin(ask(300), 0)
    borrower.answered("r", judged(Miss(reason=MissReason.SUSPECT)))
    assert borrower.decide("r", 0, 1) == Compute(reason=ComputeReason.SUSPECT, first=True)
    assert borrower.decide("r", 0, 2) == Compute(reason=ComputeReason.SUSPECT, first=False)


@pytest.mark.parametrize("answered", [False, True])
def test_waiting_ends_at_its_bound_and_an_answer_after_it_changes_nothing(answered: bool) -> None:
    borrower = Borrower(TERMS)
    borrower.begin(ask(300), 1_000)
    if answered:
        borrower.answered("r", judged(hit()))  # but the probe is out
    assert borrower.decide("r", 0, 1_049) == Wait()
    assert reason(borrower, now_ms=1_050) is ComputeReason.RESOLVE_TIMEOUT
    borrower.answered("r", judged(hit()))
    borrower.probed("r", reachable=True)
    assert reason(borrower, now_ms=1_051) is ComputeReason.RESOLVE_TIMEOUT


def test_answers_for_requests_that_are_gone_are_dropped() -> None:
    borrower = Borrower(TERMS)
    borrower.begin(ask(300), 0)
    borrower.forget("r")
    borrower.answered("r", judged(hit()))
    borrower.probed("r", reachable=True)
    borrower.failed("r", ComputeReason.REGISTRY_UNAVAILABLE)
    borrower.commit("r")
    borrower.read_failed("r", ComputeReason.READ_FAILED)
    borrower.forget("r")
    assert len(borrower) == 0
    assert borrower.decide("r", 0, 1) == Compute(reason=ComputeReason.UNSUPPORTED, first=False)


def test_the_first_answer_counts() -> None:
    borrower = ready(300)
    borrower.answered("r", judged(hit(2)))
    borrower.answered("r", judged(Miss(reason=MissReason.ENDED)))
    read = borrower.decide("r", 0, 1)
    assert isinstance(read, Read)
    assert read.matched_tokens == 256


@pytest.mark.parametrize("missed", list(MissReason))
def test_every_miss_has_a_reason_of_the_same_name(missed: MissReason) -> None:
    borrower = Borrower(TERMS)
    borrower.begin(ask(300), 0)
    borrower.answered("r", judged(Miss(reason=missed)))
    found = reason(borrower)
    assert found is not None
    assert found.value == missed.value


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (hit(changed_at=0), ComputeReason.DIVERGED),
        (hit(fingerprint_hash=b"g" * 16), ComputeReason.FINGERPRINT),
        (hit(tenant=TenantId("u")), ComputeReason.RECORD_INVALID),
        (hit(engine_id=EngineId("other")), ComputeReason.RECORD_INVALID),
        (hit(block_tokens=32, block_ids=(tuple(range(8)),)), ComputeReason.RECORD_INVALID),
        (hit(stride_tokens=32, tokens=128, block_ids=(tuple(range(8)),)), ComputeReason.RECORD_INVALID),
        (replace(hit(), record=Record(digests=digests(3), body=hit().record.body)), ComputeReason.RECORD_INVALID),
        (replace(hit(), record=Record(digests=digests(4), body=b"\xff")), ComputeReason.RECORD_INVALID),
    ],
)
def test_a_record_that_does_not_fit_is_not_read(answer: Hit, expected: ComputeReason) -> None:
    borrower = Borrower(TERMS)
    borrower.begin(ask(300), 0)
    borrower.answered("r", judged(answer))
    assert reason(borrower) is expected


def test_an_engine_never_reads_from_itself() -> None:
    terms = replace(TERMS, engine_id=EngineId("lender"))
    assert Question(ask=ask(300), terms=terms).judge(hit()) is ComputeReason.OWN_LEASE


def test_a_lender_that_does_not_answer_is_not_read_from() -> None:
    borrower = Borrower(TERMS)
    borrower.begin(ask(300), 0)
    borrower.answered("r", judged(hit()))
    borrower.probed("r", reachable=False)
    assert reason(borrower) is ComputeReason.LENDER_UNREACHABLE


def test_asking_that_failed_ends_the_wait() -> None:
    borrower = Borrower(TERMS)
    borrower.begin(ask(300), 0)
    borrower.failed("r", ComputeReason.REGISTRY_UNAVAILABLE)
    borrower.failed("r", ComputeReason.LIMIT)
    assert reason(borrower) is ComputeReason.REGISTRY_UNAVAILABLE


def test_the_proofs_bind_the_digests_that_were_compared_to_the_blocks() -> None:
    """A registry that pairs one lease's digests with another's blocks makes a hash that no seal holds."""
    honest = hit()
    mixed = replace(honest, record=Record(digests=digests(4), body=hit(lease_id=LeaseId("other")).record.body))
    read = ready(300, mixed).decide("r", 0, 1)
    assert isinstance(read, Read)
    assert read.proofs[0].record_hash != record_hash(honest.record)
    assert len(honest.record.digests) == 4 * DIGEST_BYTES
