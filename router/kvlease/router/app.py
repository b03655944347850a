"""The HTTP edge: paths, headers, the OpenAI error shape, and the client's connection. Decides nothing about turns.

Every answer that is not an engine's is either what the API defines or an OpenAI error object, and every answer names
its conversation where there is one. Bodies and credentials are never logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Final

from aiohttp import HttpVersion11, web
from kvlease.registry.clock import Clock
from kvlease.registry.values import ConversationId, is_id
from kvlease.router.body import Endpoint, Json, parse_turn
from kvlease.router.client import ClientGone
from kvlease.router.conversations import HEADER, from_headers
from kvlease.router.drain import Drain
from kvlease.router.errors import (
    SSE_DONE,
    BodyTooLarge,
    EngineUnreachable,
    ExpectationFailed,
    InvalidRequest,
    MethodNotServed,
    NotServed,
    Overloaded,
    RequestTimeout,
    RouterError,
    ShuttingDown,
)
from kvlease.router.health import Probes
from kvlease.router.leases import Leases
from kvlease.router.metrics import CONTENT_TYPE, RouterMetrics
from kvlease.router.routes import Routes, Target
from kvlease.router.settings import RouterSettings
from kvlease.router.turn import TurnOutcome, TurnRequest
from kvlease.router.turns import Turns
from kvlease.router.upstream import EngineFailure, Upstream, WholeAnswer
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_LOG: Final = logging.getLogger(__name__)
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_FORWARDED: Final = ("user-agent", "x-session-id", "x-vllm-priority")
"""Request headers that mean something to an engine and nothing about one connection."""

_EVENT_ENDS: Final = (b"\n\n", b"\r\r", b"\r\n\r\n")

_NOT_HTTP: Final = "the request is malformed, or has a header of more than 64 KiB or an encoding that is not served"

_BEGUN: Final = web.RequestKey("begun", bool)
"""Set on a request once part of its answer may have been sent."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WebClient:
    """The client's side of one turn over aiohttp: see `client.Client`."""

    def __init__(self, request: web.Request, request_id: str, *, timeout_ms: int) -> None:
        """`timeout_ms` bounds each write: a client that takes nothing in for so long is gone."""
        self._request = request
        self._timeout_s = timeout_ms / 1000
        self._headers = [("X-Request-Id", request_id)]
        self._streams = False
        self._last = b""
        self.response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        return self.response is not None

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """What each answer carries, errors included."""
        return self._headers

    def belongs_to(self, conversation: ConversationId) -> None:
        self._headers.append((HEADER, conversation))

    async def begin(self, status: int, headers: Sequence[tuple[str, str]], *, length: int | None) -> None:
        own = {name.lower() for name, _ in self._headers}
        response = web.StreamResponse(status=status)
        for name, value in [*(h for h in headers if h[0].lower() not in own), *self._headers]:
            response.headers.add(name, value)
        if length is not None:
            response.content_length = length
        self._streams = length is None
        self.response = response
        self._request[_BEGUN] = True
        await self._sent(response.prepare(self._request))

    async def write(self, data: bytes) -> None:
        self._last = data
        await self._sent(self._begun().write(data))

    async def end(self) -> None:
        self._streams = False
        await self._sent(self._begun().write_eof())

    async def fail(self, error: RouterError) -> None:
        if self._streams:
            closed = b"" if self._last.endswith(_EVENT_ENDS) else b"\n\n"  # an event that was cut
            await self.write(closed + error.as_event() + SSE_DONE)
            await self.end()

    async def _sent(self, sending: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await sending
        except ConnectionError as error:
            raise ClientGone from error
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone from error

    def _begun(self) -> web.StreamResponse:
        if self.response is None:
            raise RuntimeError("write before begin")
        return self.response


class RouterApp:
    """The handlers of one router. `drain` turns /health to 503 while turns in flight end."""

    def __init__(
        self,
        *,
        settings: RouterSettings,
        routes: Routes,
        upstream: Upstream,
        leases: Leases,
        metrics: RouterMetrics,
        probes: Probes,
        turns: Turns,
        drain: Drain,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._routes = routes
        self._upstream = upstream
        self._leases = leases
        self._metrics = metrics
        self._probes = probes
        self._turns = turns
        self._drain = drain
        self._clock = clock
        self._in_flight = 0

    def build(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=self._settings.max_body_bytes, middlewares=[_openai_errors])
        app.on_shutdown.append(self._drained)
        app.router.add_post(Endpoint.CHAT, self._chat, expect_handler=_expectation)
        app.router.add_post(Endpoint.COMPLETION, self._completion, expect_handler=_expectation)
        app.router.add_get("/v1/models", self._models)
        app.router.add_delete("/v1/conversations/{conversation:.+}", self._end_conversation)  # ids may have a slash
        app.router.add_get("/health", self._health)
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/metrics", self._metrics_page)
        return app

    async def _drained(self, _: web.Application) -> None:
        """By now no connection is taken on, and those that were idle are closed."""
        await self._drain.run()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._turn(request, Endpoint.CHAT)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._turn(request, Endpoint.COMPLETION)

    async def _turn(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        if self._in_flight >= self._settings.max_turns:
            raise Overloaded(f"{self._settings.max_turns} turns are in flight (max_turns)")
        client = WebClient(request, secrets.token_hex(16), timeout_ms=self._settings.client_timeout_ms)
        self._in_flight += 1
        try:
            try:
                async with self._drain.work():
                    turn = await self._request(request, endpoint, client)
                    await self._turns.run(turn, client)
            except ShuttingDown as error:
                if not client.begun:
                    raise
                await client.fail(error)
        except ClientGone:
            _LOG.debug("client left")
        except RouterError as error:
            return _error(error, client.headers)
        finally:
            self._in_flight -= 1
        # A client that left before its answer began has nobody to read this.
        return client.response or web.Response(status=499)

    async def _request(self, request: web.Request, endpoint: Endpoint, client: WebClient) -> TurnRequest:
        try:
            async with self._drain.reading(self._settings.client_timeout_ms / 1000):
                raw = await request.read()
        except ConnectionError as error:
            raise ClientGone from error
        except web.RequestPayloadError as error:
            self._metrics.turns.labels(TurnOutcome.INVALID).inc()
            raise InvalidRequest("the body is not encoded as its headers say") from error
        except TimeoutError as error:
            raise RequestTimeout("the body did not arrive in time (client_timeout_ms)") from error
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        if self._settings.forward_authorization and "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        headers.update(client.headers)
        try:
            body = parse_turn(endpoint, raw, max_messages=self._settings.max_messages)
            conversation = from_headers(request.headers)
        except InvalidRequest:
            self._metrics.turns.labels(TurnOutcome.INVALID).inc()
            raise
        return TurnRequest(
            body=body,
            conversation=conversation,
            headers=headers,
            context=_PROPAGATOR.extract({k.lower(): v for k, v in request.headers.items()}, context=Context()),
            received_ms=self._clock.now_ms(),
        )

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """The models of a decode engine; the fleet serves one set."""
        headers = {}
        if self._settings.forward_authorization and "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        tried: set[Target] = set()
        for _ in range(self._settings.max_attempts):
            target = self._routes.choose_decode(self._clock.now_ms(), exclude=tried)
            if target is None:
                break
            tried.add(target)
            try:
                async with self._drain.work():
                    answer = await self._upstream.get(
                        target, "/v1/models", headers, timeout_ms=self._settings.models_timeout_ms
                    )
            except EngineFailure:
                continue
            return _whole(answer)
        raise EngineUnreachable("no decode engine could say which models it serves")

    async def _end_conversation(self, request: web.Request) -> web.StreamResponse:
        conversation = request.match_info["conversation"]
        if not is_id(conversation):
            raise InvalidRequest("a conversation id is 1-128 of [A-Za-z0-9._:@/+=-]", param="conversation")
        async with self._drain.work():
            ended = await self._leases.release(ConversationId(conversation))
        return _json({"id": conversation, "object": "conversation.deleted", "deleted": True, "leases_ended": ended})

    async def _health(self, _: web.Request) -> web.StreamResponse:
        ready = self._routes.ready() and not self._drain.begun
        status = "ready" if ready else "draining" if self._drain.begun else "not_ready"
        return _json(
            {"status": status, **self._probes.report()},
            HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE,
        )

    async def _livez(self, _: web.Request) -> web.StreamResponse:
        return _json({"status": "alive"})

    async def _metrics_page(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


class Connection(web.RequestHandler):
    """A client's connection: aiohttp's, but what aiohttp itself refuses is refused the OpenAI way.

    That is what does not parse as HTTP, has a header that is too long, or an encoding it does not know; its own answers
    quote that, and it can be a credential or part of a prompt.
    """

    __slots__ = ()

    def __init__(self, server: web.Server, *, loop: asyncio.AbstractEventLoop, max_header_bytes: int) -> None:
        super().__init__(
            server,
            loop=loop,
            max_field_size=max_header_bytes,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's word for none
        )

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("part of an answer is out")  # as aiohttp does: the connection is closed
        refused = status == HTTPStatus.BAD_REQUEST
        response = _error(InvalidRequest(_NOT_HTTP) if refused else RouterError("internal error"))
        response.force_close()
        return response


async def _expectation(request: web.Request) -> web.StreamResponse | None:
    """Tells a client that waits for it to send its body."""
    if request.version < HttpVersion11:
        return None
    if request.headers["Expect"].lower() != "100-continue":
        return _error(ExpectationFailed("only 100-continue can be expected"))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # of the answer, nothing is out
    return None


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives every failure that did not come from an engine the OpenAI shape."""
    try:
        return await handler(request)
    except RouterError as error:
        return _error(error)
    except web.HTTPRequestEntityTooLarge:
        return _error(BodyTooLarge("the body exceeds max_body_bytes"))
    except web.HTTPMethodNotAllowed as error:
        response = _error(MethodNotServed(f"{request.method} is not served here"))
        response.headers["Allow"] = ",".join(sorted(error.allowed_methods))
        return response
    except web.HTTPNotFound:
        return _error(NotServed("no such path; this router serves chat/completions, completions and models"))
    except web.HTTPException as error:
        return _error(InvalidRequest(error.reason))
    except Exception as error:  # noqa: BLE001 - the outermost frame of a request
        # The type only: a message could quote what the client sent.
        _LOG.error("a handler failed: %s", type(error).__name__)
        if _BEGUN in request and request.transport is not None:
            request.transport.abort()  # part of an answer is out: only a broken connection can say that it is not whole
        return _error(RouterError("internal error"))


def _error(error: RouterError, headers: Sequence[tuple[str, str]] = ()) -> web.Response:
    response = web.Response(status=error.status, body=error.as_json(), content_type="application/json")
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        response.headers["Retry-After"] = "1"
    response.headers.extend(headers)
    return response


def _whole(answer: WholeAnswer) -> web.Response:
    response = web.Response(status=answer.status, body=answer.body)
    response.headers.popall("Content-Type", None)
    for name, value in answer.headers:
        response.headers.add(name, value)
    return response


def _json(fields: dict[str, Json], status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(status=status, body=json.dumps(fields).encode(), content_type="application/json")
