"""A stream that the registry closes while the client writes: the reader learns why, each time.

Real gRPC; the server is one that closes in the middle of a burst.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
from kvlease.registry.errors import KvleaseError, SessionReplaced
from kvlease.registry.errors_grpc import abort, from_rpc_error
from kvlease.registry.stream_writer import StreamOver, StreamWriter
from kvlease.v1 import registry_pb2 as pb
from kvlease.v1.registry_pb2_grpc import RegistryServicer, RegistryStub, add_RegistryServicer_to_server

from tests.integration.registry_peer import SessionContext, soon

ROUNDS = 60
TAKEN = 20
"""Messages before the server closes."""


class Closing(RegistryServicer):
    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: SessionContext
    ) -> None:
        taken = 0
        async for message in request_iterator:
            taken += 1
            await context.write(pb.SessionResponse(ack=pb.Ack(seq=message.seq)))
            if taken == TAKEN:
                await abort(context, SessionReplaced("a newer session of this incarnation"))


@asynccontextmanager
async def closing_server() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    add_RegistryServicer_to_server(Closing(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def burst(channel: grpc.aio.Channel) -> tuple[KvleaseError | None, bool]:
    """Writes as fast as it can until the stream is over: what the reader saw, and whether a write was cut off."""
    call = RegistryStub(channel).Session()
    writer = StreamWriter(call)
    message = pb.SessionRequest(seq=1, publish=pb.PublishBatch(leases=[pb.PublishItem(lease_id="x" * 100)] * 50))

    async def write() -> bool:
        while True:
            try:
                await writer.write(message)
            except StreamOver as over:
                return over.__cause__ is not None

    writing = asyncio.create_task(write())
    seen: KvleaseError | None = None
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        seen = from_rpc_error(error)
    return seen, await writing


async def test_a_close_amid_writes_is_read_with_its_reason() -> None:
    async with closing_server() as channel:
        rounds = [await soon(burst(channel), "the end of a burst") for _ in range(ROUNDS)]
    assert any(cut for _, cut in rounds), "no write was under way when the server closed: nothing was tested"
    assert {type(seen) for seen, _ in rounds} == {SessionReplaced}
