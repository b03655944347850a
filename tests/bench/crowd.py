"""A lender with as many leases as one likes: speaks the contract itself and keeps nothing of what it published.

The product's own session remembers every lease it holds, which would cost the benchmark as much memory as the registry
that it measures. No measuring here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

import grpc.aio
from kvlease.registry.clock import SystemClock
from kvlease.registry.values import DIGEST_BYTES, MAX_BATCH
from kvlease.v1 import registry_pb2 as pb
from kvlease.v1.registry_pb2_grpc import RegistryStub

from tests.bench.lenders import NotPublished

BEAT_S: Final = 1.0
CALL_S: Final = 30.0
STRIDES: Final = 16
"""1 024 tokens."""
BODY: Final = bytes(range(256)) + bytes(64)
"""About what a record of that length has beside its digests."""
PAYLOAD_BYTES: Final = STRIDES * DIGEST_BYTES + len(BODY)
SAMPLED: Final = 512
"""Chains remembered, evenly spread, to ask for."""
TENANT: Final = "default"
FINGERPRINT: Final = bytes(range(16))


class Crowd:
    """One lender and its open session. `incarnation`: another one under the same name is a restart."""

    def __init__(self, channel: grpc.aio.Channel, name: str, *, seed: int, incarnation: bytes) -> None:
        self._stub: Final = RegistryStub(channel)
        self.name: Final = name
        self._random: Final = random.Random(seed)
        self._incarnation: Final = incarnation
        self._clock: Final = SystemClock()
        self._ahead_ms = 0
        self._seq = 0
        self._call: Final = self._stub.Session()
        self._tasks: Final[list[asyncio.Task[None]]] = []
        self.chains: Final[list[bytes]] = []
        """Some of the digest chains it published."""

    async def __aenter__(self) -> Self:
        engine = pb.Engine(engine_id=self.name, incarnation=self._incarnation)
        await self._say(pb.SessionRequest(hello=pb.Hello(engine=engine, now_lender_ms=self.now_ms())))
        async with asyncio.timeout(CALL_S):
            await self._call.read()
        await self._say(pb.SessionRequest(snapshot=pb.Snapshot(last=True)))
        self._tasks.extend((asyncio.create_task(self._beat()), asyncio.create_task(self._hear())))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def now_ms(self) -> int:
        """The lender's own clock."""
        return self._clock.now_ms() + self._ahead_ms

    async def fill(self, count: int, *, ttl_ms: int, ends: bool = False) -> None:
        """Publish `count` leases that lapse (or end) after `ttl_ms`. Raises NotPublished."""
        for size in _parts(count, MAX_BATCH):
            request = pb.PublishRequest(engine_id=self.name, incarnation=self._incarnation)
            request.leases.extend(self._items(size, ttl_ms, ends=ends, every=max(1, count // SAMPLED)))
            response = await self._stub.Publish(request, timeout=CALL_S)
            refused = {x.message for x in response.results if x.status != pb.PUBLISH_STATUS_PUBLISHED}
            if refused:
                raise NotPublished(f"{self.name}: {refused}")

    async def leap(self, ahead_ms: int) -> None:
        """Tell the registry that so much time has passed here: what was to lapse by then does so at once."""
        self._ahead_ms += ahead_ms
        await self._say(pb.SessionRequest(heartbeat=pb.Heartbeat(now_lender_ms=self.now_ms())))

    def _items(self, count: int, ttl_ms: int, *, ends: bool, every: int) -> Iterator[pb.PublishItem]:
        deadline_ms = self.now_ms() + ttl_ms
        for _ in range(count):
            lease_id = self._random.randbytes(16).hex()
            digests = self._random.randbytes(STRIDES * DIGEST_BYTES)
            if self._random.random() * every < 1:
                self.chains.append(digests)
            yield pb.PublishItem(
                lease_id=lease_id,
                tenant=TENANT,
                conversation=f"chat-{lease_id[:20]}",
                stride_tokens=64,
                block_count=64,
                size_bytes=1 << 27,
                deadline_lender_ms=deadline_ms,
                on_deadline=pb.ON_DEADLINE_END if ends else pb.ON_DEADLINE_LAPSE,
                fingerprint_hash=FINGERPRINT,
                record=pb.Record(digests=digests, body=BODY),
            )

    async def _say(self, message: pb.SessionRequest) -> None:
        self._seq += 1
        message.seq = self._seq
        await self._call.write(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._say(pb.SessionRequest(heartbeat=pb.Heartbeat(now_lender_ms=self.now_ms())))

    async def _hear(self) -> None:
        while await self._call.read() is not grpc.aio.EOF:
            pass


def _parts(count: int, most: int) -> Iterator[int]:
    for start in range(0, count, most):
        yield min(most, count - start)
