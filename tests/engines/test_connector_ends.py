"""Every way a turn can end on a real decode engine: what is lent, what is freed at once, and what goes on working.

Turns go straight to the decode engine, which computes them itself: how they were prefilled has files of its own.
The last test ends the engine by SIGTERM with a thousand leases out (H3).
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import signal
import time
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from kvlease.registry.client import RegistryClient
from kvlease.registry.values import DEFAULT_TENANT, ConversationId, LeaseView

from tests.engines.chat import STRIDE, Turns, ids, strides, token_ids
from tests.engines.engine import Json, Role
from tests.engines.fleet import Fleet, FleetSettings, one_prefill_one_decode
from tests.engines.openai_client import OpenAIClient, RefusedTurn
from tests.ports import free_ports

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", re.MULTILINE)
WAIT_S = 20.0
EXIT_S = 20.0
"""Of it, vLLM's own teardown takes 3-4 s of an idle machine, and is cut short by its parent after 5."""
MANY = 1_000


class Bench:
    def __init__(self, fleet: Fleet, prefill: OpenAIClient, decode: OpenAIClient, registry: RegistryClient) -> None:
        self.fleet = fleet
        self.prefill = prefill
        self.decode = decode
        self.registry = registry

    async def leases(self, conversation: str | None = None) -> list[LeaseView]:
        leases = (await self.registry.list_leases()).leases
        return [lease for lease in leases if conversation in (None, lease.conversation)]

    async def lent(self, conversation: str | None, count: int) -> list[LeaseView]:
        """The conversation's leases, or all there are, once there are so many."""
        found: list[LeaseView] = []
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            found = await self.leases(conversation)
            if len(found) == count:
                return found
            await asyncio.sleep(0.05)
        pytest.fail(f"{len(found)} leases, not {count}")

    async def all_free(self) -> None:
        """Ends every lease; every block is free then."""
        for lease in await self.leases():
            await self.registry.end_lease(DEFAULT_TENANT, lease.lease_id)
        usage: list[float] = []
        for _ in range(20):
            await self.decode.complete(ids(4, seed=1), max_tokens=2, logprobs=False)
            usage = [float(value) for value in USAGE.findall((await self.decode.get("/metrics"))[1])]
            if not any(usage):
                return
            await asyncio.sleep(0.1)
        pytest.fail(f"blocks are held though nothing uses them: {usage}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    settings: dict[str, Json] = {"resolve_wait_ms": 5_000}
    prefill, decode = one_prefill_one_decode(kvlease=settings, prefill_prefix_caching=False, shutdown_timeout_s=30)
    decode = dataclasses.replace(
        decode, kvlease={**settings, "metrics": f"127.0.0.1:{free_ports(1)[0]}"}, arguments=("--max-num-seqs", "64")
    )
    async with Fleet(FleetSettings(engines=[prefill, decode], router=False)) as fleet:
        assert fleet.registry_endpoint is not None
        async with (
            OpenAIClient(fleet.prefill_url) as prefill_client,
            OpenAIClient(fleet.decode_url) as decode_client,
            RegistryClient(fleet.registry_endpoint) as registry,
        ):
            yield Bench(fleet, prefill_client, decode_client, registry)


def told(conversation: str) -> dict[str, Json]:
    return {"kvlease": {"conversation": conversation}}


@pytest.mark.matrix(
    group="A turn ends",
    condition="length",
    lent="whole strides of all but the last token",
    reused="-",
    freed="the rest at once",
    recomputed="-",
)
async def test_a_turn_that_runs_to_its_length_is_lent_whole(bench: Bench) -> None:
    prompt = ids(200, seed=1)
    await bench.decode.complete(prompt, max_tokens=80, ignore_eos=True, kv_transfer_params=told("length"))
    [lease] = await bench.lent("length", 1)
    assert lease.tokens == strides(200 + 80 - 1)
    await bench.all_free()


@pytest.mark.parametrize("by", ["token", "string"])
@pytest.mark.matrix(
    group="A turn ends",
    condition="stop token, stop string (the engine sees an abort)",
    lent="whole strides up to the stop",
    reused="-",
    freed="the rest at once",
    recomputed="-",
)
async def test_a_turn_that_stops_is_lent_up_to_there(bench: Bench, by: str) -> None:
    """S3: at a stop string the engine sees an abort."""
    prompt = ids(200, seed=2)
    whole = await bench.decode.complete(prompt, max_tokens=80, ignore_eos=True, return_tokens_as_token_ids=True)
    written = token_ids(whole)
    at = next(n for n in range(40, 80) if written[n] not in written[:n])
    if by == "token":
        stop: tuple[list[Json], list[Json]] = ([written[at]], [])
    else:
        word = (await bench.decode.complete(prompt, max_tokens=at + 1, ignore_eos=True)).tokens[at]
        stop = ([], [word])
    stopped = await bench.decode.complete(
        prompt,
        max_tokens=80,
        ignore_eos=True,
        stop_token_ids=stop[0],
        stop=stop[1],
        kv_transfer_params=told(f"stop-{by}"),
    )
    assert stopped.finish_reason == "stop"
    [lease] = await bench.lent(f"stop-{by}", 1)
    assert strides(200 + at - 1) <= lease.tokens <= strides(200 + at + 1)
    await bench.all_free()


@pytest.mark.matrix(
    group="A turn ends",
    condition="n = 4, many requests",
    lent="each branch that differs",
    reused="-",
    freed="the rest at once; all when leases end",
    recomputed="-",
)
async def test_each_branch_is_lent_and_all_of_it_is_freed(bench: Bench) -> None:
    """L1: n=4, fifty requests; the engine goes on serving."""
    count = 50

    async def four(number: int) -> None:
        await bench.decode.complete(
            ids(100, seed=100 + number),
            max_tokens=40,
            n=4,
            temperature=1,
            seed=7,
            ignore_eos=True,
            kv_transfer_params=told(f"n-{number}"),
        )

    await asyncio.gather(*map(four, range(count)))
    counts = [len(await bench.leases(f"n-{number}")) for number in range(count)]
    assert all(1 <= leases <= 4 for leases in counts)
    assert sum(counts) > count, "branches that differ are leases of their own"
    await bench.all_free()


@pytest.mark.matrix(
    group="A turn ends",
    condition="a list of prompts in one request",
    lent="each prompt",
    reused="-",
    freed="the rest at once",
    recomputed="-",
)
async def test_each_prompt_of_a_list_is_lent(bench: Bench) -> None:
    prompts: Sequence[Json] = [list(ids(70, seed=200 + number)) for number in range(3)]
    body: dict[str, Json] = {"prompt": list(prompts), "max_tokens": 4, "kv_transfer_params": told("list")}
    await bench.decode.post("/v1/completions", body)
    assert {lease.tokens for lease in await bench.lent("list", 3)} == {STRIDE}
    await bench.all_free()


@pytest.mark.parametrize(
    "refused",
    [
        {"prompt": list(range(100, 300)) * 100},
        {"model": "no-such-model", "prompt": [100, 101]},
        {"prompt": [100, 101], "temperature": -1},
    ],
    ids=["too-long", "unknown-model", "bad-parameter"],
)
@pytest.mark.matrix(
    group="A turn ends",
    condition="refused before it runs: too long, unknown model, bad parameter",
    lent="nothing; the earlier lease stays",
    reused="the next valid turn, all of it",
    freed="nothing was taken",
    recomputed="-",
)
async def test_a_turn_that_is_refused_leaves_its_conversations_lease_usable(
    bench: Bench, refused: dict[str, Json]
) -> None:
    """L3: the second turn is rejected before it runs, at both engines."""
    turns = Turns(bench.prefill, bench.decode)
    first = await turns.turn(ids(300, seed=5))
    for engine in (bench.prefill, bench.decode):
        with pytest.raises(RefusedTurn):
            await engine.post(
                "/v1/completions", {"max_tokens": 4, **refused, "kv_transfer_params": told(turns.conversation)}
            )
    again = await turns.turn([*first.history, *ids(20, seed=6)])
    assert again.reused == first.lent
    await turns.check(again, "after a refused turn")
    await bench.all_free()


@pytest.mark.matrix(
    group="A turn ends",
    condition="the conversation is closed",
    lent="-",
    reused="nothing any more",
    freed="all, in the next step",
    recomputed="the next turn",
)
async def test_a_conversation_that_is_closed_gives_its_blocks_back(bench: Bench) -> None:
    await bench.decode.complete(ids(200, seed=8), max_tokens=4, kv_transfer_params=told("closed"))
    await bench.lent("closed", 1)
    assert await bench.registry.end_conversation(DEFAULT_TENANT, ConversationId("closed")) == 1
    assert await bench.leases("closed") == []
    await bench.all_free()


@pytest.mark.matrix(
    group="The engine",
    condition="SIGTERM with 1 000 leases and a shutdown time-out",
    lent="nothing any more",
    reused="nothing",
    freed="all leases first; kvlease adds no more than 1 s to the exit",
    recomputed="the next turns",
)
async def test_an_engine_that_is_terminated_with_a_thousand_leases_ends_them_and_exits(bench: Bench) -> None:
    """H3, with a shutdown time-out. Last in this file."""
    body: dict[str, Json] = {"max_tokens": 1, "kv_transfer_params": {"kvlease": {}}}
    for start in range(0, MANY, 250):
        prompts: Sequence[Json] = [list(ids(66, seed=10_000 + start + number)) for number in range(250)]
        await bench.decode.post("/v1/completions", {"prompt": list(prompts), **body})
    await bench.lent(None, MANY)
    child = bench.fleet.child(bench.fleet.ids(Role.DECODE)[0])
    began = time.monotonic()
    child.signal(signal.SIGTERM)
    await child.wait(EXIT_S)
    assert time.monotonic() - began < EXIT_S
    await bench.lent(None, 0)
