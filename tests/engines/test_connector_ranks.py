"""A lender with two tensor-parallel ranks, a borrower with one: blocks and seals of both ranks are read.

Each rank has a seal table of its own; the seal of one of them being broken is enough to refuse what was read.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from kvlease.connector.seal_table import DIRECTORY, PREFIX, SealTable

from tests.engines.chat import Turns, ids
from tests.engines.engine import Json, Role
from tests.engines.fleet import Fleet, FleetSettings, one_prefill_one_decode
from tests.engines.model import KV_BYTES_PER_TOKEN
from tests.engines.openai_client import OpenAIClient
from tests.ports import free_ports

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

TWO_RANKS = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")


class Engines:
    def __init__(self, fleet: Fleet, prefill: OpenAIClient, decode: OpenAIClient, metrics: OpenAIClient) -> None:
        self.fleet = fleet
        self.prefill = prefill
        self.decode = decode
        self.metrics = metrics

    async def count(self, name: str) -> float:
        _, text = await self.metrics.get("/metrics")
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE))

    def tables(self) -> Iterator[Path]:
        """The seal tables of the decode engine's ranks."""
        group = os.getpgid(self.fleet.child(self.fleet.ids(Role.DECODE)[0]).pid)
        for path in sorted(DIRECTORY.glob(f"{PREFIX}-*")):
            pid = int(path.name.removeprefix(f"{PREFIX}-").split("-")[0])
            if Path(f"/proc/{pid}").exists() and os.getpgid(pid) == group:
                yield path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Engines]:
    metrics = f"127.0.0.1:{free_ports(1)[0]}"
    settings: dict[str, Json] = {"resolve_wait_ms": 5_000}
    prefill, decode = one_prefill_one_decode(kvlease=settings, prefill_prefix_caching=False)
    prefill = dataclasses.replace(prefill, kvlease={**settings, "metrics": metrics})
    decode = dataclasses.replace(decode, arguments=TWO_RANKS)
    async with (
        Fleet(FleetSettings(engines=(prefill, decode), router=False)) as fleet,
        OpenAIClient(fleet.prefill_url) as prefill_client,
        OpenAIClient(fleet.decode_url) as decode_client,
        OpenAIClient(f"http://{metrics}") as metrics_client,
    ):
        yield Engines(fleet, prefill_client, decode_client, metrics_client)


@pytest.mark.matrix(
    group="A prompt borrows",
    condition="lender with two tensor-parallel ranks",
    lent="-",
    reused="all, both ranks proven",
    freed="-",
    recomputed="new tokens",
)
async def test_both_ranks_are_read_and_proven(engines: Engines) -> None:
    turns = Turns(engines.prefill, engines.decode)
    first = await turns.turn(ids(500, seed=1), max_tokens=20)
    turn = await turns.turn([*first.history, *ids(50, seed=2)])
    assert turn.reused == first.lent
    await turns.check(turn, "from two ranks")
    assert await engines.count("kvlease_borrower_read_bytes_total") == first.lent * KV_BYTES_PER_TOKEN
    assert await engines.count("kvlease_borrower_borrows_total") == 1, "one load, though two ranks were read"


@pytest.mark.matrix(
    group="A borrow fails",
    condition="one rank's seal is broken",
    lent="-",
    reused="nothing",
    freed="all",
    recomputed="all",
)
async def test_one_rank_whose_seal_is_broken_is_enough_to_refuse(engines: Engines) -> None:
    turns = Turns(engines.prefill, engines.decode)
    first = await turns.turn(ids(500, seed=3), max_tokens=20)
    paths = list(engines.tables())
    assert len(paths) == 2
    SealTable.attach(paths[-1]).break_all()
    refused = 'kvlease_borrower_misses_total{reason="seal_broken"}'
    before = await engines.count(refused)
    turn = await turns.turn([*first.history, *ids(50, seed=4)])
    await turns.check(turn, "after a refused READ")
    assert await engines.count(refused) == before + 1
