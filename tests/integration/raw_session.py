"""A lender's session message by message, for tests of what a registry does with each; and a clock turned by hand.

Nothing is repaired here: no heartbeats by itself, no reconnect, numbers as the test says. Waits end after LIMIT_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio
from kvlease.registry.client_channel import CLIENT_OPTIONS
from kvlease.registry.errors_grpc import from_rpc_error
from kvlease.v1 import registry_pb2 as pb
from kvlease.v1.registry_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from kvlease.v1.registry_pb2_grpc import RegistryAsyncStub

LIMIT_S = 10.0
LENDER_NOW_MS = 1_000_000
STRIDE = 64


class HandClock:
    """A monotonic clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.time_ms = 50_000

    def now_ms(self) -> int:
        return self.time_ms


def engine(engine_id: str = "d0", incarnation: bytes = b"i" * 16) -> pb.Engine:
    fingerprint = pb.Fingerprint(hash=b"f" * 16, fields={"kv_dtype": "fp16"})
    return pb.Engine(
        engine_id=engine_id, incarnation=incarnation, api_url=f"http://{engine_id}", fingerprint=fingerprint
    )


def digests(text: str) -> bytes:
    """A chain with one stride a letter."""
    return b"".join(text[: i + 1].rjust(16, ".").encode() for i in range(len(text)))


def lease(
    lease_id: str, text: str, *, conversation: str = "chat", tenant: str = "acme", ttl_ms: int = 60_000
) -> pb.PublishItem:
    return pb.PublishItem(
        lease_id=lease_id,
        tenant=tenant,
        conversation=conversation,
        stride_tokens=STRIDE,
        block_count=2,
        size_bytes=4_096,
        deadline_lender_ms=LENDER_NOW_MS + ttl_ms,
        fingerprint_hash=b"f" * 16,
        record=pb.Record(digests=digests(text), body=f"body of {lease_id}".encode()),
        traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01",
    )


class RawSession:
    """One stream. `say` numbers messages unless told otherwise; `hear` gives the next answer."""

    def __init__(self, stub: RegistryAsyncStub) -> None:
        self._call: Any = stub.Session()
        self._seq = 0
        self.pushed: list[pb.SessionResponse] = []
        """What came while an acknowledgement was waited for: their order is not promised."""

    async def say(self, *, seq: int | None = None, **message: Any) -> None:
        self._seq = self._seq + 1 if seq is None else seq
        await self._call.write(pb.SessionRequest(seq=self._seq, **message))

    async def hear(self) -> pb.SessionResponse:
        """The next message. Raises the typed error if the registry ended the stream with one."""
        async with asyncio.timeout(LIMIT_S):
            try:
                response = await self._call.read()
                if response is grpc.aio.EOF:
                    await self._call.code()
                    raise AssertionError("the stream ended in good order")
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
        assert isinstance(response, pb.SessionResponse)
        return response

    async def ack(self) -> pb.Ack:
        while (response := await self.hear()).WhichOneof("message") != "ack":
            self.pushed.append(response)
        return response.ack

    async def hello(self, who: pb.Engine | None = None) -> pb.Welcome:
        await self.say(hello=pb.Hello(engine=who or engine(), now_lender_ms=LENDER_NOW_MS))
        response = await self.hear()
        assert response.WhichOneof("message") == "welcome", response
        return response.welcome

    async def start(self, who: pb.Engine | None = None, held: Sequence[pb.PublishItem] = ()) -> pb.Ack:
        """Hello and a whole snapshot."""
        await self.hello(who)
        await self.say(snapshot=pb.Snapshot(leases=held, last=True))
        return await self.ack()

    async def publish(self, *leases: pb.PublishItem) -> list[pb.PublishResult]:
        await self.say(publish=pb.PublishBatch(leases=leases))
        return list((await self.ack()).results)

    async def close(self) -> grpc.StatusCode:
        """Half-close, and the status that the registry answers with."""
        await self._call.done_writing()
        async with asyncio.timeout(LIMIT_S):
            while await self._call.read() is not grpc.aio.EOF:
                pass
            code: grpc.StatusCode = await self._call.code()
            return code

    def cut(self) -> None:
        """Gone without a word."""
        self._call.cancel()


@asynccontextmanager
async def raw_stub(endpoint: str) -> AsyncIterator[RegistryAsyncStub]:
    async with grpc.aio.insecure_channel(endpoint, options=CLIENT_OPTIONS) as channel:
        yield RegistryStub(channel)
