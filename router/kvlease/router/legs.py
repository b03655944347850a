"""The two requests of a turn: prefill on one engine, decode on another, with the stream forwarded in between.

The asyncio shell around the pure rewriting of `body.py`. It chooses nothing but the prefill engine, and decides nothing
about what follows a failed decode (turns.py does).

Order of duties: forward a chunk, then look at it; answer the client, then tell the registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Final

from kvlease.registry.clock import Clock
from kvlease.router.answer import AnswerReader
from kvlease.router.background import Background
from kvlease.router.body import (
    AloneReason,
    Endpoint,
    JsonObject,
    decode_body,
    encode,
    handed_off,
    prefill_body,
    release_body,
)
from kvlease.router.client import Client, client_error, relay
from kvlease.router.leases import Leases
from kvlease.router.metrics import RouterMetrics
from kvlease.router.routes import Role, Routes, Target
from kvlease.router.settings import RouterSettings
from kvlease.router.spans import quiet_span
from kvlease.router.turn import Turn, TurnOutcome
from kvlease.router.upstream import Answer, EngineFailure, FailureReason, Progress, Upstream, WholeAnswer
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_LATE_S: Final = 0.2
"""More than the way of an answer that is made. For as long, an engine works for a client that has left."""
_RELEASE_TIMEOUT_MS: Final = 5_000
_RELEASE_ANSWER_BYTES: Final = 64 * 1024


class Legs:
    """Sends turns to engines. Holds no state of its own between them."""

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

    async def prefill(self, turn: Turn) -> WholeAnswer | None:
        """Gets `turn.handoff`, or finds that the turn is `alone`. An engine's refusal is returned."""
        body, tried = turn.request.body, turn.tried[Role.PREFILL]
        raw = encode(prefill_body(body, turn.terms))
        while len(tried) < self._settings.max_attempts:
            target = self._routes.choose_prefill(self._clock.now_ms(), exclude=tried)
            if target is None:
                break
            with self._engine_span("prefill", turn, target) as span:
                try:
                    answer = await self._prefilled(target, body.endpoint, raw, self._headers(turn))
                except EngineFailure as failure:
                    span.set_attribute("kvlease.reason", failure.reason)
                    self.failed(turn, failure)
                    if failure.reason is FailureReason.TIMEOUT:
                        break  # the client has waited long enough for a prefill elsewhere
                    continue
                if answer.refused:
                    return answer
                turn.handoff, tokens = handed_off(answer.body)
                if tokens is not None:
                    span.set_attribute("kvlease.prompt_tokens", tokens)
            if turn.handoff is None:
                self.fell_back(turn, AloneReason.NO_PARAMS)
            return None
        self.fell_back(turn, AloneReason.PREFILL_FAILED if tried else AloneReason.NO_PREFILL_ENGINE)
        return None

    async def _prefilled(self, target: Target, path: str, raw: bytes, headers: dict[str, str]) -> WholeAnswer:
        """A prefill engine's answer. If the turn is cancelled meanwhile, the engine has a moment left to give it.

        An engine that has just finished has blocks to be given back, and only its answer says which.
        """
        exchange = asyncio.ensure_future(
            self._upstream.whole(
                target,
                path,
                raw,
                headers,
                timeout_ms=self._settings.prefill_timeout_ms,
                max_bytes=self._settings.max_answer_bytes,
            )
        )
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            late = self._background.start(self._late(exchange))
            if late is None:
                exchange.cancel()
            else:
                late.add_done_callback(lambda _: exchange.cancel())  # also if it is cancelled before it has begun
            raise

    async def _late(self, exchange: asyncio.Future[WholeAnswer]) -> None:
        """Gives back what is handed off to a turn that is over; aborts the prefill if that does not come at once."""
        try:
            async with asyncio.timeout(_LATE_S):
                answer = await exchange
        except (TimeoutError, EngineFailure):
            return
        handoff, _ = handed_off(answer.body)
        target = self._routes.choose_decode(self._clock.now_ms())
        if handoff is not None and target is not None:
            await self._release(target, handoff)

    async def decode(self, turn: Turn, client: Client, target: Target) -> TurnOutcome:
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
                if not progress.sent:
                    self._give_back(turn, target)
                raise
            if whole.refused:
                self._give_back(turn, target)  # refused, perhaps, before the connector on it heard of the blocks
                await relay(client, whole)
                return TurnOutcome.REFUSED
            reader = AnswerReader()
            if body.endpoint is Endpoint.CHAT:
                reader.whole(whole.body)
                self._name(turn, reader)
            await relay(client, whole)
            self._first_byte(turn)
            _count_tokens(span, reader)
            return TurnOutcome.SERVED

    async def _stream(self, turn: Turn, client: Client, answer: Answer, span: Span) -> TurnOutcome:
        """Forwards a stream. Raises EngineFailure if it ends or fails before its first byte.

        One that ends without saying so has failed: an engine that dies can look like that.
        """
        reader, named = AnswerReader(), 0
        chunks = answer.chunks(
            first_timeout_ms=self._settings.first_byte_timeout_ms, idle_timeout_ms=self._settings.idle_timeout_ms
        )
        async with aclosing(chunks):
            try:
                async for chunk in chunks:
                    first = not client.begun
                    if first:
                        await client.begin(answer.status, answer.headers, length=None)
                    await client.write(chunk)
                    if first:
                        self._first_byte(turn)
                    reader.feed(chunk)
                    if reader.failed:
                        self._give_back(turn, answer.target)
                    if reader.complete and reader.finished > named:
                        named = reader.finished
                        self._name(turn, reader)  # ahead of the last bytes: the next turn may follow at once
                if not client.begun or not (reader.failed or reader.end()):
                    raise answer.broken()
            except EngineFailure as failure:
                if not client.begun:
                    raise
                self._routes.failed(failure.target, self._clock.now_ms())
                self._metrics.fallbacks.labels(f"stream_{failure.reason}").inc()
                span.set_attribute("kvlease.reason", failure.reason)
                await client.fail(client_error(failure))
                return TurnOutcome.BROKEN
        await client.end()
        _count_tokens(span, reader)
        return TurnOutcome.BROKEN if reader.failed else TurnOutcome.SERVED

    def _name(self, turn: Turn, reader: AnswerReader) -> None:
        if turn.chain is not None:
            aliases = [turn.chain.continued(message) for message in reader.messages()]
            self._background.start(self._leases.name(turn.conversation, aliases))

    def _give_back(self, turn: Turn, target: Target) -> None:
        """Has what was handed off given back, once. If it was read, this changes nothing: reading frees it as well."""
        if turn.handoff is not None:
            self._background.start(self._release(target, turn.handoff))
            turn.handoff = None

    async def _release(self, target: Target, handoff: JsonObject) -> None:
        """Has blocks given back that the prefill engine would otherwise keep until its own time-out."""
        self._metrics.releases.inc()
        raw = encode(release_body(handoff))
        try:
            await self._upstream.whole(
                target, Endpoint.COMPLETION, raw, {}, timeout_ms=_RELEASE_TIMEOUT_MS, max_bytes=_RELEASE_ANSWER_BYTES
            )
        except EngineFailure:
            return  # the prefill engine's time-out does it

    def _headers(self, turn: Turn) -> dict[str, str]:
        """For an engine: what the edge let through, and the current span as the parent of the engine's own."""
        headers = dict(turn.request.headers)
        _PROPAGATOR.inject(headers)
        return headers

    def failed(self, turn: Turn, failure: EngineFailure) -> None:
        turn.tried[failure.target.role].add(failure.target)
        self._routes.failed(failure.target, self._clock.now_ms())
        self._metrics.fallbacks.labels(f"{failure.target.role}_{failure.reason}").inc()

    def fell_back(self, turn: Turn, reason: AloneReason) -> None:
        turn.alone = reason
        turn.span.set_attribute("kvlease.prefilled_on_decode", reason)
        self._metrics.fallbacks.labels(reason).inc()

    def _first_byte(self, turn: Turn) -> None:
        self._metrics.first_byte_seconds.observe((self._clock.now_ms() - turn.request.received_ms) / 1000)

    @contextmanager
    def _engine_span(self, name: str, turn: Turn, target: Target) -> Iterator[Span]:
        """A request to `target`: a span, and one outstanding in the route table."""
        self._routes.begin(target)
        try:
            with quiet_span(self._tracer, name, SpanKind.CLIENT) as span:
                span.set_attribute("kvlease.target", target.url)
                span.set_attribute("kvlease.conversation", turn.conversation)
                yield span
        finally:
            self._routes.finish(target)


def _count_tokens(span: Span, reader: AnswerReader) -> None:
    if reader.completion_tokens is not None:
        span.set_attribute("kvlease.completion_tokens", reader.completion_tokens)
