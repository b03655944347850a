"""A lender's session under test, what it reports, and the registry's part played up to an acknowledged snapshot.

No assertions on behaviour beyond the handshake; those are in `test_lender_session.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from kvlease.registry.client import RegistryClient
from kvlease.registry.client_credentials import Credentials
from kvlease.registry.lender_session import LenderSession, SessionLimits
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
from kvlease.registry.wire import decode_publication, encode_publish_result
from kvlease.v1 import registry_pb2 as pb

from tests.integration.registry_peer import Peer, PeerStream, until

SessionPeer = PeerStream[pb.SessionRequest, pb.SessionResponse]
ENGINE = Engine(engine_id=EngineId("d-1"), incarnation=Incarnation(b"i" * 16), api_url="http://127.0.0.1:1")
QUICK = SessionLimits(backoff_first_ms=10, backoff_cap_ms=50, refused_pause_ms=30)
SELDOM_MS = 60_000


class SteppedClock:
    """A clock that goes when the test says so."""

    def __init__(self, now_ms: int) -> None:
        self.at_ms = now_ms

    def now_ms(self) -> int:
        return self.at_ms


@dataclass
class Heard:
    """What the session reported, in order."""

    events: list[tuple[object, ...]] = field(default_factory=list)

    def on_connected(self) -> None:
        self.events.append(("connected",))

    def on_disconnected(self) -> None:
        self.events.append(("disconnected",))

    def on_refused(self, reason: str, message: str) -> None:
        self.events.append(("refused", reason, message))

    def on_result(self, result: PublishResult) -> None:
        self.events.append(("result", result.lease_id, result.status))

    def on_end(self, lease_id: LeaseId, reason: EndReason) -> None:
        self.events.append(("end", lease_id, reason))

    def on_renew(self, lease_id: LeaseId, ttl_ms: int) -> None:
        self.events.append(("renew", lease_id, ttl_ms))


@dataclass
class Lender:
    session: LenderSession
    heard: Heard
    clock: SteppedClock
    running: asyncio.Task[None]

    async def hears(self, *event: object) -> None:
        await until(lambda: event in self.heard.events, f"{event} in {self.heard.events}")


def lending(
    endpoint: str, limits: SessionLimits = QUICK, credentials: Credentials | None = None
) -> AbstractAsyncContextManager[Lender]:
    return lending_by(RegistryClient(endpoint, credentials=credentials), limits)


@asynccontextmanager
async def lending_by(opening: RegistryClient, limits: SessionLimits = QUICK) -> AsyncIterator[Lender]:
    async with opening as client:
        heard, clock = Heard(), SteppedClock(1_000)
        session = LenderSession(client, ENGINE, clock=clock, listener=heard, limits=limits)
        running = asyncio.create_task(session.run())
        try:
            yield Lender(session, heard, clock, running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def publication(name: str, body: bytes = b"") -> Publication:
    return Publication(
        lease_id=LeaseId(name),
        tenant=DEFAULT_TENANT,
        conversation=ConversationId("c"),
        stride_tokens=64,
        block_count=2,
        size_bytes=0,
        deadline_ms=481_000,
        on_deadline=OnDeadline.LAPSE,
        fingerprint_hash=b"f" * 16,
        record=Record(digests=b"d" * 16, body=body),
    )


async def greet(stream: SessionPeer, interval_ms: int = SELDOM_MS) -> tuple[pb.Hello, list[Publication]]:
    """Play a registry's part up to the acknowledged snapshot; the Hello and what was presented."""
    first = await stream.next()
    assert (first.seq, first.WhichOneof("message")) == (1, "hello")
    await stream.send(pb.SessionResponse(welcome=pb.Welcome(heartbeat_interval_ms=interval_ms)))
    presented: list[Publication] = []
    while True:
        message = await stream.next()
        assert message.WhichOneof("message") == "snapshot"
        presented += map(decode_publication, message.snapshot.leases)
        if message.snapshot.last:
            await acknowledge(stream, message.seq)
            return first.hello, presented


async def acknowledge(stream: SessionPeer, seq: int, *results: PublishResult) -> None:
    ack = pb.Ack(seq=seq, results=map(encode_publish_result, results))
    await stream.send(pb.SessionResponse(ack=ack))


async def next_but_heartbeats(stream: SessionPeer) -> pb.SessionRequest:
    while (message := await stream.next()).WhichOneof("message") == "heartbeat":
        pass
    return message


async def open_session(registry: Peer) -> SessionPeer:
    stream = await registry.session()
    await greet(stream)
    return stream
