"""A lender's session with the registry: kept open as long as it runs, and the way in for publishes and ends.

The asyncio shell around `lender_mirror.py`, on the channel of a `RegistryClient`. Everything but `run` and `goodbye`
returns at once and must be called on the event loop's thread.
Invariants: one writer numbers the messages, so numbers and order agree; each stream starts with Hello and a snapshot
of the mirror, which is how the registry learns of everything that happened while there was none; a registry that is
silent for `silence_ms` is left. A session never decides that a lease is over: the lender does, or the registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc.aio
from kvlease.registry.backoff import Backoff
from kvlease.registry.batches import publication_bytes, split
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_replica import cancelled
from kvlease.registry.client_replicas import Replicas
from kvlease.registry.clock import Clock
from kvlease.registry.errors import (
    DeadlineExceeded,
    EngineIdInUse,
    InvalidRequest,
    KvleaseError,
    LimitReached,
    MalformedAnswer,
    PermissionDenied,
    RegistryUnavailable,
    SessionGap,
    SessionReplaced,
    Unauthenticated,
    retry_hint_ms,
)
from kvlease.registry.errors_grpc import from_rpc_error
from kvlease.registry.lender_listener import LenderListener
from kvlease.registry.lender_mirror import LenderMirror
from kvlease.registry.lender_stream import LenderStream, encode_batch, wait
from kvlease.registry.stream_writer import StreamOver
from kvlease.registry.values import EndReason, Engine, LeaseId, Publication, RenewStatus
from kvlease.registry.wire import (
    decode_ended,
    decode_publication,
    decode_publish_result,
    encode_engine,
    encode_publication,
)
from kvlease.registry.wire_checks import check_id
from kvlease.v1 import registry_pb2 as pb

REFUSALS: Final = (EngineIdInUse, InvalidRequest, LimitReached, PermissionDenied, Unauthenticated)
"""Answers that a quick retry does not change: reported to the listener, tried again at the slow pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Bounds of a session's waits, in milliseconds."""

    welcome_timeout_ms: int = 2_000
    ack_ms: int = 200
    """A message that is not acknowledged for so long makes the client see whether the replica lives."""
    silence_ms: int = 5_000
    """Every message is acknowledged, heartbeats too; a registry that says nothing for so long is left."""
    goodbye_timeout_ms: int = 2_000
    backoff_first_ms: int = 200
    backoff_cap_ms: int = 1_000
    settled_ms: int = 5_000
    """A session that lasted so long makes the next pause a short one again."""
    refused_pause_ms: int = 2_000


class LenderSession:
    """Keeps the registry informed of what one lender holds. `run` it in a task, for the life of the engine."""

    def __init__(
        self,
        client: RegistryClient,
        engine: Engine,
        *,
        clock: Clock,
        listener: LenderListener,
        limits: SessionLimits | None = None,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        """`clock` is the lender's: the one its deadlines are of. `fraction` spreads reconnects: numbers in [0, 1)."""
        self._client: Final = client
        self._engine: Final = engine
        self._clock: Final = clock
        self._listener: Final = listener
        self._limits: Final = limits or SessionLimits()
        self._fraction: Final = fraction
        self._backoff: Final = Backoff(
            first_ms=self._limits.backoff_first_ms, cap_ms=self._limits.backoff_cap_ms, fraction=fraction
        )
        self._mirror: Final = LenderMirror()
        self._wake: Final = asyncio.Event()
        self._stopped: Final = asyncio.Event()
        self._keeper: asyncio.Task[KvleaseError | None] | None = None
        self._stream: LenderStream | None = None
        self._leaving = False
        self._free_blocks = 0
        self._total_blocks = 0

    @property
    def connected(self) -> bool:
        """Whether the registry knows every lease held."""
        return self._stream is not None and self._stream.presented

    @property
    def leases(self) -> int:
        """Leases that the next snapshot would name."""
        return len(self._mirror)

    # --- what the lender does: returns at once ---

    def publish(self, publication: Publication) -> None:
        """Make a lease resolvable, as soon as there is a registry. Raises InvalidRequest if it breaks a limit."""
        decode_publication(encode_publication(publication))
        self._mirror.publish(publication)
        self._wake.set()

    def ended(self, lease_id: LeaseId, reason: EndReason) -> None:
        """The lease is over and its seal is broken. Unknown leases: nothing happens."""
        self._mirror.ended(lease_id, reason)
        self._wake.set()

    def ended_all(self, reason: EndReason) -> None:
        """Every lease is over: the lender goes away."""
        for lease_id in self._mirror.lease_ids:
            self._mirror.ended(lease_id, reason)
        self._wake.set()

    def renewed(self, lease_id: LeaseId, deadline_ms: int) -> None:
        """The lease's deadline is now `deadline_ms` of the lender's clock, and its blocks are pinned."""
        self._mirror.renewed(lease_id, deadline_ms)
        self._wake.set()

    def lapsed(self, lease_id: LeaseId) -> None:
        """The lease's deadline has passed and its blocks went back to the pool, still readable."""
        self._mirror.lapsed(lease_id)

    def refuse_renewal(self, lease_id: LeaseId, status: RenewStatus) -> None:
        """Answer to `on_renew` when the lender declines."""
        self._mirror.refuse_renewal(lease_id, status)
        self._wake.set()

    async def heard(self, limit_s: float) -> bool:
        """Whether the registry has acknowledged all that was said so far, once it has: within `limit_s`.

        At once if there is no stream: the next one's snapshot will say it.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while (stream := self._stream) is not None and stream.presented:
                    if not self._mirror.queued and stream.acked >= stream.seq:
                        return True
                    await stream.progress()
        return False

    def pool(self, free_blocks: int, total_blocks: int) -> None:
        """The block pool as the next heartbeat reports it."""
        self._free_blocks = free_blocks
        self._total_blocks = total_blocks

    # --- the life of the session ---

    async def run(self) -> None:
        """Keep the session open until `goodbye` or cancellation.

        Raises RegistryUnavailable if the client is not open or is closed under it. Everything else that fails is tried
        again: within about `backoff_cap_ms` if the registry is away or the session was replaced, every
        `refused_pause_ms` or so if the registry refuses.
        """
        if self._keeper is not None:
            raise RuntimeError("a session runs once")
        replicas = self._client.replicas
        try:
            async with asyncio.TaskGroup() as group:
                keeper = self._keeper = group.create_task(self._keep(replicas), name="kvlease lender session")
        finally:
            self._stopped.set()
        error = None if keeper.cancelled() else keeper.result()
        if error is not None:
            raise error

    async def goodbye(self) -> None:
        """Tell the registry what it has yet to hear and that this lender goes; `run` then returns.

        Without a stream it ends `run` at once. Raises DeadlineExceeded after `goodbye_timeout_ms`; `run` has to be
        cancelled then.
        """
        self._leaving = True
        if self._keeper is None:
            return
        if self._stream is None or not self._stream.welcomed.is_set():
            self._keeper.cancel()
        self._wake.set()
        try:
            async with asyncio.timeout(self._limits.goodbye_timeout_ms / 1000):
                await self._stopped.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("the registry did not acknowledge the goodbye") from error

    async def _keep(self, replicas: Replicas) -> KvleaseError | None:
        """One stream after another; the error that ends the session, None after a goodbye."""
        loop = asyncio.get_running_loop()
        while not self._leaving:
            try:
                replica = await replicas.connected(patient=True)
            except RegistryUnavailable as closed:
                return closed
            started = loop.time()
            stream = LenderStream(replica, ack_ms=self._limits.ack_ms)
            error = await self._serve(stream)
            if error is None or self._leaving:
                return None
            if isinstance(error, SessionReplaced):
                # By an older hello of our own that was slow to reach the others, as well as by another process.
                self._listener.on_refused(error.reason.value, error.message)
            moved = await replicas.retire(replica) if stream.dismissed else replicas.ended(replica, error)
            if isinstance(error, REFUSALS):
                self._listener.on_refused(error.reason.value, error.message)
                # No longer than our own pause: what is in the way may go before the registry expects it to.
                pause_ms = min(retry_hint_ms(error) or self._limits.refused_pause_ms, self._limits.refused_pause_ms)
                pause_ms += int(self._fraction() * pause_ms / 2)
            elif moved and replicas.several and stream.presented:
                continue
            else:
                if (loop.time() - started) * 1000 >= self._limits.settled_ms:
                    self._backoff.reset()
                pause_ms = self._backoff.next_ms()
            await asyncio.sleep(pause_ms / 1000)
        return None

    async def _serve(self, stream: LenderStream) -> KvleaseError | None:
        """Serve one stream to its end; why it ended, None after an acknowledged goodbye."""
        self._stream = stream
        try:
            with stream.replica.carrying(stream.call):
                async with asyncio.TaskGroup() as group:
                    writer = group.create_task(self._write(stream))
                    try:
                        return await self._read(stream)
                    finally:
                        writer.cancel()
                        stream.call.cancel()
        finally:
            self._stream = None
            stream.over()
            self._mirror.disconnected()
            if stream.presented:
                self._listener.on_disconnected()

    # --- reading ---

    async def _read(self, stream: LenderStream) -> KvleaseError | None:
        try:
            while True:
                async with asyncio.timeout(self._patience_ms(stream) / 1000):
                    message = await stream.call.read()
                if not isinstance(message, pb.SessionResponse):
                    return None if self._leaving else RegistryUnavailable("the registry closed the session")
                stream.replica.heard()
                if message.HasField("reconnect"):
                    if self._client.replicas.several:  # until another one is in use, this one is better than none
                        self._client.replicas.release(stream.replica)
                        continue
                    stream.dismissed = True
                    return RegistryUnavailable("the registry goes away")
                self._take(stream, message)
                if stream.goodbye_seq and message.ack.seq >= stream.goodbye_seq:
                    return None
        except TimeoutError:
            return RegistryUnavailable("the registry is silent")
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        except asyncio.CancelledError:
            if cancelled():
                raise
            if stream.overflowed:
                return SessionGap("too much was queued: what is held is presented anew")
            return RegistryUnavailable("the registry was left, or the client was closed")
        except InvalidRequest as error:
            return MalformedAnswer(f"the registry's message: {error.message}")

    def _patience_ms(self, stream: LenderStream) -> int:
        if not stream.welcomed.is_set():
            return self._limits.welcome_timeout_ms
        return max(self._limits.silence_ms, 3 * stream.interval_ms)

    def _take(self, stream: LenderStream, message: pb.SessionResponse) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                stream.interval_ms = max(1, message.welcome.heartbeat_interval_ms)
                stream.acknowledged(1)
                stream.welcomed.set()
            case "ack":
                self._acknowledged(stream, message.ack)
            case "end":
                for ended in message.end.leases:
                    lease_id, reason = decode_ended(ended)
                    if self._mirror.told_to_end(lease_id, reason):
                        self._listener.on_end(lease_id, reason)
                self._wake.set()
            case "renew":
                lease_id = LeaseId(check_id("lease_id", message.renew.lease_id))
                if self._mirror.holds(lease_id):
                    self._listener.on_renew(lease_id, message.renew.ttl_ms)
                else:
                    self.refuse_renewal(lease_id, RenewStatus.UNKNOWN)
            case _:
                pass  # a newer registry may say more

    def _acknowledged(self, stream: LenderStream, ack: pb.Ack) -> None:
        for message in ack.results:
            result = decode_publish_result(message)
            news, superseded = self._mirror.answered(result)
            if news:
                self._listener.on_result(result)
            for lease_id in superseded:
                self._listener.on_end(lease_id, EndReason.SUPERSEDED)
        stream.acknowledged(ack.seq)
        if not stream.presented and 0 < stream.snapshot_seq <= ack.seq:
            stream.presented = True
            self._listener.on_connected()

    # --- writing ---

    async def _write(self, stream: LenderStream) -> None:
        try:
            hello = pb.Hello(engine=encode_engine(self._engine), now_lender_ms=self._clock.now_ms())
            await stream.send(pb.SessionRequest(hello=hello))
            await stream.welcomed.wait()
            await self._present(stream)
            await self._report(stream)
        except StreamOver:
            return  # the reader sees why

    async def _present(self, stream: LenderStream) -> None:
        parts = list(split(self._mirror.present(), publication_bytes)) or [[]]
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            snapshot = pb.Snapshot(leases=map(encode_publication, part), last=last)
            if last:
                stream.snapshot_seq = stream.seq + 1
            await stream.send(pb.SessionRequest(snapshot=snapshot))

    async def _report(self, stream: LenderStream) -> None:
        """Send what happens, in order, and heartbeats between; after a goodbye, nothing more."""
        loop = asyncio.get_running_loop()
        heartbeat_at = loop.time()
        while not self._mirror.overflowed:
            if loop.time() >= heartbeat_at:
                await stream.send(self._heartbeat())
                heartbeat_at = loop.time() + stream.interval_ms / 1000
            self._wake.clear()
            batch = self._mirror.next_batch()
            if batch is not None:
                await stream.send(encode_batch(batch))
            elif self._leaving:
                stream.goodbye_seq = stream.seq + 1
                await stream.send(pb.SessionRequest(goodbye=pb.Goodbye()))
                return
            else:
                await wait(self._wake, heartbeat_at - loop.time())
        stream.overflowed = True
        stream.call.cancel()

    def _heartbeat(self) -> pb.SessionRequest:
        heartbeat = pb.Heartbeat(
            now_lender_ms=self._clock.now_ms(), free_blocks=self._free_blocks, total_blocks=self._total_blocks
        )
        return pb.SessionRequest(heartbeat=heartbeat)
