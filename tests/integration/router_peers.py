"""What a router talks to in its tests: an engine that speaks vLLM's HTTP API over a real socket.

It stands for vLLM, not for kvlease. A test scripts what the engine does next and reads what it received; the KV it
claims to hold is a counter. Nothing here sleeps: an engine that is to wait does so on an event the test sets.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from kvlease.router.server import RouterServer
from kvlease.router.settings import load
from opentelemetry.trace import Tracer

Script = Callable[["Call"], Awaitable[web.StreamResponse]]
LIMIT_S = 10.0
"""Bound of every wait in these tests."""


@dataclass(slots=True)
class Call:
    """One request that an engine received."""

    request: web.Request
    raw: bytes
    body: dict[str, Any]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def params(self) -> dict[str, Any]:
        found = self.body.get("kv_transfer_params")
        assert isinstance(found, dict)
        return found

    async def stream(self) -> web.StreamResponse:
        """The head of a stream, sent."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Engine": "d"})
        response.enable_chunked_encoding()
        await response.prepare(self.request)
        return response


def chunk(delta: dict[str, Any], *, finish: str | None = None, index: int = 0) -> bytes:
    """One server-sent event of a chat answer, as vLLM cuts it."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    fields = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def usage_chunk(tokens: int) -> bytes:
    usage = {"prompt_tokens": 7, "total_tokens": 7 + tokens, "completion_tokens": tokens}
    fields = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}
    return b"data: " + json.dumps({**fields, "usage": usage}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Engine:
    """A prefill and decode engine in one. `script`, if set, serves turns in place of the default."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.script: Script | None = None
        self.answers = ["Hello", " there"]
        """Pieces of each answer."""
        self.url = ""
        self.healthy = True
        self._handoffs = 0
        self._arrived = asyncio.Condition()

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[Engine]:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._turn)
        app.router.add_post("/v1/completions", self._turn)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    async def received(self, count: int) -> Call:
        """The `count`-th call, waited for."""
        async with asyncio.timeout(LIMIT_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.calls) >= count)
        return self.calls[count - 1]

    async def _turn(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        call = Call(request=request, raw=raw, body=json.loads(raw))
        async with self._arrived:
            self.calls.append(call)
            self._arrived.notify_all()
        try:
            return await (self.script or self.default)(call)
        except asyncio.CancelledError:
            call.cancelled.set()
            raise

    async def default(self, call: Call) -> web.StreamResponse:
        """Prefills, streams or answers, as the body asks."""
        if call.body.get("model") == "kvlease.release":
            return refused(404, "no such model")
        params = call.body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            return self.prefilled()
        if call.body.get("stream"):
            response = await call.stream()
            await response.write(chunk({"role": "assistant", "content": ""}))
            for piece in self.answers:
                await response.write(chunk({"content": piece}))
            await response.write(chunk({}, finish="stop"))
            if (call.body.get("stream_options") or {}).get("include_usage"):
                await response.write(usage_chunk(len(self.answers)))
            await response.write(DONE)
            return response
        return self.answered()

    def prefilled(self) -> web.Response:
        """What a prefill engine with a NIXL connector answers."""
        self._handoffs += 1
        return web.json_response({**self._answer(), "kv_transfer_params": self.handoff(self._handoffs)})

    def handoff(self, number: int) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[number, number + 1]],
            "remote_engine_id": "p",
            "remote_request_id": f"cmpl-{number}",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "something_newer": {"kept": True},
        }

    def answered(self) -> web.Response:
        return web.json_response(self._answer())

    def _answer(self) -> dict[str, Any]:
        text = "".join(self.answers)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "text": text, "finish_reason": "stop"}
        usage = {"prompt_tokens": 7, "total_tokens": 9, "completion_tokens": 2}
        return {"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}

    async def _health(self, _: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


def refused(status: int, message: str) -> web.Response:
    """An error as vLLM words it."""
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


@asynccontextmanager
async def routing(
    prefill: Sequence[Engine | str], decode: Sequence[Engine | str], *flags: str, tracer: Tracer | None = None
) -> AsyncIterator[RouterServer]:
    """A router in front of these engines, on a free port; no registry unless a flag says so."""
    argv = ["--listen", "127.0.0.1:0", "--registry", "none", "--drain-timeout-ms", "500"]
    for flag, engines in (("--prefill", prefill), ("--decode", decode)):
        for engine in engines:
            argv += [flag, engine if isinstance(engine, str) else engine.url]
    async with RouterServer(load([*argv, *flags]), tracer=tracer) as router:
        yield router


def url(router: RouterServer, path: str = "/v1/chat/completions") -> str:
    return f"http://127.0.0.1:{router.port}{path}"


def sample(router: RouterServer, name: str, **labels: str) -> float:
    """A metric's value now; 0 if it was never set."""
    return router.metrics.registry.get_sample_value(name, labels) or 0.0


async def until(true: Callable[[], bool]) -> None:
    """Lets the loop run until `true`, bounded."""
    async with asyncio.timeout(LIMIT_S):
        while not true():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.001)


def unused_url() -> str:
    """A URL where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@asynccontextmanager
async def fleet(
    prefill: Sequence[Engine | str],
    decode: Sequence[Engine | str],
    *flags: str,
    tracer: Tracer | None = None,
    headers: dict[str, str] | None = None,
) -> AsyncIterator[tuple[RouterServer, aiohttp.ClientSession]]:
    """Serves the engines, a router in front of them, and a client."""
    async with AsyncExitStack() as stack:
        for engine in dict.fromkeys(e for e in (*prefill, *decode) if isinstance(e, Engine)):
            await stack.enter_async_context(engine.serve())
        router = await stack.enter_async_context(routing(prefill, decode, *flags, tracer=tracer))
        yield router, await stack.enter_async_context(aiohttp.ClientSession(headers=headers))


@contextmanager
def full_listener() -> Iterator[socket.socket]:
    """A listener whose queue is full, so that a connection to it stays half open until something is accepted."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        listener.setblocking(False)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener
