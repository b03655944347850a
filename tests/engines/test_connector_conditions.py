"""What changes under a lease on real engines: its time while a turn waits, its weights, its adapter.

One fleet: heartbeat leases of four seconds on the decode engine, a prefill engine that computes one request at a time.
Every answer is compared with recomputation. The file's last test changes the weights of both engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from kvlease.registry.client import RegistryClient
from kvlease.registry.errors import LenderSilent
from kvlease.registry.values import DEFAULT_TENANT, ConversationId, RenewStatus

from tests.engines.adapter import write_adapter
from tests.engines.chat import Turn, Turns, ids
from tests.engines.engine import Json
from tests.engines.fleet import Fleet, FleetSettings, one_prefill_one_decode
from tests.engines.openai_client import OpenAIClient

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

TTL_MS = 4_000
QUEUED_S = 1.5 * TTL_MS / 1000
"""How long a turn waits in the prefill engine's queue: well past its lease's time."""


class Bench:
    def __init__(self, prefill: OpenAIClient, decode: OpenAIClient, registry: RegistryClient, adapter: Path) -> None:
        self.prefill = prefill
        self.decode = decode
        self.registry = registry
        self.adapter = adapter

    async def reused(self, turn: Callable[[], Awaitable[Turn]], wanted: bool) -> Turn:
        """The turn, once its reuse is as wanted: leases and digests of adapters are made known a moment later."""
        for _ in range(10):
            done = await turn()
            if (done.reused > 0) is wanted:
                return done
            await asyncio.sleep(0.3)
        pytest.fail(f"reused {done.reused} tokens of {len(done.prompt)}")

    async def post(self, engine: OpenAIClient, path: str, body: dict[str, Json]) -> None:
        status, text = await engine.send(path, body)
        assert status == 200, text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "a", seed=1)
    settings: dict[str, Json] = {
        "resolve_wait_ms": 5_000,
        "mode": "heartbeat",
        "lease_ttl_ms": TTL_MS,
        "on_deadline": "end",
    }
    prefill, decode = one_prefill_one_decode(kvlease=settings, prefill_prefix_caching=False)
    flags = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"a={adapter}")
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    engines = [
        dataclasses.replace(prefill, arguments=(*flags, "--max-num-seqs", "1"), env=env),
        dataclasses.replace(decode, arguments=flags, env=env),
    ]
    async with Fleet(FleetSettings(engines=engines, router=False)) as fleet:
        assert fleet.registry_endpoint is not None
        async with (
            OpenAIClient(fleet.prefill_url) as prefill_client,
            OpenAIClient(fleet.decode_url) as decode_client,
            RegistryClient(fleet.registry_endpoint) as registry,
        ):
            yield Bench(prefill_client, decode_client, registry, adapter)


async def renewing(bench: Bench, turns: Turns) -> object:
    """What a router or an operator does while a conversation is alive, until a turn that reads it supersedes it."""
    while True:
        located = await bench.registry.locate(DEFAULT_TENANT, conversation=ConversationId(turns.conversation))
        if located.lease is not None:
            with contextlib.suppress(LenderSilent):  # three busy engines on few cores; a router asks again, too
                renewed = await bench.registry.renew(DEFAULT_TENANT, located.lease.lease_id)
                assert renewed.status in (RenewStatus.RENEWED, RenewStatus.ENDED)
        await asyncio.sleep(TTL_MS / 4_000)


async def occupy(engine: OpenAIClient) -> object:
    """A request that runs until it is cancelled."""
    return await engine.complete(ids(64, seed=1), max_tokens=10_000, ignore_eos=True)


@pytest.mark.parametrize(("renewed", "busy"), [(True, False), (True, True), (False, True)])
@pytest.mark.matrix(
    group="Time passes",
    condition="a turn waits past its lease's time, with and without renewal",
    lent="-",
    reused="if somebody renews, also from an idle lender",
    freed="at the deadline otherwise",
    recomputed="otherwise",
)
async def test_a_turn_that_waits_past_its_leases_time(bench: Bench, renewed: bool, busy: bool) -> None:
    """T4: reuse if somebody renews, whether or not the lender takes steps meanwhile; else recomputation, no error."""
    turns = Turns(bench.prefill, bench.decode)
    first = await turns.turn(ids(640, seed=10 + 2 * renewed + busy))
    working = [occupy(bench.prefill)]
    if renewed:
        working.append(renewing(bench, turns))
    if busy:
        working.append(occupy(bench.decode))
    meanwhile = [asyncio.create_task(work) for work in working]
    await asyncio.sleep(0.3)
    waiting = asyncio.create_task(turns.turn([*first.history, *ids(20, seed=2)]))
    await asyncio.sleep(QUEUED_S)
    assert not waiting.done()
    meanwhile[0].cancel()
    second = await waiting
    for task in meanwhile:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert second.reused == (first.lent if renewed else 0)
    await turns.check(second, "after the queue")


@pytest.mark.matrix(
    group="Something changes under a lease",
    condition="adapter reloaded in place with other weights",
    lent="after a reset",
    reused="nothing of before",
    freed="-",
    recomputed="all",
)
async def test_adapters_share_kv_with_the_same_bytes_only(bench: Bench) -> None:
    """R4: adapter, then the base model, then the adapter again; then its weights change in place."""

    def turn(turns: Turns, prompt: list[int], model: str | None) -> Callable[[], Awaitable[Turn]]:
        return lambda: turns.turn(prompt, fields={"model": model} if model else None)

    async def check(turn: Turn, model: str | None) -> None:
        engine = OpenAIClient(bench.prefill.url, model=model or bench.prefill.model)
        async with engine:
            await Turns(engine, bench.decode).check(turn, f"model {model}")

    turns = Turns(bench.prefill, bench.decode)
    prompt = ids(640, seed=20)
    await turn(turns, prompt, "a")()
    with_adapter = await bench.reused(turn(turns, prompt, "a"), wanted=True)
    await check(with_adapter, "a")
    base = await turn(turns, prompt, None)()
    assert base.reused == 0
    await check(base, None)
    assert base.answer.logprobs != with_adapter.answer.logprobs, "the adapter does nothing"

    write_adapter(bench.adapter, seed=2)
    for engine in (bench.prefill, bench.decode):
        await bench.post(
            engine, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(bench.adapter), "load_inplace": True}
        )
    reloaded = await turn(turns, prompt, "a")()
    assert reloaded.reused == 0
    for engine in (bench.prefill, bench.decode):
        await bench.post(engine, "/reset_prefix_cache", {})
    await turn(turns, prompt, "a")()
    renewed = await bench.reused(turn(turns, prompt, "a"), wanted=True)
    await check(renewed, "a")
    assert renewed.answer.logprobs != with_adapter.answer.logprobs, "its weights are others"


@pytest.mark.matrix(
    group="Something changes under a lease",
    condition="weights reloaded",
    lent="nothing until they have a name",
    reused="nothing; again between engines of the same name",
    freed="all leases, before a worker hears of it",
    recomputed="all",
)
async def test_weights_that_change_end_leases_and_are_shared_again_by_name(bench: Bench) -> None:
    """R7: the decode engine reloads its weights. Last in this file."""
    turns = Turns(bench.prefill, bench.decode)
    first = await turns.turn(ids(640, seed=30))
    prompt = [*first.history, *ids(20, seed=31)]
    reload: dict[str, Json] = {"method": "reload_weights"}
    await bench.post(bench.decode, "/collective_rpc", reload)
    located = await bench.registry.locate(DEFAULT_TENANT, conversation=ConversationId(turns.conversation))
    assert located.lease is None
    second = await turns.turn(prompt)
    assert second.reused == 0
    await turns.check(second, "after a reload")
    third = await turns.turn(prompt)
    assert third.reused == 0, "weights without a name are nobody's"
    await bench.post(bench.prefill, "/collective_rpc", reload)
    for engine in (bench.prefill, bench.decode):
        await bench.post(engine, "/reset_prefix_cache", {})
        await bench.post(engine, "/update_weight_version", {"new_version": "step-17"})
    await turns.turn(prompt)
    again = await bench.reused(lambda: turns.turn(prompt), wanted=True)
    await turns.check(again, "with named weights")
