"""The harness itself, on stock vLLM: two real engines exchange KV by NIXL, and the comparer tells right from wrong.

Without kvlease on purpose: when these fail, the ground that the other engine tests stand on is gone. The wrong-KV case
is the negative control for every comparison of log-probs in this suite.
"""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engines.children import ChildFailed
from tests.engines.engine import BLOCK_TOKENS, EngineSettings, Json, Role, kv_transfer_config
from tests.engines.fleet import Fleet, FleetSettings, one_prefill_one_decode
from tests.engines.logprobs import DifferentAnswers, assert_same, largest_difference
from tests.engines.model import WORDS, model_dir
from tests.engines.openai_client import PREFILL_ONLY, OpenAIClient, RefusedTurn, two_legs

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(700)]

EXTERNAL_HITS = re.compile(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", re.MULTILINE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    settings = FleetSettings(engines=one_prefill_one_decode(kvlease=None), registry=False, router=False)
    async with Fleet(settings) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def prefill(fleet: Fleet) -> AsyncIterator[OpenAIClient]:
    async with OpenAIClient(fleet.prefill_url) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def decode(fleet: Fleet) -> AsyncIterator[OpenAIClient]:
    async with OpenAIClient(fleet.decode_url) as client:
        yield client


def words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


async def tokens_received(decode: OpenAIClient) -> float:
    status, metrics = await decode.get("/metrics")
    assert status == 200
    return sum(float(value) for value in EXTERNAL_HITS.findall(metrics))


async def test_decode_reads_what_prefill_computed(prefill: OpenAIClient, decode: OpenAIClient) -> None:
    before = await tokens_received(decode)
    body: dict[str, Json] = {"prompt": words(700, seed=1), "max_tokens": 8, "logprobs": 1, "stream": True}
    _, answer = await two_legs(prefill, decode, "/v1/completions", body)
    received = await tokens_received(decode) - before
    assert received >= answer.prompt_tokens - BLOCK_TOKENS
    recomputed = await prefill.complete(words(700, seed=1), cache_salt="recompute")
    assert_same(answer, recomputed)
    assert answer.chunks > 1
    assert answer.completion_tokens == 8
    assert 0 < answer.ttft_s < answer.total_s


async def test_wrong_kv_is_told_from_right(prefill: OpenAIClient, decode: OpenAIClient) -> None:
    """D is given the KV of another prompt of the same length: HTTP 200, an answer, and log-probs that are off."""
    theirs = await prefill.complete(words(700, seed=3), max_tokens=1, kv_transfer_params=PREFILL_ONLY)
    assert theirs.kv_transfer_params is not None
    wrong = await decode.complete(words(700, seed=2), kv_transfer_params=theirs.kv_transfer_params)
    right = await prefill.complete(words(700, seed=2))
    with pytest.raises(DifferentAnswers):
        assert_same(wrong, right)
    # One word in 700 is the smallest mistake that can be made; it too has to show.
    one_word_off = await prefill.complete("tree" + words(700, seed=2).removeprefix(words(700, seed=2).split()[0]))
    assert largest_difference(one_word_off, right) > 1e-4


async def test_answers_round_trip_through_the_history(prefill: OpenAIClient, decode: OpenAIClient) -> None:
    """The next turn's prompt is the last prompt, the answer and what follows, token for token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    asked = "<|im_start|>user\ntell me a story<|im_end|>\n<|im_start|>assistant\n"
    answer = await prefill.chat([{"role": "user", "content": "tell me a story"}], max_tokens=40)
    assert len(answer.text.split()) == 40
    whole = tokenizer.encode(asked + answer.text + "<|im_end|>\n").tokens
    apart = tokenizer.encode(asked).tokens + list(tokenizer.encode(answer.text).tokens)
    assert whole[: len(apart)] == apart
    assert [token.replace("Ġ", " ") for token in apart[-40:]] == list(answer.tokens)


async def test_server_errors_are_typed(prefill: OpenAIClient) -> None:
    with pytest.raises(RefusedTurn) as refused:
        await prefill.complete("one two", model="unknown")
    assert refused.value.status == 404


async def test_failed_start_stops_everything_and_says_why(tmp_path: Path) -> None:
    broken = EngineSettings(engine_id="broken", role=Role.DECODE, arguments=("--no-such-flag",))
    states: list[tuple[str, str]] = []
    fleet = Fleet(
        FleetSettings(engines=[broken], registry=False, router=False, log_dir=tmp_path),
        lambda name, state: states.append((name, state)),
    )
    with pytest.raises(ChildFailed, match=r"broken ended with status 2[\s\S]*--no-such-flag"):
        async with fleet:
            pytest.fail("a fleet with a broken engine started")
    assert fleet.child("broken").returncode == 2
    assert ("broken", "starting") in states


async def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="10 blocks of 32 tokens hold less than one request"):
        EngineSettings(engine_id="small", role=Role.DECODE, kv_blocks=10)
    with pytest.raises(ValueError, match="no registry"):
        kv_transfer_config(EngineSettings(engine_id="one", role=Role.DECODE, kvlease={}), registry=None)
    same = EngineSettings(engine_id="same", role=Role.DECODE)
    with pytest.raises(ValueError, match="must differ"):
        FleetSettings(engines=[same, same])
