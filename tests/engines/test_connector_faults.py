"""What real engines do when a lender is stopped, killed or restarted, or a client leaves: right answers, nothing kept.

After each fault the answer equals recomputation, and once leases are over both pools are as empty as before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from kvlease.registry.client import RegistryClient
from kvlease.registry.values import DEFAULT_TENANT, ConversationId

from tests.engines.chat import Turn, Turns, ids
from tests.engines.engine import Role
from tests.engines.fleet import Fleet, FleetSettings, one_prefill_one_decode
from tests.engines.openai_client import OpenAIClient
from tests.ports import free_ports

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

READ_LIMIT_MS = 1_500
HOLD_MS = 700
"""From a READ's decision to its start, where a test wants to be between the two."""
USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", re.MULTILINE)


class Bench:
    """The fleet, its clients and what it counts."""

    def __init__(self, fleet: Fleet, prefill: OpenAIClient, decode: OpenAIClient, metrics: OpenAIClient) -> None:
        self.fleet = fleet
        self.prefill = prefill
        self.decode = decode
        self.metrics = metrics

    @property
    def lender(self) -> str:
        return self.fleet.ids(Role.DECODE)[0]

    def signal_lender(self, number: signal.Signals) -> None:
        os.killpg(os.getpgid(self.fleet.child(self.lender).pid), number)

    async def count(self, name: str) -> float:
        _, text = await self.metrics.get("/metrics")
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"{re.escape(name)}( |$)", line)
        )

    async def misses(self, reason: str) -> float:
        return await self.count(f'kvlease_borrower_misses_total{{reason="{reason}"}}')

    async def settle(self, turns: Turns) -> None:
        """Ends the conversation's leases, then expects empty pools."""
        endpoint = self.fleet.registry_endpoint
        assert endpoint is not None
        async with RegistryClient(endpoint) as client:
            await client.end_conversation(DEFAULT_TENANT, ConversationId(turns.conversation))
        await self.emptied(self.prefill, self.decode)

    async def emptied(self, *engines: OpenAIClient) -> None:
        """Lets engines take steps until all their blocks are free."""
        usage: list[float] = []
        for _ in range(40):
            usage = []
            for engine in engines:
                await engine.complete(ids(4, seed=1), max_tokens=2, logprobs=False)
                _, text = await engine.get("/metrics")
                usage += [float(value) for value in USAGE.findall(text)]
            if not any(usage):
                return
            await asyncio.sleep(1)  # a prefill that nobody fetches is kept for stock's own 30 s
        pytest.fail(f"blocks are still held: {usage}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    metrics = f"127.0.0.1:{free_ports(1)[0]}"
    settings = {"resolve_wait_ms": 5_000, "read_limit_ms": READ_LIMIT_MS}
    prefill, decode = one_prefill_one_decode(kvlease=settings, prefill_prefix_caching=False)
    prefill = dataclasses.replace(prefill, kvlease={**settings, "metrics": metrics})
    # Over shared memory a READ needs nothing of the lender's process, not even that it runs.
    engines = [
        dataclasses.replace(e, connector_module="tests.engines.faulty", transports="tcp,self")
        for e in (prefill, decode)
    ]
    async with (
        Fleet(FleetSettings(engines=engines, router=False)) as fleet,
        OpenAIClient(fleet.prefill_url) as prefill_client,
        OpenAIClient(fleet.decode_url) as decode_client,
        OpenAIClient(f"http://{metrics}") as metrics_client,
    ):
        yield Bench(fleet, prefill_client, decode_client, metrics_client)


async def first_turn(bench: Bench, seed: int) -> tuple[Turns, Turn]:
    turns = Turns(bench.prefill, bench.decode)
    return turns, await turns.turn(ids(640, seed=seed))


async def borrow(turns: Turns, first: Turn, hold_ms: int = 0) -> float:
    """The next turn's prefill leg alone; the largest difference of its log-probs from recomputation."""
    prompt = [*first.history, *ids(20, seed=5)]
    answer = await turns.prefill.complete(
        prompt,
        max_tokens=1,
        return_tokens_as_token_ids=True,
        ignore_eos=True,
        kv_transfer_params={"kvlease": {"conversation": turns.conversation}, "fault": {"hold_ms": hold_ms}},
    )
    reference = await turns.recompute(prompt, max_tokens=1)
    assert answer.tokens == reference.tokens
    return max(abs(a - b) for a, b in zip(answer.logprobs, reference.logprobs, strict=True))


@pytest.mark.matrix(
    group="A borrow fails",
    condition="lender stopped during the READ",
    lent="-",
    reused="nothing; again when it goes on",
    freed="after the late READ",
    recomputed="all",
)
async def test_a_stopped_lender_costs_a_prefill_and_its_late_read_is_kept_apart(bench: Bench) -> None:
    turns, first = await first_turn(bench, seed=100)
    assert await borrow(turns, first) < 1e-4
    timeouts = await bench.misses("read_timeout")
    reading = asyncio.create_task(borrow(turns, first, hold_ms=HOLD_MS))
    await asyncio.sleep(HOLD_MS / 2_000)  # decided, not read yet
    bench.signal_lender(signal.SIGSTOP)
    try:
        assert await reading < 1e-4
    finally:
        bench.signal_lender(signal.SIGCONT)
    assert await bench.misses("read_timeout") == timeouts + 1
    assert await borrow(turns, first) < 1e-4
    await bench.settle(turns)
    assert await bench.count("kvlease_borrower_quarantined_blocks") == 0


@pytest.mark.matrix(
    group="A borrow fails",
    condition="the client leaves during the READ",
    lent="-",
    reused="-",
    freed="all",
    recomputed="-",
)
async def test_a_client_that_leaves_during_a_read_leaves_nothing_behind(bench: Bench) -> None:
    """L2, L6: the request is aborted while its blocks are being written."""
    turns, first = await first_turn(bench, seed=110)
    for hold_ms in (0, 300):
        reading = asyncio.create_task(borrow(turns, first, hold_ms=hold_ms))
        await asyncio.sleep(0.1)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert await borrow(turns, first) < 1e-4
    await bench.settle(turns)


@pytest.mark.matrix(
    group="A turn ends",
    condition="the client leaves while the engine decodes",
    lent="what was computed",
    reused="the next turn",
    freed="the rest at once",
    recomputed="-",
)
async def test_a_client_that_leaves_the_decode_engine_still_leaves_its_lease(bench: Bench) -> None:
    """An aborted turn lends what was computed: the next turn reads it."""
    turns, first = await first_turn(bench, seed=120)
    prompt = [*first.history, *ids(200, seed=121)]
    leaving = asyncio.create_task(turns.turn(prompt, max_tokens=2_000))
    await asyncio.sleep(3)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    for _ in range(20):
        turn = await turns.turn([*prompt, *ids(30, seed=122)])
        await turns.check(turn, "after an abort")
        if turn.reused > first.lent:
            break
    else:
        pytest.fail("the aborted turn's KV was not lent")
    await bench.settle(turns)


@pytest.mark.matrix(
    group="A borrow fails",
    condition="lender killed during the READ, then restarted under its id",
    lent="by the new incarnation",
    reused="nothing; new leases afterwards",
    freed="all",
    recomputed="all",
)
async def test_a_lender_killed_during_a_read_costs_a_prefill_and_a_restarted_one_lends_again(bench: Bench) -> None:
    """L2, H2: two READs are under way, and one client leaves; then the same engine id, another incarnation.

    Last in this file: it replaces the engine.
    """
    turns, first = await first_turn(bench, seed=130)
    assert await borrow(turns, first) < 1e-4
    proven = await bench.count("kvlease_borrower_borrows_total")
    reading, leaving = (asyncio.create_task(borrow(turns, first, hold_ms=HOLD_MS)) for _ in range(2))
    await asyncio.sleep(HOLD_MS / 2_000)  # decided, not read yet
    bench.signal_lender(signal.SIGSTOP)
    await asyncio.sleep(HOLD_MS / 1_000)  # read, but nobody sends the bytes
    bench.signal_lender(signal.SIGKILL)
    await bench.fleet.child(bench.lender).wait(10)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert await reading < 1e-4
    await bench.emptied(bench.prefill)
    assert await bench.count("kvlease_borrower_borrows_total") == proven
    assert await bench.count("kvlease_borrower_quarantined_blocks") == 0
    assert await borrow(turns, first) < 1e-4
    await bench.fleet.start(bench.lender)
    second = await turns.turn(first.history)
    await turns.check(second, "the first turn on the restarted lender")
    for _ in range(5):
        third = await turns.turn([*second.history, *ids(10, seed=131)])
        await turns.check(third, "after the restart")
        if third.reused == second.lent:
            break
        second = third
    else:
        pytest.fail("the restarted lender's leases are not used")
