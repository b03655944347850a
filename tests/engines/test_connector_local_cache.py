"""R9: the prefill engine holds part of the prefix itself. Only what is missing is read, at the right positions.

The prefill engine's own prefix cache is on here. What was read is counted in bytes, whether it was right in log-probs;
and what was read becomes part of that cache, which must then be right as well.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines.chat import PAUSE_S, ids, recompute, strides
from tests.engines.engine import BLOCK_TOKENS, Json
from tests.engines.fleet import Fleet, FleetSettings, one_prefill_one_decode
from tests.engines.logprobs import assert_same
from tests.engines.model import KV_BYTES_PER_TOKEN
from tests.engines.openai_client import Answer, OpenAIClient
from tests.ports import free_ports

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

READ_BYTES = re.compile(r"^kvlease_borrower_read_bytes_total (\S+)$", re.MULTILINE)
PROMPT_TOKENS = 1_000
THRESHOLD = 64


class Engines:
    def __init__(self, prefill: OpenAIClient, decode: OpenAIClient, metrics: OpenAIClient) -> None:
        self.prefill = prefill
        self.decode = decode
        self.metrics = metrics

    async def bytes_read(self) -> float:
        return sum(float(value) for value in READ_BYTES.findall((await self.metrics.get("/metrics"))[1]))

    async def ask(self, prompt: list[int], conversation: str, salt: str) -> Answer:
        return await self.prefill.complete(
            prompt,
            max_tokens=1,
            cache_salt=salt,
            return_tokens_as_token_ids=True,
            ignore_eos=True,
            kv_transfer_params={"kvlease": {"conversation": conversation}},
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Engines]:
    metrics = f"127.0.0.1:{free_ports(1)[0]}"
    settings: dict[str, Json] = {"resolve_wait_ms": 5_000}
    prefill, decode = one_prefill_one_decode(kvlease=settings)
    prefill = dataclasses.replace(prefill, kvlease={**settings, "metrics": metrics})
    async with (
        Fleet(FleetSettings(engines=(prefill, decode), router=False)) as fleet,
        OpenAIClient(fleet.prefill_url) as prefill_client,
        OpenAIClient(fleet.decode_url) as decode_client,
        OpenAIClient(f"http://{metrics}") as metrics_client,
    ):
        yield Engines(prefill_client, decode_client, metrics_client)


@pytest.mark.parametrize("local", [0, BLOCK_TOKENS, 64, 320, 512, 896, 928])
@pytest.mark.matrix(
    group="A prompt borrows",
    condition="part of the prompt is in the own cache",
    lent="-",
    reused="the missing middle, by position",
    freed="-",
    recomputed="new tokens",
)
async def test_only_the_missing_middle_is_read(engines: Engines, local: int) -> None:
    salt, conversation = secrets.token_hex(8), secrets.token_hex(8)
    prompt = ids(PROMPT_TOKENS, seed=local)
    await engines.decode.complete(
        prompt,
        max_tokens=2,
        logprobs=False,
        cache_salt=salt,
        ignore_eos=True,
        kv_transfer_params={"kvlease": {"conversation": conversation}},
    )
    await asyncio.sleep(PAUSE_S)
    if local:
        await engines.prefill.complete(prompt[: local + 1], max_tokens=1, logprobs=False, cache_salt=salt)
    before = await engines.bytes_read()
    answer = await engines.ask(prompt, conversation, salt)
    lent = strides(PROMPT_TOKENS)
    missing = lent - local if lent - local >= THRESHOLD else 0
    assert await engines.bytes_read() - before == missing * KV_BYTES_PER_TOKEN
    assert answer.cached_tokens == local + missing
    reference = await recompute(engines.prefill, prompt, max_tokens=1)
    assert_same(answer, reference, f"with {local} tokens of its own")
    again = await engines.ask(prompt, conversation, salt)
    assert again.cached_tokens == (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS, "its own cache has it all now"
    assert_same(again, reference, "from its own cache, afterwards")
