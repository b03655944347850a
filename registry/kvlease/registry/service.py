"""What callers may ask of a registry, as a protocol; and a wrapper that passes everything on, for metrics and traces.

The gRPC edge calls a `RegistryService`; the shell is one, and so is anything wrapped around it.
Invariant: a wrapper changes no argument and no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvlease.registry.outbox import Outbox
from kvlease.registry.table_changes import SessionId
from kvlease.registry.table_search import Found
from kvlease.registry.values import (
    Alias,
    ConversationId,
    EndOrder,
    EndReason,
    Engine,
    EngineId,
    EngineStatus,
    Incarnation,
    LeaseFilter,
    LeaseId,
    LeaseView,
    Located,
    Miss,
    Publication,
    PublishResult,
    RenewResult,
    RenewStatus,
    ResolveQuery,
    TenantId,
)
from kvlease.registry.watch import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePage:
    """A part of a list. `after` is where the next one starts, None if this was the last."""

    leases: Sequence[LeaseView]
    revision: int
    after: LeaseId | None


class RegistryService(Protocol):
    """Everything a registry does for its callers. `RegistryShell` says what each does and raises."""

    def resolve(self, queries: Sequence[ResolveQuery]) -> list[Found | Miss]: ...

    def locate(self, tenant: TenantId, conversation: ConversationId | None, aliases: Sequence[Alias]) -> Located: ...

    def list_leases(self, wanted: LeaseFilter, *, after: LeaseId | None, limit: int) -> LeasePage: ...

    def list_engines(self) -> Sequence[EngineStatus]: ...

    def watch(self, wanted: LeaseFilter, from_revision: int) -> Watch: ...

    async def publish(
        self, engine_id: EngineId, incarnation: Incarnation, publications: Sequence[Publication]
    ) -> list[PublishResult]: ...

    async def renew(self, tenant: TenantId, lease_id: LeaseId, ttl_ms: int) -> RenewResult: ...

    async def end(self, order: EndOrder) -> int: ...

    async def name_conversation(
        self, tenant: TenantId, conversation: ConversationId, aliases: Sequence[Alias], ttl_ms: int
    ) -> None: ...

    async def open_session(self, engine: Engine, now_lender_ms: int) -> Outbox: ...

    def close_session(self, session: SessionId) -> None: ...

    def receive(self, session: SessionId, seq: int) -> None: ...

    def heartbeat(self, session: SessionId, *, now_lender_ms: int, free_blocks: int, total_blocks: int) -> None: ...

    async def snapshot(
        self, session: SessionId, publications: Sequence[Publication], *, last: bool
    ) -> list[PublishResult]: ...

    async def publish_in(self, session: SessionId, publications: Sequence[Publication]) -> list[PublishResult]: ...

    async def ended(self, session: SessionId, leases: Sequence[tuple[LeaseId, EndReason]]) -> None: ...

    async def renewed(self, session: SessionId, leases: Sequence[tuple[LeaseId, int]]) -> None: ...

    async def refuse_renewal(self, session: SessionId, lease_id: LeaseId, status: RenewStatus) -> None: ...

    async def goodbye(self, session: SessionId) -> None: ...


class WrappedService:
    """Passes every call on to `inner`. Subclasses override what they look at."""

    def __init__(self, inner: RegistryService) -> None:
        self.inner: Final = inner

    def resolve(self, queries: Sequence[ResolveQuery]) -> list[Found | Miss]:
        return self.inner.resolve(queries)

    def locate(self, tenant: TenantId, conversation: ConversationId | None, aliases: Sequence[Alias]) -> Located:
        return self.inner.locate(tenant, conversation, aliases)

    def list_leases(self, wanted: LeaseFilter, *, after: LeaseId | None, limit: int) -> LeasePage:
        return self.inner.list_leases(wanted, after=after, limit=limit)

    def list_engines(self) -> Sequence[EngineStatus]:
        return self.inner.list_engines()

    def watch(self, wanted: LeaseFilter, from_revision: int) -> Watch:
        return self.inner.watch(wanted, from_revision)

    async def publish(
        self, engine_id: EngineId, incarnation: Incarnation, publications: Sequence[Publication]
    ) -> list[PublishResult]:
        return await self.inner.publish(engine_id, incarnation, publications)

    async def renew(self, tenant: TenantId, lease_id: LeaseId, ttl_ms: int) -> RenewResult:
        return await self.inner.renew(tenant, lease_id, ttl_ms)

    async def end(self, order: EndOrder) -> int:
        return await self.inner.end(order)

    async def name_conversation(
        self, tenant: TenantId, conversation: ConversationId, aliases: Sequence[Alias], ttl_ms: int
    ) -> None:
        await self.inner.name_conversation(tenant, conversation, aliases, ttl_ms)

    async def open_session(self, engine: Engine, now_lender_ms: int) -> Outbox:
        return await self.inner.open_session(engine, now_lender_ms)

    def close_session(self, session: SessionId) -> None:
        self.inner.close_session(session)

    def receive(self, session: SessionId, seq: int) -> None:
        self.inner.receive(session, seq)

    def heartbeat(self, session: SessionId, *, now_lender_ms: int, free_blocks: int, total_blocks: int) -> None:
        self.inner.heartbeat(session, now_lender_ms=now_lender_ms, free_blocks=free_blocks, total_blocks=total_blocks)

    async def snapshot(
        self, session: SessionId, publications: Sequence[Publication], *, last: bool
    ) -> list[PublishResult]:
        return await self.inner.snapshot(session, publications, last=last)

    async def publish_in(self, session: SessionId, publications: Sequence[Publication]) -> list[PublishResult]:
        return await self.inner.publish_in(session, publications)

    async def ended(self, session: SessionId, leases: Sequence[tuple[LeaseId, EndReason]]) -> None:
        await self.inner.ended(session, leases)

    async def renewed(self, session: SessionId, leases: Sequence[tuple[LeaseId, int]]) -> None:
        await self.inner.renewed(session, leases)

    async def refuse_renewal(self, session: SessionId, lease_id: LeaseId, status: RenewStatus) -> None:
        await self.inner.refuse_renewal(session, lease_id, status)

    async def goodbye(self, session: SessionId) -> None:
        await self.inner.goodbye(session)
