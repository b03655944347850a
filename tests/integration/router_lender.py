"""A lender for the router's tests: a real session with a real registry, holding what a test says it holds.

No KV and no engine: records are random bytes, which registry and router never look into.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import Clock, SystemClock
from kvlease.registry.lender_session import LenderSession
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, load
from kvlease.registry.values import (
    DEFAULT_TENANT,
    ConversationId,
    EndReason,
    Engine,
    EngineId,
    Incarnation,
    LeaseId,
    OnDeadline,
    Publication,
    PublishResult,
    Record,
)

from tests.integration.router_peers import LIMIT_S

STRIDE = 64


@asynccontextmanager
async def registry(*, clock: Clock | None = None) -> AsyncIterator[RegistryServer]:
    """A registry on a free port."""
    argv = ["--listen", "127.0.0.1:0", "--metrics-listen", NO_METRICS]
    async with RegistryServer(load(argv), clock=clock) as server:
        yield server


class Lender:
    """Publishes leases and notes what it is asked."""

    def __init__(self, client: RegistryClient, api_url: str, engine_id: str = "d") -> None:
        self.engine = Engine(
            engine_id=EngineId(engine_id), incarnation=Incarnation(secrets.token_bytes(16)), api_url=api_url
        )
        self.client = client
        self.clock = SystemClock()
        self.session = LenderSession(client, self.engine, clock=self.clock, listener=self)
        self.ended: list[tuple[LeaseId, EndReason]] = []
        self.renewals: list[LeaseId] = []
        self._published: dict[LeaseId, asyncio.Event] = {}

    async def lend(self, conversation: str, *, strides: int = 2, ttl_ms: int = 60_000) -> LeaseId:
        """A lease that the registry has acknowledged."""
        lease_id = LeaseId(secrets.token_hex(8))
        self._published[lease_id] = asyncio.Event()
        self.session.publish(
            Publication(
                lease_id=lease_id,
                tenant=DEFAULT_TENANT,
                conversation=ConversationId(conversation),
                stride_tokens=STRIDE,
                block_count=strides * 4,
                size_bytes=1,
                deadline_ms=self.clock.now_ms() + ttl_ms,
                on_deadline=OnDeadline.LAPSE,
                fingerprint_hash=b"f" * 16,
                record=Record(digests=secrets.token_bytes(16 * strides), body=b"b"),
                traceparent="00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01",
            )
        )
        async with asyncio.timeout(LIMIT_S):
            await self._published[lease_id].wait()
        return lease_id

    def on_connected(self) -> None: ...

    def on_disconnected(self) -> None: ...

    def on_refused(self, reason: str, message: str) -> None: ...

    def on_result(self, result: PublishResult) -> None:
        self._published[result.lease_id].set()

    def on_end(self, lease_id: LeaseId, reason: EndReason) -> None:
        self.ended.append((lease_id, reason))
        self.session.ended(lease_id, reason)

    def on_renew(self, lease_id: LeaseId, ttl_ms: int) -> None:
        self.renewals.append(lease_id)
        self.session.renewed(lease_id, self.clock.now_ms() + (ttl_ms or 60_000))


@asynccontextmanager
async def lending(server: RegistryServer, api_url: str, engine_id: str = "d") -> AsyncIterator[Lender]:
    """A lender with an open session."""
    async with RegistryClient(server.endpoint) as client, asyncio.TaskGroup() as group:
        lender = Lender(client, api_url, engine_id)
        run = group.create_task(lender.session.run())
        try:
            yield lender
        finally:
            run.cancel()
