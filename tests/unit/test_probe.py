"""The probe of lenders: bounded, joined, and remembered in both directions.

The side channel is played by the test: it is a peer that answers, refuses, or never says a word.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from kvlease.connector.probe import BAD_FOR_MS, GOOD_FOR_MS, LenderProbe, Peer, peer_of
from kvlease.connector.record import RecordContent
from kvlease.connector.seal import SealRef
from kvlease.registry.values import EngineId, Incarnation, LeaseId, TenantId

INCARNATION = Incarnation(bytes(16))


def content(params: object = None, engine: str = "d") -> RecordContent:
    told = {"remote_host": "10.0.0.7", "remote_port": 5600} if params is None else params
    return RecordContent(
        lease_id=LeaseId("l"),
        engine_id=EngineId(engine),
        incarnation=INCARNATION,
        fingerprint_hash=bytes(16),
        tenant=TenantId("t"),
        stride_tokens=64,
        block_tokens=32,
        tokens=64,
        block_ids=((1, 2),),
        seals=(SealRef(pp_rank=0, tp_rank=0, address=64, value=1),),
        engine_params=json.dumps(told).encode(),
    )


class Clock:
    def __init__(self) -> None:
        self.ms = 0

    def now_ms(self) -> int:
        return self.ms


class Channel:
    """A side channel whose answers the test gives."""

    def __init__(self) -> None:
        self.asked: list[Peer] = []
        self.good: bool | Exception | None = True
        """None: never answers."""

    async def answers_for(self, peer: Peer) -> bool:
        self.asked.append(peer)
        if self.good is None:
            await asyncio.Event().wait()
        if isinstance(self.good, Exception):
            raise self.good
        return bool(self.good)

    async def close(self) -> None:
        return None


async def test_both_outcomes_are_remembered_for_their_time() -> None:
    clock, channel = Clock(), Channel()
    async with LenderProbe(channel, clock, limit_ms=1_000) as probe:
        assert await probe.reachable(content())
        channel.good = False
        assert await probe.reachable(content()), "known to be good"
        clock.ms += GOOD_FOR_MS
        assert not await probe.reachable(content())
        channel.good = True
        assert not await probe.reachable(content()), "known to be bad"
        clock.ms += BAD_FOR_MS
        assert await probe.reachable(content())
    assert len(channel.asked) == 3


@pytest.mark.parametrize("failure", [OSError("refused"), ValueError("another version"), None])
async def test_whatever_happens_the_answer_comes_within_the_limit(failure: Exception | None) -> None:
    channel = Channel()
    channel.good = failure
    async with LenderProbe(channel, Clock(), limit_ms=20) as probe, asyncio.timeout(5):
        assert not await probe.reachable(content())


async def test_many_at_once_ask_once_and_one_that_leaves_takes_nobody_with_it() -> None:
    channel = Channel()
    channel.good = None
    async with LenderProbe(channel, Clock(), limit_ms=200) as probe, asyncio.timeout(5):
        asking = [asyncio.create_task(probe.reachable(content())) for _ in range(3)]
        await asyncio.sleep(0)
        asking[0].cancel()
        assert await asyncio.gather(*asking[1:]) == [False, False]
    assert len(channel.asked) == 1


async def test_lenders_are_told_apart_by_incarnation_and_address() -> None:
    channel = Channel()
    async with LenderProbe(channel, Clock(), limit_ms=1_000) as probe:
        await probe.reachable(content())
        await probe.reachable(content(engine="other"))
        await probe.reachable(content({"remote_host": "10.0.0.8", "remote_port": 5600}))
    assert len(channel.asked) == 3


@pytest.mark.parametrize(
    "broken",
    [
        replace(content(), engine_params=b"\xff"),
        content([]),
        content({"remote_host": 7, "remote_port": 5600}),
        content({"remote_host": "h", "remote_port": 0}),
        content({"remote_host": "h"}),
    ],
)
async def test_a_record_that_names_no_side_channel_is_not_reachable(broken: RecordContent) -> None:
    assert peer_of(broken) is None
    async with LenderProbe(Channel(), Clock(), limit_ms=1_000) as probe:
        assert not await probe.reachable(broken)
