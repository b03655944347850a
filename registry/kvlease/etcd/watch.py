"""A watch on a range of keys that goes on over endpoints: whole revisions in order, none lost, none twice.

Pulled by its reader: nothing is read ahead, so a slow reader is etcd's to wait for. Silence makes it ask whether its
member is there, and move on if not; the member's answer to that is a call of its own on the same connection, since
newer etcd may leave a progress request unanswered. Invariant: a stream is opened only after a linearizable read at the
same member has shown that etcd's history is still the one that was delivered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import grpc
from kvlease.etcd import codec
from kvlease.etcd.calls import Calls, Repeat, TryFailed
from kvlease.etcd.endpoints import Endpoint, Endpoints
from kvlease.etcd.errors import ClientClosed, Compacted, EtcdError, Unavailable
from kvlease.etcd.faults import Fault, judge
from kvlease.etcd.limits import EtcdLimits
from kvlease.etcd.methods import RANGE, STATUS, TXN, WATCH
from kvlease.etcd.streams import Stream, open_stream
from kvlease.etcd.values import GetResult, Opened, Revision, WatchItem
from kvlease.etcd.watch_order import WatchOrder
from kvlease.etcdv3 import etcd_pb2 as pb

log = logging.getLogger(__name__)

WatchStream = Stream[pb.WatchRequest, pb.WatchResponse]


class Watch:
    """An async iterator of WatchItems, and an async context manager that ends it. `EtcdClient.watch` makes it.

    For one reader. `__anext__` raises
    - Compacted: what comes next is gone. List again, and watch from there. The watch is over.
    - HistoryChanged: etcd was restored or replaced. Forget everything, list again. The watch is over.
    - AuthenticationFailed, PermissionDenied, Refused: etcd does not let us watch. The watch is over.
    - Unavailable: no member within `watch_timeout_ms`. Iterate again to go on where it was.
    - ClientClosed.
    Cancelling `__anext__` loses nothing.
    """

    def __init__(
        self,
        key: bytes,
        end: bytes,
        order: WatchOrder,
        *,
        previous: bool,
        calls: Calls,
        endpoints: Endpoints,
        limits: EtcdLimits,
        on_close: Callable[[Watch], None],
    ) -> None:
        self._key: Final = key
        self._end: Final = end
        self._order: Final = order
        self._previous: Final = previous
        self._calls: Final = calls
        self._endpoints: Final = endpoints
        self._limits: Final = limits
        self._on_close: Final = on_close
        self._items: Final[deque[WatchItem]] = deque()
        self._at: tuple[Endpoint, WatchStream] | None = None
        self._reading: asyncio.Task[pb.WatchResponse] | None = None
        self._progress_ordered = False
        self._fruitless = 0
        self._over: EtcdError | None = None
        self._closed = False

    @property
    def resume_revision(self) -> Revision | None:
        """What a watch that takes over from this one should start with; None before it has opened."""
        return self._items[0].revision if self._items else self._order.resume

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchItem:
        while not self._items:
            if self._over is not None:
                raise self._over
            if self._closed:
                raise StopAsyncIteration
            try:
                await (self._open() if self._at is None else self._receive(*self._at))
            except (Unavailable, ClientClosed):
                raise
            except EtcdError as error:
                self._drop()
                self._over = error
        return self._items.popleft()

    async def aclose(self) -> None:
        """End the watch; bounded. Idempotent."""
        self._closed = True
        self._on_close(self)
        reading = self._drop()
        if reading is not None:
            await asyncio.wait({reading}, timeout=self._limits.close_timeout_ms / 1000)

    def _drop(self) -> asyncio.Task[pb.WatchResponse] | None:
        """Cancel the stream; the next turn opens another one."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.add_done_callback(_forget_outcome)
            reading.cancel()
        at, self._at = self._at, None
        if at is not None:
            at[1].cancel()
        return reading

    async def _open(self) -> None:
        if self._fruitless:  # streams that end before they bring anything
            pause_ms = self._limits.backoff_first_ms << min(self._fruitless, 10)
            await asyncio.sleep(min(self._limits.backoff_cap_ms, pause_ms) / 1000)
        await self._calls.over_endpoints(self._open_at, repeat=Repeat.READ, timeout_ms=self._limits.watch_timeout_ms)

    async def _open_at(self, endpoint: Endpoint, timeout_s: float) -> None:
        now = await self._calls.attempt(
            endpoint, RANGE, pb.RangeRequest(key=self._key, keys_only=True), timeout_s=timeout_s
        )
        self._order.check_history(codec.header(now.header))
        await self._check_witness(endpoint, timeout_s)
        stream = await open_stream(self._calls, endpoint, WATCH, connect_s=timeout_s, timeout_s=None)
        try:
            async with asyncio.timeout(timeout_s):
                await stream.send(self._create_request())
                created = await stream.receive()
            self._check_cancelled(created, stream)
        except TimeoutError as error:
            stream.cancel()
            raise TryFailed(Fault.IN_DOUBT, grpc.StatusCode.DEADLINE_EXCEEDED, "no answer to a new watch") from error
        except BaseException:
            stream.cancel()
            raise
        if self._closed:
            stream.cancel()
            raise ClientClosed("the watch was closed while it opened")
        self._order.opened(created)
        self._at = (endpoint, stream)
        self._items.append(Opened(endpoint=endpoint.name, revision=Revision(created.header.revision)))

    async def _check_witness(self, endpoint: Endpoint, timeout_s: float) -> None:
        witness = self._order.witness()
        if witness is None:
            return
        request = codec.txn_request((), witness, ())
        try:
            answer = await self._calls.attempt(endpoint, TXN, request, timeout_s=timeout_s)
        except Compacted:
            return  # no evidence left; whether the watch can go on is etcd's to say
        then, before = codec.txn_result(answer, witness, ()).results
        if isinstance(then, GetResult) and isinstance(before, GetResult):
            self._order.check_witness(then, before)

    async def _receive(self, endpoint: Endpoint, stream: WatchStream) -> None:
        """Wait for one answer, or for silence."""
        if self._reading is None:
            self._reading = asyncio.create_task(stream.receive(), name=f"etcd watch at {endpoint.name}")
        await asyncio.wait({self._reading}, timeout=self._limits.watch_idle_ms / 1000)
        if self._closed:
            return
        try:
            if not self._reading.done():
                await self._check_member(endpoint, stream)
                return
            response = self._outcome(self._reading)
            self._reading = None
            self._check_cancelled(response, stream)
        except TryFailed as failed:
            log.info("etcd watch leaves %s: %s", endpoint.name, failed.text)
            if failed.fault is Fault.TOKEN:
                self._calls.forget(failed.token)
            else:
                self._endpoints.leave(endpoint)
            self._fruitless += 1
            self._drop()
            return
        self._fruitless = 0
        self._items.extend(self._order.take(response, progress_ordered=self._progress_ordered))

    async def _check_member(self, endpoint: Endpoint, stream: WatchStream) -> None:
        """Is the silent member there? Raises TryFailed if it is not. Asks for a progress notice, too."""
        check_s = self._limits.watch_check_ms / 1000
        try:
            status = await self._calls.attempt(endpoint, STATUS, pb.StatusRequest(), timeout_s=check_s)
            self._progress_ordered = orders_progress(status.version)
            async with asyncio.timeout(check_s):
                await stream.send(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
        except (TryFailed, TimeoutError) as error:
            if self._reading is not None and self._reading.done():
                return  # something came meanwhile; what it is decides
            if isinstance(error, TryFailed):
                raise
            raise TryFailed(Fault.IN_DOUBT, grpc.StatusCode.DEADLINE_EXCEEDED, "the watch's stream is stuck") from error

    def _outcome(self, reading: asyncio.Task[pb.WatchResponse]) -> pb.WatchResponse:
        try:
            return reading.result()
        except asyncio.CancelledError:
            if self._endpoints.is_open:
                raise TryFailed(Fault.IN_DOUBT, grpc.StatusCode.CANCELLED, "the watch's stream is gone") from None
            raise ClientClosed("the etcd client was closed") from None

    def _check_cancelled(self, response: pb.WatchResponse, stream: WatchStream) -> None:
        """Raises what it means if etcd cancelled the watch."""
        if response.compact_revision:
            text = f"etcd has compacted up to revision {response.compact_revision}, past {self._order.resume}"
            raise Compacted(text, compact_revision=Revision(response.compact_revision))
        if not response.canceled:
            return
        text, code = response.cancel_reason or "etcd cancelled the watch", grpc.StatusCode.UNKNOWN
        fault = judge(code, text)
        if "permission denied" in text:
            fault, code = Fault.TOKEN, grpc.StatusCode.PERMISSION_DENIED  # etcd 3.4 says so of stale tokens, too
        raise TryFailed(fault, code, text, stream.token)

    def _create_request(self) -> pb.WatchRequest:
        return pb.WatchRequest(
            create_request=pb.WatchCreateRequest(
                key=self._key,
                range_end=self._end,
                start_revision=self._order.request_revision,
                progress_notify=True,
                prev_kv=self._previous,
                fragment=True,
            )
        )


def orders_progress(version: str) -> bool:
    """Whether this etcd's answers to progress requests come after all events before them (etcd-io/etcd#15220)."""
    try:
        major, minor, patch = (int(part) for part in version.partition("-")[0].split("."))
    except ValueError:
        return False
    if (major, minor) == (3, 4):
        return patch >= 25
    return (major, minor, patch) >= (3, 5, 8)


def _forget_outcome(reading: asyncio.Task[pb.WatchResponse]) -> None:
    """Nobody waits for a dropped stream; without this asyncio would complain about its error."""
    if not reading.cancelled():
        reading.exception()
