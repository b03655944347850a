"""Tenant and engine of each call against its caller: a service around the service, where identity is on.

Says no and nothing else. A foreign tenant's lease or conversation is not refused but answered as if there were none:
the question goes on in the name of a tenant that nobody can be, so that the answer, and the work for it, are those of
a miss. What concerns no single lease (lists, watches, names) is refused with PERMISSION_DENIED.
Invariant: nothing of a tenant is answered to, or changed by, a caller without a grant for that tenant.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from kvlease.registry.errors import PermissionDenied
from kvlease.registry.identity import Rpc, Tenants
from kvlease.registry.identity_gate import CALLER
from kvlease.registry.outbox import Outbox
from kvlease.registry.refusals import Refusals
from kvlease.registry.service import LeasePage, RegistryService, WrappedService
from kvlease.registry.table_changes import SessionId
from kvlease.registry.table_search import Found
from kvlease.registry.values import (
    Alias,
    ConversationId,
    EndOrder,
    EndScope,
    Engine,
    EngineId,
    Incarnation,
    LeaseFilter,
    LeaseId,
    Located,
    Miss,
    MissReason,
    Publication,
    PublishResult,
    PublishStatus,
    RenewResult,
    RenewStatus,
    ResolveQuery,
    TenantId,
)
from kvlease.registry.watch import Watch

NOBODY: Final = TenantId("\0nobody")
"""No legal id, so nothing is published, named or ended under it."""

Publish = Callable[[Sequence[Publication]], Awaitable[list[PublishResult]]]


class GuardedService(WrappedService):
    """`owner` says whose a lease is, for the log only."""

    def __init__(self, inner: RegistryService, refusals: Refusals, owner: Callable[[LeaseId], TenantId | None]) -> None:
        super().__init__(inner)
        self._refusals: Final = refusals
        self._owner: Final = owner
        self._lending: dict[SessionId, Tenants] = {}

    # --- reads

    def resolve(self, queries: Sequence[ResolveQuery]) -> list[Found | Miss]:
        tenants = CALLER.get().tenants(Rpc.RESOLVE)
        foreign = [query for query in queries if query.tenant not in tenants]
        for query in foreign:
            self._note_foreign("resolve", query.tenant, query.lease_id or query.conversation)
        if foreign:
            queries = [query if query.tenant in tenants else query._replace(tenant=NOBODY) for query in queries]
        answers = self.inner.resolve(queries)
        for query, answer in zip(queries, answers, strict=True):
            if query.lease_id is not None and isinstance(answer, Miss) and answer.reason is MissReason.UNKNOWN:
                self._note_owner("resolve", query.tenant, query.lease_id)
        return answers

    def locate(self, tenant: TenantId, conversation: ConversationId | None, aliases: Sequence[Alias]) -> Located:
        if tenant not in CALLER.get().tenants(Rpc.LOCATE):
            self._note_foreign("locate", tenant, conversation)
            return self.inner.locate(NOBODY, conversation, aliases)
        return self.inner.locate(tenant, conversation, aliases)

    def list_leases(self, wanted: LeaseFilter, *, after: LeaseId | None, limit: int) -> LeasePage:
        self._check_selection(Rpc.LIST_LEASES, wanted)
        return self.inner.list_leases(wanted, after=after, limit=limit)

    def watch(self, wanted: LeaseFilter, from_revision: int) -> Watch:
        self._check_selection(Rpc.WATCH, wanted)
        return self.inner.watch(wanted, from_revision)

    # --- callers

    async def renew(self, tenant: TenantId, lease_id: LeaseId, ttl_ms: int) -> RenewResult:
        if tenant not in CALLER.get().tenants(Rpc.RENEW):
            self._note_foreign("renew", tenant, lease_id)
            return await self.inner.renew(NOBODY, lease_id, ttl_ms)
        result = await self.inner.renew(tenant, lease_id, ttl_ms)
        if result.status is RenewStatus.UNKNOWN:
            self._note_owner("renew", tenant, lease_id)
        return result

    async def end(self, order: EndOrder) -> int:
        caller = CALLER.get()
        if order.scope in (EndScope.ENGINE, EndScope.TENANT):
            if not caller.operates:
                raise self._refusal(f"to end a whole {order.scope.value} is for operators")
            return await self.inner.end(order)
        if order.tenant not in caller.tenants(Rpc.END):
            self._note_foreign("end", order.tenant, order.target)
            return await self.inner.end(replace(order, tenant=NOBODY))
        ended = await self.inner.end(order)
        if not ended and order.scope is EndScope.LEASE:
            self._note_owner("end", order.tenant, LeaseId(order.target))
        return ended

    async def name_conversation(
        self, tenant: TenantId, conversation: ConversationId, aliases: Sequence[Alias], ttl_ms: int
    ) -> None:
        if tenant not in CALLER.get().tenants(Rpc.NAME_CONVERSATION):
            raise self._refusal(f"tenant {tenant} is not this caller's")
        await self.inner.name_conversation(tenant, conversation, aliases, ttl_ms)

    # --- lenders

    async def publish(
        self, engine_id: EngineId, incarnation: Incarnation, publications: Sequence[Publication]
    ) -> list[PublishResult]:
        lending = self._check_engine(engine_id)
        return await self._publish(lending, publications, lambda mine: self.inner.publish(engine_id, incarnation, mine))

    async def open_session(self, engine: Engine, now_lender_ms: int) -> Outbox:
        lending = self._check_engine(engine.engine_id)
        outbox = await self.inner.open_session(engine, now_lender_ms)
        self._lending[outbox.session] = lending
        return outbox

    def close_session(self, session: SessionId) -> None:
        self._lending.pop(session, None)
        self.inner.close_session(session)

    async def snapshot(
        self, session: SessionId, publications: Sequence[Publication], *, last: bool
    ) -> list[PublishResult]:
        lending = self._lending[session]
        return await self._publish(
            lending, publications, lambda mine: self.inner.snapshot(session, mine, last=last), always=True
        )

    async def publish_in(self, session: SessionId, publications: Sequence[Publication]) -> list[PublishResult]:
        lending = self._lending[session]
        return await self._publish(lending, publications, lambda mine: self.inner.publish_in(session, mine))

    # --- inside

    async def _publish(
        self, lending: Tenants, publications: Sequence[Publication], publish: Publish, *, always: bool = False
    ) -> list[PublishResult]:
        """Those for the lender's own tenants go on, the others are answered in their place."""
        mine = [x for x in publications if x.tenant in lending]
        results = await publish(mine) if mine or always or not publications else []
        if len(mine) == len(publications):
            return results
        answers = iter(results)
        return [next(answers) if x.tenant in lending else self._not_published(x) for x in publications]

    def _not_published(self, publication: Publication) -> PublishResult:
        self._note_foreign("publish", publication.tenant, publication.lease_id)
        return PublishResult(
            lease_id=publication.lease_id,
            status=PublishStatus.INVALID,
            message=f"this lender has no grant for tenant {publication.tenant}",
        )

    def _check_engine(self, engine_id: EngineId) -> Tenants:
        lending = CALLER.get().lends_as(engine_id)
        if lending is None:
            raise self._refusal(f"engine {engine_id} is not this caller")
        return lending

    def _check_selection(self, rpc: Rpc, wanted: LeaseFilter) -> None:
        tenants = CALLER.get().tenants(rpc)
        if wanted.tenant is None and not tenants.every:
            raise self._refusal(f"{rpc.value} for all tenants is for callers that have them all: name one")
        if wanted.tenant is not None and wanted.tenant not in tenants:
            raise self._refusal(f"tenant {wanted.tenant} is not this caller's")

    def _refusal(self, message: str) -> PermissionDenied:
        self._refusals.note("%s: %s", CALLER.get().name, message)
        return PermissionDenied(message)

    def _note_foreign(self, act: str, tenant: TenantId, target: str | None) -> None:
        name = CALLER.get().name
        self._refusals.note("%s %s: tenant %s is not of %s; answered as a miss", act, target or "", tenant, name)

    def _note_owner(self, act: str, tenant: TenantId, lease_id: LeaseId) -> None:
        owner = self._owner(lease_id)
        if owner is not None and owner != tenant and tenant != NOBODY:
            name = CALLER.get().name
            self._refusals.note(
                "%s: lease %s is of tenant %s, not %s; answered %s as a miss", act, lease_id, owner, tenant, name
            )
