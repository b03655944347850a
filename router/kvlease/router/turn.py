"""One turn, from a parsed request to the last byte of its answer: locate, prefill, decode, and what to do on failure.

The asyncio shell around the pure choices of `routes.py` and the pure rewriting of `body.py`. It knows neither the HTTP
server (`Client` stands for it) nor the HTTP client (`upstream.py`).

Order of duties: forward a chunk, then look at it; answer the client, then tell the registry. A failure before the first
byte is repaired by another engine if there is one; after it, the stream ends with an error event. Leases never fail a
turn.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from kvlease.registry.clock import Clock
from kvlease.registry.telemetry import link_from_traceparent
from kvlease.registry.values import ConversationId, LeaseView, Located
from kvlease.router.answer import AnswerReader
from kvlease.router.background import Background
from kvlease.router.body import (
    AloneReason,
    Endpoint,
    JsonObject,
    LeaseTerms,
    TurnBody,
    decode_body,
    encode,
    handed_off,
    prefill_body,
    release_body,
)
from kvlease.router.conversations import AliasChain
from kvlease.router.errors import SSE_DONE, EngineBroken, EngineTimeout, EngineUnreachable, InvalidRequest, RouterError
from kvlease.router.leases import Leases
from kvlease.router.metrics import RouterMetrics
from kvlease.router.routes import Role, Routes, Target
from kvlease.router.settings import RouterSettings
from kvlease.router.upstream import Answer, EngineFailure, FailureReason, Progress, Upstream, WholeAnswer
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_RELEASE_TIMEOUT_MS: Final = 5_000
_EVENT_ENDS: Final = (b"\n\n", b"\r\r", b"\r\n\r\n")


class TurnOutcome(StrEnum):
    SERVED = "served"
    REFUSED = "refused"
    """An engine's 4xx, passed on."""
    FAILED = "failed"
    """No engine could serve it; nothing was sent but an error."""
    BROKEN = "broken"
    """The stream had begun and ended with an error event."""
    CLIENT_GONE = "client_gone"
    INVALID = "invalid"
    """Refused by the router itself."""


class ClientGone(Exception):
    """The client has closed its connection; nothing more can be written."""


class Client(Protocol):
    """Where an answer goes. Each call raises ClientGone once the client has left."""

    def belongs_to(self, conversation: ConversationId) -> None:
        """Says which conversation the turn is part of, before anything else."""
        ...

    async def begin(self, status: int, headers: Sequence[tuple[str, str]], *, length: int | None) -> None:
        """Sends the head; `length` of the body in bytes, None for a stream."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def end(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A turn as the edge hands it in. `headers` go to engines as they are."""

    body: TurnBody
    conversation: ConversationId | None
    """As a header named it."""
    headers: Mapping[str, str]
    context: Context
    """The client's trace context."""
    received_ms: int


@dataclass(slots=True, kw_only=True)
class _Turn:
    """A turn under way."""

    request: TurnRequest
    conversation: ConversationId
    chain: AliasChain | None
    """None if nothing is to be named."""
    terms: LeaseTerms | None
    lender: Target | None
    lease: LeaseView | None
    span: Span
    alone: AloneReason | None
    handoff: JsonObject | None = None
    tried: dict[Role, set[Target]] = field(default_factory=lambda: {role: set() for role in Role})


class Turns:
    """Serves turns. Holds no state of its own between them."""

    def __init__(
        self,
        *,
        settings: RouterSettings,
        routes: Routes,
        upstream: Upstream,
        leases: Leases,
        metrics: RouterMetrics,
        background: Background,
        tracer: Tracer,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._routes = routes
        self._upstream = upstream
        self._leases = leases
        self._metrics = metrics
        self._background = background
        self._tracer = tracer
        self._clock = clock

    async def run(self, request: TurnRequest, client: Client) -> None:
        """Serves one turn. Raises RouterError if nothing was sent; cancellation and ClientGone abort its requests."""
        outcome = TurnOutcome.FAILED
        if request.body.stripped:
            self._metrics.stripped.inc()
        with self._span("turn", SpanKind.SERVER, request.context) as span:
            try:
                outcome = await self._serve(request, client, span)
            except (asyncio.CancelledError, ClientGone):
                outcome = TurnOutcome.CLIENT_GONE
                raise
            except RouterError as error:
                outcome = TurnOutcome.INVALID if isinstance(error, InvalidRequest) else TurnOutcome.FAILED
                span.set_attribute("kvlease.reason", error.code)
                raise
            finally:
                self._metrics.turns.labels(outcome).inc()
                span.set_attribute("kvlease.outcome", outcome)
                if outcome in (TurnOutcome.FAILED, TurnOutcome.BROKEN):
                    span.set_status(Status(StatusCode.ERROR))

    async def _serve(self, request: TurnRequest, client: Client, span: Span) -> TurnOutcome:
        turn = await self._begin(request, span)
        client.belongs_to(turn.conversation)
        if turn.alone is not None:
            self._fell_back(turn, turn.alone)
        failure: EngineFailure | None = None
        for _ in range(self._settings.max_attempts):
            if turn.handoff is None and turn.alone is None:
                async with self._renewing(turn):
                    refusal = await self._prefill(turn)
                if refusal is not None:
                    await _relay(client, refusal)
                    return TurnOutcome.REFUSED
            target = self._routes.choose_decode(
                self._clock.now_ms(), lender=turn.lender, exclude=turn.tried[Role.DECODE]
            )
            if target is None:
                break
            try:
                return await self._decode(turn, client, target)
            except EngineFailure as error:
                failure = error
            self._failed(turn, failure)
            if failure.sent:
                turn.handoff = None  # the engine may have read the blocks, and reading frees them
                if failure.reason is FailureReason.TIMEOUT:
                    break  # the client has waited its share
        return await self._give_up(client, failure)

    async def _begin(self, request: TurnRequest, span: Span) -> _Turn:
        body, leases = request.body, self._leases
        named = body.conversation or request.conversation
        chain = None
        if leases.on and named is None and body.endpoint is Endpoint.CHAT:
            chain = AliasChain(leases.tenant, body.model, body.messages)
        located = await self._locate(named, chain, span)
        found = located.conversation if located is not None else None
        lease = located.lease if located is not None else None
        conversation = named or found or ConversationId(secrets.token_hex(16))
        span.set_attribute("kvlease.conversation", conversation)
        terms = None
        if leases.on:
            terms = LeaseTerms(
                tenant=leases.tenant,
                conversation=conversation,
                lease_id=lease.lease_id if lease is not None else None,
                recompute_threshold=self._settings.recompute_threshold,
            )
        return _Turn(
            request=request,
            conversation=conversation,
            chain=chain,
            terms=terms,
            lender=self._routes.lender(located),
            lease=lease,
            span=span,
            alone=body.alone,
        )

    async def _locate(self, named: ConversationId | None, chain: AliasChain | None, turn: Span) -> Located | None:
        if not self._leases.on:
            return None
        with self._span("locate", SpanKind.INTERNAL) as span:
            located = await self._leases.locate(named, chain.known() if chain is not None else ())
            if located is None:
                return None
            if located.lease is None:
                span.set_attribute("kvlease.reason", str(located.reason))
                return located
            span.set_attribute("kvlease.tokens", located.lease.tokens)
            span.set_attribute("kvlease.remaining_ms", located.lease.remaining_ms)
            for at in (span, turn):
                at.set_attribute("kvlease.lease_id", located.lease.lease_id)
            lent = link_from_traceparent(located.lease.traceparent)
            if lent is not None:
                turn.add_link(lent.context)
            return located

    async def _prefill(self, turn: _Turn) -> WholeAnswer | None:
        """Gets `turn.handoff`, or finds that the turn is `alone`. An engine's refusal is returned."""
        body, tried = turn.request.body, turn.tried[Role.PREFILL]
        raw = encode(prefill_body(body, turn.terms))
        while len(tried) < self._settings.max_attempts:
            target = self._routes.choose_prefill(self._clock.now_ms(), exclude=tried)
            if target is None:
                break
            with self._engine_span("prefill", turn, target) as span:
                try:
                    answer = await self._upstream.whole(
                        target,
                        body.endpoint,
                        raw,
                        self._headers(turn),
                        timeout_ms=self._settings.prefill_timeout_ms,
                        max_bytes=self._settings.max_answer_bytes,
                    )
                except EngineFailure as failure:
                    span.set_attribute("kvlease.reason", failure.reason)
                    self._failed(turn, failure)
                    continue
                if answer.refused:
                    return answer
                turn.handoff, tokens = handed_off(answer.body)
                if tokens is not None:
                    span.set_attribute("kvlease.prompt_tokens", tokens)
            if turn.handoff is None:
                self._fell_back(turn, AloneReason.NO_PARAMS)
            return None
        self._fell_back(turn, AloneReason.PREFILL_FAILED if tried else AloneReason.NO_PREFILL_ENGINE)
        return None

    async def _decode(self, turn: _Turn, client: Client, target: Target) -> TurnOutcome:
        """Raises EngineFailure as long as nothing was sent to the client."""
        body, settings, progress = turn.request.body, self._settings, Progress()
        raw = encode(decode_body(body, turn.handoff, turn.terms))
        timeout_ms = settings.first_byte_timeout_ms if body.stream else settings.answer_timeout_ms
        with self._engine_span("decode", turn, target) as span:
            try:
                async with self._upstream.open(
                    target, body.endpoint, raw, self._headers(turn), timeout_ms=timeout_ms, progress=progress
                ) as answer:
                    if answer.streams:
                        return await self._stream(turn, client, answer, span)
                    whole = await answer.whole(
                        max_bytes=settings.max_answer_bytes, timeout_ms=settings.answer_timeout_ms
                    )
            except EngineFailure as failure:
                span.set_attribute("kvlease.reason", failure.reason)
                raise
            except asyncio.CancelledError:
                if turn.handoff is not None and not progress.sent:
                    self._background.start(self._release(target, turn.handoff))
                raise
            if whole.refused:
                await _relay(client, whole)
                return TurnOutcome.REFUSED
            reader = AnswerReader()
            if body.endpoint is Endpoint.CHAT:
                reader.whole(whole.body)
                self._name(turn, reader)
            await _relay(client, whole)
            self._first_byte(turn)
            _count_tokens(span, reader)
            return TurnOutcome.SERVED

    async def _stream(self, turn: _Turn, client: Client, answer: Answer, span: Span) -> TurnOutcome:
        """Forwards a stream. Raises EngineFailure if it ends or fails before its first byte."""
        reader, named, last = AnswerReader(), 0, b""
        chunks = answer.chunks(
            first_timeout_ms=self._settings.first_byte_timeout_ms, idle_timeout_ms=self._settings.idle_timeout_ms
        )
        async with aclosing(chunks):
            try:
                async for chunk in chunks:
                    if not last:
                        await client.begin(answer.status, answer.headers, length=None)
                    await client.write(chunk)
                    if not last:
                        self._first_byte(turn)
                    last = chunk
                    reader.feed(chunk)
                    if reader.complete and reader.finished > named:
                        named = reader.finished
                        self._name(turn, reader)  # ahead of the last bytes: the next turn may follow at once
            except EngineFailure as failure:
                if not last:
                    raise
                self._routes.failed(failure.target, self._clock.now_ms())
                self._metrics.fallbacks.labels(f"stream_{failure.reason}").inc()
                span.set_attribute("kvlease.reason", failure.reason)
                if not last.endswith(_EVENT_ENDS):
                    await client.write(b"\n\n")
                await client.write(_client_error(failure).as_event() + SSE_DONE)
                await client.end()
                return TurnOutcome.BROKEN
        if not last:
            raise answer.broken()
        await client.end()
        _count_tokens(span, reader)
        return TurnOutcome.BROKEN if reader.failed else TurnOutcome.SERVED

    async def _give_up(self, client: Client, failure: EngineFailure | None) -> TurnOutcome:
        """Passes on what the last engine said, if it said it the OpenAI way. Raises RouterError otherwise."""
        if failure is not None and failure.answer is not None and _is_openai_error(failure.answer.body):
            await _relay(client, failure.answer)
            return TurnOutcome.FAILED
        raise _client_error(failure)

    def _name(self, turn: _Turn, reader: AnswerReader) -> None:
        if turn.chain is not None:
            aliases = [turn.chain.continued(message) for message in reader.messages()]
            self._background.start(self._leases.name(turn.conversation, aliases))

    async def _release(self, target: Target, handoff: JsonObject) -> None:
        """Has blocks given back that the prefill engine would otherwise keep until its own time-out."""
        self._metrics.releases.inc()
        raw = encode(release_body(handoff))
        try:
            await self._upstream.whole(
                target, Endpoint.COMPLETION, raw, {}, timeout_ms=_RELEASE_TIMEOUT_MS, max_bytes=64 * 1024
            )
        except EngineFailure:
            return  # the prefill engine's time-out does it

    @asynccontextmanager
    async def _renewing(self, turn: _Turn) -> AsyncIterator[None]:
        """Keeps the located lease alive meanwhile, if the router is set to renew."""
        task = None
        if self._settings.renew and turn.lease is not None:
            task = self._background.start(self._leases.keep(turn.lease))
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    def _headers(self, turn: _Turn) -> dict[str, str]:
        """For an engine: what the edge let through, and the current span as the parent of the engine's own."""
        headers = dict(turn.request.headers)
        _PROPAGATOR.inject(headers)
        return headers

    def _failed(self, turn: _Turn, failure: EngineFailure) -> None:
        turn.tried[failure.target.role].add(failure.target)
        self._routes.failed(failure.target, self._clock.now_ms())
        self._metrics.fallbacks.labels(f"{failure.target.role}_{failure.reason}").inc()

    def _fell_back(self, turn: _Turn, reason: AloneReason) -> None:
        turn.alone = reason
        turn.span.set_attribute("kvlease.prefilled_on_decode", reason)
        self._metrics.fallbacks.labels(reason).inc()

    def _first_byte(self, turn: _Turn) -> None:
        self._metrics.first_byte_seconds.observe((self._clock.now_ms() - turn.request.received_ms) / 1000)

    @contextmanager
    def _engine_span(self, name: str, turn: _Turn, target: Target) -> Iterator[Span]:
        """A request to `target`: a span, and one outstanding in the route table."""
        self._routes.begin(target)
        try:
            with self._span(name, SpanKind.CLIENT) as span:
                span.set_attribute("kvlease.target", target.url)
                span.set_attribute("kvlease.conversation", turn.conversation)
                yield span
        finally:
            self._routes.finish(target)

    @contextmanager
    def _span(self, name: str, kind: SpanKind, context: Context | None = None) -> Iterator[Span]:
        """A span that never quotes an exception: messages could hold what a client sent."""
        with self._tracer.start_as_current_span(
            name, context=context, kind=kind, record_exception=False, set_status_on_exception=False
        ) as span:
            yield span


async def _relay(client: Client, answer: WholeAnswer) -> None:
    await client.begin(answer.status, answer.headers, length=len(answer.body))
    await client.write(answer.body)
    await client.end()


def _client_error(failure: EngineFailure | None) -> RouterError:
    match failure.reason if failure is not None else FailureReason.UNREACHABLE:
        case FailureReason.UNREACHABLE:
            return EngineUnreachable("no decode engine could be reached")
        case FailureReason.TIMEOUT:
            return EngineTimeout("the decode engine did not answer in time")
        case FailureReason.TOO_LARGE:
            return EngineBroken("the decode engine's answer exceeds max_answer_bytes")
        case FailureReason.BROKEN | FailureReason.STATUS:
            return EngineBroken("the decode engine failed")


def _is_openai_error(body: bytes) -> bool:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and isinstance(fields.get("error"), dict)


def _count_tokens(span: Span, reader: AnswerReader) -> None:
    if reader.completion_tokens is not None:
        span.set_attribute("kvlease.completion_tokens", reader.completion_tokens)
