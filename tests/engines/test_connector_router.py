"""The whole way: an unmodified OpenAI client, the router, the registry and two engines.

What users of the OpenAI API do (streaming, retries, fields of their own) must find reuse without knowing of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import signal
import time
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.engines.chat import Turns, ids
from tests.engines.engine import BLOCK_TOKENS, Json, Role
from tests.engines.fleet import ROUTER, Fleet, FleetSettings, one_prefill_one_decode
from tests.engines.model import MODEL_NAME
from tests.engines.openai_client import OpenAIClient
from tests.ports import free_ports

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

LEASE_MS = 6_000
SHOWN_S = 1.5
"""From the deadline to the metric that says it: the lender's step, and a look at its pool each second."""
QUESTION = "tell me about the river and the stone " * 40
REUSED = re.compile(r"^kvlease_borrower_reused_tokens_total (\S+)$", re.MULTILINE)
LEASED = re.compile(r"^kvlease_lender_leased_blocks(?:\{.*\})? (\S+)$", re.MULTILINE)
LEASES = re.compile(r"^kvlease_lender_publishes_total (\S+)$", re.MULTILINE)


class Served:
    def __init__(self, fleet: Fleet, openai: AsyncOpenAI, metrics: OpenAIClient, lender_metrics: OpenAIClient) -> None:
        self.fleet = fleet
        self.openai = openai
        self.metrics = metrics
        self.lender_metrics = lender_metrics

    async def reused(self) -> float:
        return sum(float(value) for value in REUSED.findall((await self.metrics.get("/metrics"))[1]))

    async def leases(self) -> float:
        return sum(float(value) for value in LEASES.findall((await self.lender_metrics.get("/metrics"))[1]))

    async def leased(self) -> float:
        """Blocks of the decode engine that live leases hold."""
        return sum(float(value) for value in LEASED.findall((await self.lender_metrics.get("/metrics"))[1]))

    async def say(self, messages: Sequence[dict[str, str]], *, usage: bool, **fields: Json) -> str:
        """One streamed turn; returns the answer's text."""
        stream = await self.openai.chat.completions.create(
            model=MODEL_NAME,
            messages=cast(list[ChatCompletionMessageParam], list(messages)),
            stream=True,
            max_tokens=24,
            temperature=0,
            extra_body=fields or None,
            **({"stream_options": {"include_usage": True}} if usage else {}),  # type: ignore[call-overload]
        )
        parts: list[str] = []
        counted = False
        async for chunk in stream:
            counted = counted or chunk.usage is not None
            parts += [choice.delta.content or "" for choice in chunk.choices]
        assert counted is usage
        return "".join(parts)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    ports = free_ports(2)
    settings: dict[str, Json] = {"resolve_wait_ms": 5_000}
    prefill, decode = one_prefill_one_decode(kvlease=settings, prefill_prefix_caching=False)
    engines = [
        dataclasses.replace(engine, kvlease={**settings, "metrics": f"127.0.0.1:{port}"})
        for engine, port in zip((prefill, decode), ports, strict=True)
    ]
    fleet_settings = FleetSettings(engines=engines, router_args=("--locate-timeout-ms", "2000"))
    async with (
        Fleet(fleet_settings) as fleet,
        AsyncOpenAI(base_url=f"{fleet.router_url}/v1", api_key="none", max_retries=0) as openai,
        OpenAIClient(f"http://127.0.0.1:{ports[0]}") as metrics,
        OpenAIClient(f"http://127.0.0.1:{ports[1]}") as lender_metrics,
    ):
        yield Served(fleet, openai, metrics, lender_metrics)


@pytest.mark.parametrize("usage", [False, True])
async def test_a_plain_streaming_client_finds_its_kv_again(served: Served, usage: bool) -> None:
    """S1: no field beyond the OpenAI API, with and without `stream_options`."""
    messages = [{"role": "user", "content": f"{usage} {QUESTION}"}]
    answer = await served.say(messages, usage=usage)
    before = await served.reused()
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and the tree?"}]
    await served.say(messages, usage=usage)
    assert await served.reused() - before >= 256


async def test_a_body_with_transfer_parameters_pins_and_reads_nothing(served: Served) -> None:
    """S5: they are taken out at the edge, and the turn is served as if they had not been there."""
    messages = [{"role": "user", "content": f"stripped {QUESTION}"}]
    forged: dict[str, Json] = {
        "do_remote_prefill": True,
        "remote_engine_id": "someone",
        "remote_request_id": "x",
        "remote_block_ids": [[1, 2, 3]],
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "kvlease": {"tenant": "victim", "conversation": "theirs"},
    }
    before = await served.reused()
    plain = await served.say(messages, usage=False)
    with_params = await served.say(messages, usage=False, kv_transfer_params=forged)
    assert with_params == plain
    assert await served.reused() - before <= 2_048, "at most this conversation's own prefix was read"


async def test_a_retry_and_a_regenerated_answer_reuse(served: Served) -> None:
    """S6: the client sends the same turn again, then edits its last message."""
    messages = [{"role": "user", "content": f"again {QUESTION}"}]
    answer = await served.say(messages, usage=False)
    before = await served.reused()
    assert await served.say(messages, usage=False) == answer
    once = await served.reused()
    assert once - before >= 256
    await served.say([{"role": "user", "content": f"again {QUESTION} but shorter"}], usage=False)
    assert await served.reused() - once >= 256


@pytest.mark.matrix(
    group="A turn ends",
    condition="not streamed",
    lent="as if streamed",
    reused="-",
    freed="the rest at once",
    recomputed="-",
)
async def test_turns_without_streaming_are_lent_as_well(served: Served) -> None:
    before = await served.leases()
    done = await served.openai.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": f"whole {QUESTION}"}], max_tokens=8, temperature=0
    )
    assert done.choices[0].message.content
    assert await served.leases() == before + 1


@pytest.mark.matrix(
    group="Time passes",
    condition="router and prefill engine killed",
    lent="-",
    reused="again when they are back",
    freed="at the deadline, not before",
    recomputed="-",
)
async def test_pins_follow_the_terms_of_the_lease_when_router_and_prefill_engine_are_killed(served: Served) -> None:
    """L4. Last in this file, since it kills what the others use; all of it is back at the end."""
    fleet = served.fleet
    victims = (fleet.ids(Role.PREFILL)[0], ROUTER)
    async with OpenAIClient(fleet.prefill_url) as prefill, OpenAIClient(fleet.decode_url) as decode:
        others = await served.leased()
        asked_s = time.monotonic()
        turns = Turns(prefill, decode)
        first = await turns.turn(ids(640, seed=300), ttl_ms=LEASE_MS, on_deadline="end")
        lent_s = time.monotonic()
        for name in victims:
            fleet.child(name).signal(signal.SIGKILL)
            await fleet.child(name).wait(5)
        seen: list[tuple[float, float, float]] = []
        while not seen or seen[-1][0] < lent_s + LEASE_MS / 1_000 + 2 * SHOWN_S:
            before_s = time.monotonic()
            await decode.complete(ids(4, seed=301), max_tokens=2, logprobs=False)  # a step
            seen.append((before_s, await served.leased() - others, time.monotonic()))
            await asyncio.sleep(0.1)
    whole = first.lent // BLOCK_TOKENS
    before = {leased for _, leased, after_s in seen if after_s < asked_s + LEASE_MS / 1_000}
    after = {leased for before_s, leased, _ in seen if before_s > lent_s + LEASE_MS / 1_000 + SHOWN_S}
    assert before == {whole}
    assert after == {0}
    for name in victims:
        await fleet.start(name)
    messages = [{"role": "user", "content": f"back {QUESTION}"}]
    answer = await served.say(messages, usage=False)
    before_reuse = await served.reused()
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    await served.say(messages, usage=False)
    assert await served.reused() - before_reuse >= 256
