"""The registry's spans: a wrapper around the service. Only put in place when traces are exported.

Spans carry ids, numbers and reasons, never tokens, digests or texts. A resolve or locate that found a lease is linked
to the turn that lent it, so that a trace leads from the turn that reads to the turn that wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvlease.registry.errors import KvleaseError
from kvlease.registry.outbox import Outbox
from kvlease.registry.service import RegistryService, WrappedService
from kvlease.registry.table_changes import SessionId
from kvlease.registry.table_search import Found
from kvlease.registry.telemetry import link_from_traceparent
from kvlease.registry.values import (
    Alias,
    ConversationId,
    EndOrder,
    EndReason,
    Engine,
    EngineId,
    Incarnation,
    LeaseId,
    Located,
    Miss,
    Publication,
    PublishResult,
    RenewResult,
    ResolveQuery,
    TenantId,
)
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

LEASE_ID: Final = "kvlease.lease_id"
ENGINE_ID: Final = "kvlease.engine_id"
TENANT: Final = "kvlease.tenant"
CONVERSATION: Final = "kvlease.conversation"
TOKENS_MATCHED: Final = "kvlease.tokens_matched"
OUTCOME: Final = "kvlease.outcome"
MISS_REASON: Final = "kvlease.miss_reason"
END_REASON: Final = "kvlease.end_reason"
LEASES: Final = "kvlease.leases"


class TracedService(WrappedService):
    """A span for each resolve, locate, publish, renewal, end and session."""

    def __init__(self, inner: RegistryService, tracer: Tracer) -> None:
        super().__init__(inner)
        self._tracer: Final = tracer
        self._sessions: dict[SessionId, Span] = {}

    def resolve(self, queries: Sequence[ResolveQuery]) -> list[Found | Miss]:
        return [self._resolve(query) for query in queries]

    def _resolve(self, query: ResolveQuery) -> Found | Miss:
        with self._tracer.start_as_current_span("resolve", kind=SpanKind.SERVER) as span:
            span.set_attribute(TENANT, query.tenant)
            (answer,) = self.inner.resolve((query,))
            if isinstance(answer, Found):
                lease = answer.lease
                publication = lease.publication
                span.set_attribute(OUTCOME, "hit")
                span.set_attribute(ENGINE_ID, lease.holder.engine.engine_id)
                span.set_attribute(TOKENS_MATCHED, answer.matched_strides * query.stride_tokens)
                _about_lease(span, publication.lease_id, publication.conversation, publication.traceparent)
            else:
                span.set_attribute(OUTCOME, "miss")
                span.set_attribute(MISS_REASON, answer.reason.value)
                if answer.end_reason is not None:
                    span.set_attribute(END_REASON, answer.end_reason.value)
            return answer

    def locate(self, tenant: TenantId, conversation: ConversationId | None, aliases: Sequence[Alias]) -> Located:
        with self._tracer.start_as_current_span("locate", kind=SpanKind.SERVER) as span:
            span.set_attribute(TENANT, tenant)
            located = self.inner.locate(tenant, conversation, aliases)
            if located.lease is not None:
                span.set_attribute(OUTCOME, "hit")
                span.set_attribute(ENGINE_ID, located.lease.engine_id)
                _about_lease(span, located.lease.lease_id, located.conversation, located.lease.traceparent)
            elif located.reason is not None:
                span.set_attribute(OUTCOME, "miss")
                span.set_attribute(MISS_REASON, located.reason.value)
            return located

    async def publish(
        self, engine_id: EngineId, incarnation: Incarnation, publications: Sequence[Publication]
    ) -> list[PublishResult]:
        with self._tracer.start_as_current_span("publish", kind=SpanKind.SERVER) as span:
            span.set_attribute(ENGINE_ID, engine_id)
            return _about_results(span, publications, await self.inner.publish(engine_id, incarnation, publications))

    async def publish_in(self, session: SessionId, publications: Sequence[Publication]) -> list[PublishResult]:
        with self._tracer.start_as_current_span("publish", kind=SpanKind.SERVER) as span:
            return _about_results(span, publications, await self.inner.publish_in(session, publications))

    async def snapshot(
        self, session: SessionId, publications: Sequence[Publication], *, last: bool
    ) -> list[PublishResult]:
        with self._tracer.start_as_current_span("snapshot", kind=SpanKind.SERVER) as span:
            return _about_results(span, (), await self.inner.snapshot(session, publications, last=last))

    async def renew(self, tenant: TenantId, lease_id: LeaseId, ttl_ms: int) -> RenewResult:
        with self._tracer.start_as_current_span("renew", kind=SpanKind.SERVER) as span:
            span.set_attribute(TENANT, tenant)
            span.set_attribute(LEASE_ID, lease_id)
            result = await self.inner.renew(tenant, lease_id, ttl_ms)
            span.set_attribute(OUTCOME, result.status.value)
            return result

    async def end(self, order: EndOrder) -> int:
        with self._tracer.start_as_current_span("end", kind=SpanKind.SERVER) as span:
            span.set_attribute(END_REASON, order.reason.value)
            span.set_attribute("kvlease.end_scope", order.scope.value)
            if order.target:
                span.set_attribute(
                    f"kvlease.{order.scope.value}" + ("_id" if order.scope in _BY_ID else ""), order.target
                )
            ended = await self.inner.end(order)
            span.set_attribute(LEASES, ended)
            return ended

    async def ended(self, session: SessionId, leases: Sequence[tuple[LeaseId, EndReason]]) -> None:
        with self._tracer.start_as_current_span("end", kind=SpanKind.SERVER) as span:
            span.set_attribute(LEASES, len(leases))
            for reason, count in Counter(reason for _, reason in leases).items():
                span.set_attribute(f"{LEASES}.{reason.value}", count)
            if len(leases) == 1:
                span.set_attribute(LEASE_ID, leases[0][0])
                span.set_attribute(END_REASON, leases[0][1].value)
            await self.inner.ended(session, leases)

    async def open_session(self, engine: Engine, now_lender_ms: int) -> Outbox:
        span = self._tracer.start_span("session", kind=SpanKind.SERVER)
        span.set_attribute(ENGINE_ID, engine.engine_id)
        span.set_attribute("kvlease.incarnation", engine.incarnation.hex())
        try:
            outbox = await self.inner.open_session(engine, now_lender_ms)
        except KvleaseError as error:
            span.set_status(Status(StatusCode.ERROR, error.reason.value))
            span.end()
            raise
        self._sessions[outbox.session] = span
        return outbox

    def close_session(self, session: SessionId) -> None:
        self.inner.close_session(session)
        span = self._sessions.pop(session, None)
        if span is not None:
            span.end()


_BY_ID: Final = frozenset({"lease", "engine"})


def _about_lease(span: Span, lease_id: LeaseId, conversation: ConversationId | None, traceparent: str) -> None:
    span.set_attribute(LEASE_ID, lease_id)
    if conversation is not None:
        span.set_attribute(CONVERSATION, conversation)
    link = link_from_traceparent(traceparent)
    if link is not None:
        span.add_link(link.context, {LEASE_ID: lease_id})


def _about_results(
    span: Span, publications: Sequence[Publication], results: list[PublishResult]
) -> list[PublishResult]:
    span.set_attribute(LEASES, len(results))
    for status, count in Counter(result.status for result in results).items():
        span.set_attribute(f"{LEASES}.{status.value}", count)
    for publication in publications:
        link = link_from_traceparent(publication.traceparent)
        if link is not None:
            span.add_link(link.context, {LEASE_ID: publication.lease_id})
    if len(results) == 1:
        span.set_attribute(LEASE_ID, results[0].lease_id)
        span.set_attribute(OUTCOME, results[0].status.value)
    return results
