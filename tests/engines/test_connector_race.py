"""The decode engine reuses the blocks of short leases while the prefill engine reads them: no wrong KV is ever used.

Every prompt of a small set is lent again and again (its blocks are reused by the others all the time) and borrowed with
a random delay between decision and READ. The answer's log-prob must be what computing gives; some READs must have been
refused, or nothing was tried. Then three guarantees are taken away one at a time, and each time an answer turns wrong:
that is what makes the clean run mean something. KVLEASE_RACE_TURNS sets how many turns are raced.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import re
from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest
import pytest_asyncio

from tests.engines import faulty
from tests.engines.chat import ids, recompute
from tests.engines.engine import Json
from tests.engines.fleet import Fleet, FleetSettings, one_prefill_one_decode
from tests.engines.logprobs import TOLERANCE, largest_difference
from tests.engines.openai_client import Answer, OpenAIClient
from tests.ports import free_ports

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1_500)]

TURNS = int(os.environ.get("KVLEASE_RACE_TURNS", "60"))
PROMPTS = 10
PROMPT_TOKENS = 800
POOL_BLOCKS = 160
SUFFIX = [101, 102, 103]
MISS = re.compile(r'^kvlease_borrower_misses_total\{reason="(\w+)"\} (\S+)$', re.MULTILINE)
USED = re.compile(r"^kvlease_borrower_borrows_total (\S+)$", re.MULTILINE)


Fault = Mapping[str, Json]
NO_FAULT: Fault = {}


class Race:
    """The two engines, the references, and what the prefill engine counts."""

    def __init__(self, prefill: OpenAIClient, decode: OpenAIClient, metrics_url: str) -> None:
        self.prefill = prefill
        self.decode = decode
        self.metrics_url = metrics_url
        self.references: dict[int, Answer] = {}
        self.floods = 0

    def prompt(self, number: int) -> list[int]:
        return ids(PROMPT_TOKENS, seed=1_000 + number)

    async def reference(self, number: int) -> Answer:
        if number not in self.references:
            self.references[number] = await recompute(self.prefill, self.prompt(number) + SUFFIX, max_tokens=1)
        return self.references[number]

    async def lend(self, prompt: list[int], conversation: str, fault: Fault = NO_FAULT) -> None:
        params: dict[str, Json] = {"kvlease": {"conversation": conversation, "ttl_ms": 0}, "fault": fault}
        await self.decode.complete(prompt, max_tokens=2, logprobs=False, ignore_eos=True, kv_transfer_params=params)

    async def borrow(self, prompt: list[int], conversation: str, fault: Fault = NO_FAULT) -> Answer:
        params: dict[str, Json] = {"kvlease": {"conversation": conversation}, "fault": fault}
        return await self.prefill.complete(
            prompt + SUFFIX,
            max_tokens=1,
            return_tokens_as_token_ids=True,
            ignore_eos=True,
            kv_transfer_params=params,
        )

    async def flood(self) -> None:
        """Hands out every block of the decode engine's pool once, to prompts that it has not seen."""
        for _ in range(2 + POOL_BLOCKS * 32 // PROMPT_TOKENS):
            self.floods += 1
            await self.decode.complete(ids(PROMPT_TOKENS, seed=-self.floods), max_tokens=1, logprobs=False)

    async def difference(self, number: int, answer: Answer) -> float:
        return largest_difference(answer, await self.reference(number))

    async def counts(self) -> dict[str, float]:
        """READs used, and misses by reason."""
        async with aiohttp.ClientSession() as session, session.get(self.metrics_url) as response:
            text = await response.text()
        found = {reason: float(count) for reason, count in MISS.findall(text)}
        return {**found, "used": sum(float(count) for count in USED.findall(text))}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def race() -> AsyncIterator[Race]:
    metrics = f"127.0.0.1:{free_ports(1)[0]}"
    settings: dict[str, Json] = {"resolve_wait_ms": 5_000, "read_limit_ms": 20_000}
    prefill, decode = one_prefill_one_decode(kvlease=settings, prefill_prefix_caching=False)
    prefill = dataclasses.replace(prefill, kvlease={**settings, "metrics": metrics})
    decode = dataclasses.replace(decode, kv_blocks=POOL_BLOCKS, max_model_len=4_096)
    engines = [dataclasses.replace(engine, connector_module=faulty.__name__) for engine in (prefill, decode)]
    async with (
        Fleet(FleetSettings(engines=engines, router=False)) as fleet,
        OpenAIClient(fleet.prefill_url) as prefill_client,
        OpenAIClient(fleet.decode_url) as decode_client,
    ):
        yield Race(prefill_client, decode_client, f"http://{metrics}/metrics")


@pytest.mark.matrix(
    group="A borrow fails",
    condition="blocks reused while they are read",
    lent="-",
    reused="only what is proven",
    freed="-",
    recomputed="the rest",
)
async def test_no_wrong_answer_while_blocks_are_reused(race: Race) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number in range(PROMPTS):
        await race.reference(number)
    before = await race.counts()
    recent: list[int] = []
    borrowed = 0
    wrong: list[tuple[int, float]] = []

    async def lend_all_the_time() -> None:
        while borrowed < TURNS:
            number = rng.randrange(PROMPTS)
            await race.lend(race.prompt(number), f"race-{number}")
            recent.append(number)
            del recent[:-5]

    async def borrow_all_the_time() -> None:
        nonlocal borrowed
        while borrowed < TURNS:
            if not recent:
                await asyncio.sleep(0.01)
                continue
            borrowed += 1
            number = rng.choice(recent)
            answer = await race.borrow(race.prompt(number), f"race-{number}", {"hold_ms": rng.randrange(1_200)})
            difference = await race.difference(number, answer)
            if difference > TOLERANCE:
                wrong.append((number, difference))

    async with asyncio.TaskGroup() as group:
        group.create_task(lend_all_the_time())
        for _ in range(3):
            group.create_task(borrow_all_the_time())
    after = await race.counts()
    counts = {name: after[name] - before.get(name, 0) for name in after}
    print(f"{borrowed} turns: {counts}")
    assert not wrong, f"{len(wrong)} of {borrowed} turns used wrong KV (seed {seed}): {wrong[:5]}"
    assert counts.get("seal_broken", 0) > 0, f"no READ was refused: nothing was raced ({counts})"
    assert counts["used"] > 0, f"no READ was used: nothing was shown ({counts})"


async def test_a_read_overtaken_by_reuse_is_refused_only_because_of_its_seal(race: Race) -> None:
    """Break `seal_not_checked`."""
    prompt = race.prompt(50)
    held: Fault = {"hold_ms": 4_000}
    for fault, wrong in ((held, False), ({**held, "break": faulty.SEAL_NOT_CHECKED}, True)):
        await race.lend(prompt, "overtaken")
        reading = asyncio.create_task(race.borrow(prompt, "overtaken", fault))
        await asyncio.sleep(0.5)
        await race.flood()
        difference = await race.difference(50, await reading)
        assert (difference > TOLERANCE) is wrong, f"{fault}: {difference}"


@pytest.mark.matrix(
    group="Memory is wanted",
    condition="a block of several lapsed leases is reused",
    lent="-",
    reused="none of them",
    freed="all of them",
    recomputed="all",
)
async def test_leases_that_share_blocks_all_end_with_them(race: Race) -> None:
    """Break `callback_per_lease`: the pool keeps one callback per block, so only the last lapse would be told."""
    prompt = race.prompt(60)
    broken: Fault = {"break": faulty.CALLBACK_PER_LEASE}
    for fault, wrong in ((NO_FAULT, False), (broken, True)):
        name = f"shared-{wrong}"
        await race.lend(prompt, name, fault)
        await race.lend(prompt + ids(64, seed=61), f"{name}-longer", fault)
        await race.flood()
        difference = await race.difference(60, await race.borrow(prompt, name))
        assert (difference > TOLERANCE) is wrong, f"{fault}: {difference}"


async def test_blocks_are_paired_by_position(race: Race) -> None:
    """Break `mapped_from_tail`: a prompt that shares only the beginning of a lease."""
    prompt = race.prompt(70)
    await race.lend(prompt + ids(500, seed=71), "long")
    broken: Fault = {"break": faulty.MAPPED_FROM_TAIL}
    for fault, wrong in ((NO_FAULT, False), (broken, True)):
        difference = await race.difference(70, await race.borrow(prompt, "long", fault))
        assert (difference > TOLERANCE) is wrong, f"{fault}: {difference}"
