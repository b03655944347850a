"""Serving turns: find the conversation, then prefill, decode, and what to do when an engine fails.

The asyncio shell around the pure choices of `routes.py`. It knows neither the HTTP server (`client.py` stands for it)
nor the HTTP client (`legs.py` sends). A failure before the first byte is repaired by another engine if there is one;
after it, the stream ends with an error event. Leases never fail a turn.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvlease.registry.clock import Clock
from kvlease.registry.telemetry import current_traceparent, link_from_traceparent
from kvlease.registry.values import Alias, ConversationId
from kvlease.router.background import Background
from kvlease.router.body import Endpoint, LeaseTerms
from kvlease.router.client import Client, ClientGone, client_error, is_openai_error, relay
from kvlease.router.conversations import AliasChain
from kvlease.router.drain import Drain
from kvlease.router.errors import InvalidRequest, RouterError
from kvlease.router.leases import Leases, Lookup
from kvlease.router.legs import Legs
from kvlease.router.metrics import RouterMetrics
from kvlease.router.routes import Role, Routes
from kvlease.router.settings import RouterSettings
from kvlease.router.spans import quiet_span
from kvlease.router.turn import Turn, TurnOutcome, TurnRequest
from kvlease.router.upstream import EngineFailure, FailureReason
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer


class Turns:
    """Serves turns. Holds no state of its own between them."""

    def __init__(
        self,
        *,
        settings: RouterSettings,
        routes: Routes,
        leases: Leases,
        legs: Legs,
        metrics: RouterMetrics,
        background: Background,
        drain: Drain,
        tracer: Tracer,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._routes = routes
        self._leases = leases
        self._legs = legs
        self._metrics = metrics
        self._background = background
        self._drain = drain
        self._tracer = tracer
        self._clock = clock

    async def run(self, request: TurnRequest, client: Client) -> None:
        """Serves one turn. Raises RouterError if nothing was sent; cancellation and ClientGone abort its requests."""
        outcome = TurnOutcome.FAILED
        if request.body.stripped:
            self._metrics.stripped.inc()
        with quiet_span(self._tracer, "turn", SpanKind.SERVER, request.context) as span:
            try:
                outcome = await self._serve(request, client, span)
            except ClientGone:
                outcome = TurnOutcome.CLIENT_GONE
                raise
            except asyncio.CancelledError:
                if not self._drain.over:
                    outcome = TurnOutcome.CLIENT_GONE
                else:  # the edge tells the client
                    outcome = TurnOutcome.BROKEN if client.begun else TurnOutcome.FAILED
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
        outcome = TurnOutcome.FAILED
        try:
            outcome = await self._play(turn, client)
            return outcome
        finally:
            if turn.taken is not None and outcome is not TurnOutcome.SERVED:
                self._leases.give_back(turn.taken, turn.conversation)

    async def _play(self, turn: Turn, client: Client) -> TurnOutcome:
        client.belongs_to(turn.conversation)
        if turn.alone is not None:
            self._legs.fell_back(turn, turn.alone)
        failure: EngineFailure | None = None
        for _ in range(self._settings.max_attempts):
            if turn.handoff is None and turn.alone is None:
                async with self._renewing(turn):
                    refusal = await self._legs.prefill(turn)
                if refusal is not None:
                    await relay(client, refusal)
                    return TurnOutcome.REFUSED
            target = self._routes.choose_decode(
                self._clock.now_ms(), lender=turn.lender, exclude=turn.tried[Role.DECODE]
            )
            if target is None:
                break
            try:
                return await self._legs.decode(turn, client, target)
            except EngineFailure as error:
                failure = error
            self._legs.failed(turn, failure)
            if failure.sent:
                turn.handoff = None  # the engine may have read the blocks, and reading frees them
                if failure.reason is FailureReason.TIMEOUT:
                    break  # the client has waited its share
        return await self._give_up(client, failure)

    async def _begin(self, request: TurnRequest, span: Span) -> Turn:
        body, leases = request.body, self._leases
        named = body.conversation or request.conversation
        chain = None
        if leases.on and named is None and body.endpoint is Endpoint.CHAT:
            chain = AliasChain(leases.tenant, body.model, body.messages)
        aliases = chain.known() if chain is not None else ()
        lookup = await self._locate(named, aliases, span)
        located = lookup.located
        lease = located.lease if located is not None else None
        conversation = named or lookup.conversation or ConversationId(secrets.token_hex(16))
        span.set_attribute("kvlease.conversation", conversation)
        terms = None
        if leases.on:
            terms = LeaseTerms(
                tenant=leases.tenant,
                conversation=conversation,
                lease_id=lease.lease_id if lease is not None else None,
                recompute_threshold=self._settings.recompute_threshold,
                traceparent=current_traceparent(),
            )
        return Turn(
            request=request,
            conversation=conversation,
            chain=chain,
            taken=aliases[0] if lookup.conversation is not None and aliases else None,
            terms=terms,
            lender=self._routes.lender(located),
            lease=lease,
            span=span,
            alone=body.alone,
        )

    async def _locate(self, named: ConversationId | None, aliases: Sequence[Alias], turn: Span) -> Lookup:
        if not self._leases.on:
            return await self._leases.locate(named, aliases)
        with quiet_span(self._tracer, "locate", SpanKind.INTERNAL) as span:
            lookup = await self._leases.locate(named, aliases)
            span.set_attribute("kvlease.located_by", lookup.by)
            located = lookup.located
            if located is None:
                return lookup
            if located.lease is None:
                span.set_attribute("kvlease.reason", str(located.reason))
                return lookup
            span.set_attribute("kvlease.tokens", located.lease.tokens)
            span.set_attribute("kvlease.remaining_ms", located.lease.remaining_ms)
            for at in (span, turn):
                at.set_attribute("kvlease.lease_id", located.lease.lease_id)
            lent = link_from_traceparent(located.lease.traceparent)
            if lent is not None:
                turn.add_link(lent.context)
            return lookup

    async def _give_up(self, client: Client, failure: EngineFailure | None) -> TurnOutcome:
        """Passes on what the last engine said, if it said it the OpenAI way. Raises RouterError otherwise."""
        if failure is not None and failure.answer is not None and is_openai_error(failure.answer.body):
            await relay(client, failure.answer)
            return TurnOutcome.FAILED
        raise client_error(failure)

    @asynccontextmanager
    async def _renewing(self, turn: Turn) -> AsyncIterator[None]:
        """Keeps the located lease alive meanwhile, if the router is set to renew."""
        task = None
        if self._settings.renew and turn.lease is not None:
            task = self._background.start(self._leases.keep(turn.lease))
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
