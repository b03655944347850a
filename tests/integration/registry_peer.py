# ruff: noqa: N802 - method names are those of the contract
"""A registry whose answers a test writes by hand: real gRPC, real sockets, no state of its own.

It stands for a registry that is slow, gone, wrong or newer, where the real one cannot be brought to be so on demand.
Every wait in here ends after LIMIT_S, with an error that names what was waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from kvlease.registry.client_channel import SERVER_OPTIONS, open_channel
from kvlease.registry.errors import KvleaseError
from kvlease.registry.errors_grpc import abort
from kvlease.registry.servicer import SERVICE
from kvlease.v1 import registry_pb2 as pb
from kvlease.v1.registry_pb2_grpc import RegistryServicer, add_RegistryServicer_to_server

LIMIT_S: Final = 30.0
Request = TypeVar("Request")
Response = TypeVar("Response")
T = TypeVar("T")

SessionContext = grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse]
ResolveContext = grpc.aio.ServicerContext[pb.ResolveStreamRequest, pb.ResolveStreamResponse]
WatchContext = grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse]


async def soon(awaitable: Awaitable[T], what: str, *, limit_s: float = LIMIT_S) -> T:
    """The result of `awaitable`, or a failed test."""
    try:
        async with asyncio.timeout(limit_s):
            return await awaitable
    except TimeoutError:
        raise AssertionError(f"waited {limit_s:g} s for {what}") from None


async def until(condition: Callable[[], bool], what: str) -> None:
    """Return when `condition` holds, or fail the test."""

    async def look() -> None:
        while not condition():  # noqa: ASYNC110 - conditions over other people's objects have no event
            await asyncio.sleep(0.002)

    await soon(look(), what)


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """The same for what has to be asked for; less often, because asking costs."""

    async def look() -> None:
        while not await condition():  # noqa: ASYNC110 - conditions over other people's objects have no event
            await asyncio.sleep(0.05)

    await soon(look(), what)


async def says_that_it_serves(endpoint: str) -> bool:
    """What a registry's health is, as an orchestrator asks for it; False if nothing answers."""
    async with open_channel(endpoint) as channel:
        try:
            answer = await HealthStub(channel).Check(HealthCheckRequest(service=SERVICE), timeout=LIMIT_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == HealthCheckResponse.SERVING)


class PeerStream(Generic[Request, Response]):
    """The registry's end of one open stream."""

    def __init__(self, context: grpc.aio.ServicerContext[Request, Response]) -> None:
        self._context = context
        self._inbox: asyncio.Queue[Request] = asyncio.Queue()
        self._ending: asyncio.Future[KvleaseError | None] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()

    async def next(self) -> Request:
        """The client's next message."""
        return await soon(self._inbox.get(), "a message of the client")

    @property
    def idle(self) -> bool:
        """Whether no message of the client waits to be looked at."""
        return self._inbox.empty()

    async def send(self, message: Response) -> None:
        await soon(self._context.write(message), "a write to the client")

    def end(self, error: KvleaseError | None = None) -> None:
        """Close the stream, with `error` or in good order."""
        if not self._ending.done():
            self._ending.set_result(error)

    async def serve(self) -> None:
        async def pump() -> None:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                self._inbox.put_nowait(message)

        pumping = asyncio.create_task(pump())
        try:
            error = await self._ending
        finally:
            pumping.cancel()
            self.closed.set()
        if error is not None:
            await abort(self._context, error)


class Peer(RegistryServicer):
    """Streams are handed to the test; unary calls are answered from `answers`, and hang where there is none."""

    def __init__(self) -> None:
        self.port = 0
        self.sessions: asyncio.Queue[PeerStream[pb.SessionRequest, pb.SessionResponse]] = asyncio.Queue()
        self.resolves: asyncio.Queue[PeerStream[pb.ResolveStreamRequest, pb.ResolveStreamResponse]] = asyncio.Queue()
        self.answers: list[object] = []
        self.requests: list[object] = []
        self.metadata: list[dict[str, str | bytes]] = []

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def session(self) -> PeerStream[pb.SessionRequest, pb.SessionResponse]:
        return await soon(self.sessions.get(), "a session")

    async def resolve_stream(self) -> PeerStream[pb.ResolveStreamRequest, pb.ResolveStreamResponse]:
        return await soon(self.resolves.get(), "a resolve stream")

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: SessionContext
    ) -> None:
        stream = PeerStream(context)
        self.sessions.put_nowait(stream)
        await stream.serve()

    async def ResolveStream(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ResolveStreamRequest], context: ResolveContext
    ) -> None:
        stream = PeerStream(context)
        self.resolves.put_nowait(stream)
        await stream.serve()

    async def Watch(self, request: pb.WatchRequest, context: WatchContext) -> None:  # type: ignore[override]
        self.requests.append(request)
        for answer in self.answers:
            if isinstance(answer, KvleaseError):
                await abort(context, answer)
            assert isinstance(answer, pb.WatchResponse)
            await context.write(answer)
        await asyncio.Event().wait()

    async def _unary(self, request, context):  # type: ignore[no-untyped-def]
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, KvleaseError):
            await abort(context, answer)
        return answer

    Resolve = Locate = Renew = End = Publish = NameConversation = ListLeases = ListEngines = _unary


@asynccontextmanager
async def peer(port: int = 0) -> AsyncIterator[Peer]:
    """A peer on a loopback port (0 picks one), open as long as the block."""
    servicer = Peer()
    server = grpc.aio.server(options=(*SERVER_OPTIONS, ("grpc.so_reuseport", 0)))
    add_RegistryServicer_to_server(servicer, server)
    servicer.port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(grace=None)
