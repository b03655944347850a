"""Which part of a lease a prompt reads: two of vLLM's real schedulers, a lender's and a borrower's, and a real record.

The lender's turn is run and lent; the borrower gets what the lender tells of it. What counts is the READ that the
borrower orders: exactly the lender's first blocks, as far as both have the same tokens in whole strides, never one
token too far. No engine, so KV itself is compared elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the schedulers are vLLM's: install the engines (make engines-venv)")

from kvlease.connector.borrower import ComputeReason
from kvlease.connector.vllm_metadata import attached_orders
from kvlease.registry.metrics import BORROWER_MISSES, LENDER_NOT_LENT

from tests.engines.chat import strides
from tests.engines.engine import BLOCK_TOKENS
from tests.engines.inprocess import OUTPUT_TOKEN, Desk, DeskSettings, Loads, desk, tokens
from tests.engines.inprocess_leases import found, publication

pytestmark = pytest.mark.engines

THRESHOLD = 64
NUMBERS = itertools.count()


class Pair:
    def __init__(self, lender: Desk, borrower: Desk) -> None:
        self.lender = lender
        self.borrower = borrower

    def lend(self, prompt: Sequence[int], answer: int = 1, **request: Any) -> list[int]:
        """Runs a turn of a new conversation on the lender; its tokens, the last of which has no KV."""
        self.conversation = f"chat-{next(NUMBERS)}"
        self.lender.add(
            self.conversation, prompt, max_tokens=answer, kvlease={"conversation": self.conversation}, **request
        )
        self.lender.run(answer + 20)
        return [*prompt, *[OUTPUT_TOKEN] * answer]

    def read(self, prompt: Sequence[int], **request: Any) -> int:
        """The next turn's prompt on the borrower: how many of its tokens are read. Checks which blocks are."""
        lease = publication(self.lender, self.conversation)
        request_id = f"{self.conversation}-next-{next(NUMBERS)}"
        asked = self.borrower.add(request_id, prompt, kvlease={"conversation": self.conversation}, **request)
        if request_id not in self.borrower.side._borrowing:
            self.borrower.run()
            return 0
        found(self.borrower, asked, lease, self.lender)
        output = self.borrower.schedule()
        metadata = output.kv_connector_metadata
        if request_id not in metadata.reqs_to_recv:
            assert not attached_orders(metadata)
            self.borrower.finish(output)
            self.borrower.run()
            return 0
        order = metadata.reqs_to_recv[request_id]
        held = self.lender.side._lending._holder._held[lease.lease_id].loan.block_ids[0]
        matched = len(order.remote.block_ids[0])
        assert order.remote.block_ids == (list(held[:matched]),)
        assert order.local_block_ids == (
            self.borrower.scheduler.kv_cache_manager.get_block_ids(request_id)[0][:matched],
        )
        loads = Loads()
        loads.over(request_id)
        self.borrower.finish(output, loads)
        first = self.borrower.step()
        assert first.num_scheduled_tokens == {request_id: len(prompt) - matched * BLOCK_TOKENS}
        self.borrower.run()
        return matched * BLOCK_TOKENS

    def misses(self, reason: ComputeReason) -> float:
        return self.borrower.count(BORROWER_MISSES, reason=reason.value)


def common(lent: Sequence[int], prompt: Sequence[int]) -> int:
    """What is to be read: the common prefix in whole strides, one token left to compute, in whole blocks."""
    shared = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(lent[:-1], prompt, strict=False)))
    matched = min(strides(shared), (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    return matched if matched >= THRESHOLD else 0


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    more: dict[str, Any] = {"prefix_caching": False, "blocks": 512}
    with (
        desk(DeskSettings(role="kv_consumer", engine_id="lender", **more)) as lender,
        desk(DeskSettings(role="kv_producer", engine_id="borrower", **more)) as borrower,
    ):
        lender.takes_images()
        borrower.takes_images()
        yield Pair(lender, borrower)


# -- lengths at the borders of strides ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_tokens", [62, 63, 64, 65, 126, 127, 128, 129])
def test_a_turn_is_lent_in_whole_strides_of_tokens_that_have_kv(pair: Pair, prompt_tokens: int) -> None:
    """The last token of an answer has none."""
    short = pair.lender.count(LENDER_NOT_LENT, reason="short")
    pair.lend(tokens(prompt_tokens, seed=1), answer=2)
    lent = strides(prompt_tokens + 1)
    if lent:
        record = publication(pair.lender, pair.conversation)
        assert record.block_count == lent // BLOCK_TOKENS
    else:
        assert pair.lender.count(LENDER_NOT_LENT, reason="short") == short + 1


@pytest.mark.parametrize("lent", [65, 128, 129, 192, 300])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 66, 96, 97, 127, 128, 129, 191, 192, 193, 300, 301, 400])
def test_a_prompt_shorter_than_the_lease_equal_to_it_or_longer_reads_what_both_have(
    pair: Pair, lent: int, length: int
) -> None:
    said = pair.lend(tokens(lent - 1, seed=2), answer=2)
    prompt = [*said, *tokens(400, seed=3)][:length]
    assert pair.read(prompt) == common(said, prompt)


@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 127, 128, 129, 250, 255, 256])
def test_a_prompt_that_forks_reads_up_to_the_fork(pair: Pair, at: int) -> None:
    said = pair.lend(tokens(250, seed=4), answer=20)
    prompt = [*said, *tokens(50, seed=5)]
    prompt[at] += 1
    diverged = pair.misses(ComputeReason.DIVERGED)
    read = pair.read(prompt)
    assert read == common(said, prompt) == strides(at)
    assert pair.misses(ComputeReason.DIVERGED) - diverged == (0 if read else 1)


# -- histories that templates rewrite ----------------------------------------------------------------------------------

SYSTEM, ASK, MORE = tokens(200, seed=6), tokens(90, seed=7), tokens(90, seed=8)
OPEN, EMPTY = [241, 242, 243], [241, 244, 244, 242, 245]
"""How a prompt ends that asks for thinking, and one that asks for none: they begin alike."""


@pytest.mark.parametrize("order", list(itertools.product([True, False], repeat=3)), ids=str)
@pytest.mark.matrix(
    group="A prompt borrows",
    condition="thinking switched on and off between turns",
    lent="branches live side by side",
    reused="up to the last common stride",
    freed="-",
    recomputed="the rest",
)
def test_thinking_that_is_switched_rewrites_the_history_and_never_costs_what_is_common(
    pair: Pair, order: tuple[bool, ...]
) -> None:
    """R2: the template drops thinking, and the prefix that asked for it, from all turns but the last."""
    history = [*SYSTEM, *ASK]
    for thinks in order:
        before = history
        said = pair.lend([*history, *(OPEN if thinks else EMPTY)], answer=60 if thinks else 30)
        answer = [OUTPUT_TOKEN] * 30
        history = [*history, *answer, *MORE]
        for again in (OPEN, EMPTY):
            prompt = [*history, *again]
            read = pair.read(prompt)
            assert read == common(said, prompt)
            assert read >= strides(len(before)) > 0


# -- what stands beside the tokens -------------------------------------------------------------------------------------


def image(identifier: str, offset: int, length: int) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
        mm_hash=identifier,
    )


@pytest.mark.parametrize("at", [0, 10, 64, 100, 130])
@pytest.mark.matrix(
    group="A prompt borrows",
    condition="the same text with another image",
    lent="-",
    reused="up to the image, in whole strides",
    freed="-",
    recomputed="from the image on",
)
def test_another_image_of_the_same_size_is_a_miss_from_the_image_on(pair: Pair, at: int) -> None:
    """R5: same tokens, other picture."""
    said = pair.lend(tokens(300, seed=9), mm_features=[image("cat", at, 40)])
    prompt = [*said, *tokens(30, seed=10)]
    assert pair.read(prompt, mm_features=[image("cat", at, 40)]) == common(said, prompt) == 256
    assert pair.read(prompt, mm_features=[image("dog", at, 40)]) == strides(at)
    assert pair.read(prompt) == strides(at), "and without one"
    assert pair.read(prompt, mm_features=[image("cat", at + 1, 40)]) == strides(at), "and elsewhere"
    more = [image("cat", at, 40), image("bird", 310, 10)]
    assert pair.read(prompt, mm_features=more) == 256, "a new one after what was lent"


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None), (None, "a")], ids=str)
def test_another_salt_is_a_miss(pair: Pair, salts: tuple[str | None, str | None]) -> None:
    """R5: same tokens, other `cache_salt`."""
    said = pair.lend(tokens(300, seed=11), cache_salt=salts[0])
    prompt = [*said, *tokens(30, seed=12)]
    diverged = pair.misses(ComputeReason.DIVERGED)
    assert pair.read(prompt, cache_salt=salts[1]) == 0
    assert pair.misses(ComputeReason.DIVERGED) == diverged + 1
    assert pair.read(prompt, cache_salt=salts[0]) == common(said, prompt)


@pytest.mark.matrix(
    group="A prompt borrows",
    condition="log-probs of the prompt are wanted, or it is given as embeddings",
    lent="nothing",
    reused="nothing",
    freed="all at its end",
    recomputed="all",
)
@pytest.mark.parametrize("kind", ["prompt_logprobs", "no_cache", "embeddings"])
def test_a_request_whose_prompt_is_to_be_computed_reads_and_lends_nothing(pair: Pair, kind: str) -> None:
    import torch

    kinds: dict[str, dict[str, Any]] = {
        "prompt_logprobs": {"sampling": {"prompt_logprobs": 0}},
        "no_cache": {"sampling": {"skip_reading_prefix_cache": True}},
        "embeddings": {"prompt_embeds": torch.zeros(300, 8)},
    }
    special = kinds[kind]
    pair.lend(tokens(300, seed=13))
    prompt = tokens(300, seed=13)
    assert pair.read(prompt, **special) == 0
    before = pair.lender.count(LENDER_NOT_LENT, reason="unsupported")
    leases = pair.lender.leases
    pair.lend(prompt, **special)
    assert (pair.lender.leases, pair.lender.count(LENDER_NOT_LENT, reason="unsupported")) == (leases, before + 1)
