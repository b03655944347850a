"""Calls over the endpoints: deadline on each, another endpoint after a failure, a fresh token when etcd wants one.

Every kind of call goes through `over_endpoints`: unary ones, opening a watch, renewing leases. Invariant: what may not
be repeated is sent once at most; waiting for a connection and being refused before a proposal do not count as sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Final, TypeVar

import grpc
import grpc.aio
from kvlease.etcd.endpoints import Endpoint, Endpoints, Metadata, Method, Req, Res
from kvlease.etcd.errors import AnswerTooLarge, ClientClosed, Doubtful, Unavailable
from kvlease.etcd.faults import Fault, judge, refusal
from kvlease.etcd.limits import EtcdLimits
from kvlease.etcd.login import Login
from kvlease.etcd.methods import STATUS
from kvlease.etcdv3 import etcd_pb2 as pb

T = TypeVar("T")

_HAS_LEADER: Final = (("hasleader", "true"),)
"""Else a member that lost its leader keeps a watch open and silent."""
_WHY_S: Final = 0.1
"""For gRPC to say why it has no connection; it does at once."""
_MAX_LOGINS: Final = 2
"""Fresh tokens that one call asks for."""


class Repeat(Enum):
    """Whether a call may be made again when its outcome is unknown."""

    READ = auto()
    CHANGE = auto()
    """Yes, and it changes something."""
    NEVER = auto()


class TryFailed(Exception):
    """One try at one endpoint failed; `token` is the one it used. Never leaves the package."""

    def __init__(self, fault: Fault, code: grpc.StatusCode, text: str, token: str = "") -> None:
        super().__init__(text)
        self.fault: Final = fault
        self.code: Final = code
        self.text: Final = text
        self.token: Final = token


def failed_try(error: grpc.aio.AioRpcError, token: str) -> Exception:
    """What to raise for a failed call: the refusal as a typed error, or TryFailed."""
    code, details = error.code(), error.details() or ""
    fault = judge(code, details)
    return refusal(code, details) if fault is Fault.REFUSED else TryFailed(fault, code, details, token)


class Pace:
    """The time that a call has left, and its pauses: one after every endpoint has failed, longer each time."""

    def __init__(self, limits: EtcdLimits, endpoints: int, timeout_ms: int) -> None:
        self._loop: Final = asyncio.get_running_loop()
        self._end_s: Final = self._loop.time() + timeout_ms / 1000
        self._endpoints: Final = endpoints
        self._pause_ms = limits.backoff_first_ms
        self._cap_ms: Final = limits.backoff_cap_ms
        self._tries = 0

    @property
    def left_s(self) -> float:
        return self._end_s - self._loop.time()

    async def again(self) -> bool:
        """Pause if it is time to; False if there is no time for another try."""
        self._tries += 1
        if self._tries % self._endpoints == 0:
            await asyncio.sleep(max(0.0, min(self._pause_ms / 1000, self.left_s)))
            self._pause_ms = min(self._cap_ms, self._pause_ms * 2)
        return self.left_s > 0


class Calls:
    """Makes calls for one client."""

    def __init__(self, endpoints: Endpoints, login: Login, limits: EtcdLimits) -> None:
        self._endpoints: Final = endpoints
        self._login: Final = login
        self._limits: Final = limits

    async def unary(
        self, method: Method[Req, Res], request: Req, *, repeat: Repeat, timeout_ms: int | None = None
    ) -> Res:
        """The answer. Raises Unavailable, Doubtful, ClientClosed, or what etcd refused with."""

        async def attempt(endpoint: Endpoint, timeout_s: float) -> Res:
            return await self.attempt(endpoint, method, request, timeout_s=timeout_s)

        try:
            return await self.over_endpoints(attempt, repeat=repeat, timeout_ms=timeout_ms)
        except AnswerTooLarge as error:
            if repeat is Repeat.READ:
                raise
            raise Doubtful(f"the answer to a change could not be read: {error}") from error

    async def over_endpoints(
        self,
        attempt: Callable[[Endpoint, float], Awaitable[T]],
        *,
        repeat: Repeat,
        timeout_ms: int | None = None,
    ) -> T:
        """Try at the current endpoint and then at others until one works, within `timeout_ms`.

        `attempt` gets an endpoint and the seconds it may take, and raises TryFailed. Raises as `unary` does.
        """
        timeout_ms = self._limits.call_timeout_ms if timeout_ms is None else timeout_ms
        pace = Pace(self._limits, len(self._endpoints), timeout_ms)
        logins = 0
        in_doubt = False
        while True:
            endpoint = self._endpoints.current
            try:
                return await attempt(endpoint, max(0.001, min(self._limits.try_timeout_ms / 1000, pace.left_s)))
            except TryFailed as failed:
                if failed.fault is Fault.TOKEN:
                    logins += 1
                    if logins > _MAX_LOGINS or not self._login.forget(failed.token):
                        raise refusal(failed.code, failed.text) from failed
                    continue
                last = failed
            self._endpoints.leave(endpoint)
            in_doubt |= last.fault is Fault.IN_DOUBT and repeat is not Repeat.READ
            if in_doubt and repeat is Repeat.NEVER:
                raise Doubtful(f"{endpoint.name} did not say what became of a change: {last.text}") from last
            if await pace.again():
                continue
            text = f"no etcd endpoint answered within {timeout_ms} ms; {endpoint.name} said: {last.text}"
            raise (Doubtful(text) if in_doubt else Unavailable(text)) from last

    async def unary_at(
        self, endpoint: Endpoint, method: Method[Req, Res], request: Req, *, timeout_ms: int | None = None
    ) -> Res:
        """The answer of this very endpoint, leader or not, tried once; for reads. Raises as `unary` does."""
        timeout_ms = self._limits.try_timeout_ms if timeout_ms is None else timeout_ms
        try:
            return await self.attempt(endpoint, method, request, timeout_s=timeout_ms / 1000, needs_leader=False)
        except TryFailed as failed:
            raise Unavailable(f"{endpoint.name} did not answer within {timeout_ms} ms: {failed.text}") from failed

    def forget(self, token: str) -> None:
        """etcd has refused this token: the next call fetches another one."""
        self._login.forget(token)

    async def attempt(
        self,
        endpoint: Endpoint,
        method: Method[Req, Res],
        request: Req,
        *,
        timeout_s: float,
        needs_leader: bool = True,
    ) -> Res:
        """One try at `endpoint`. Raises TryFailed, ClientClosed, or what etcd refused with."""
        metadata, token = await self.prepare(endpoint, timeout_s=timeout_s)
        if not needs_leader:
            metadata = metadata[len(_HAS_LEADER) :]
        try:
            return await self.own_cancellation(endpoint.unary(method, request, timeout_s=timeout_s, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            raise failed_try(error, token) from error

    async def prepare(self, endpoint: Endpoint, *, timeout_s: float) -> tuple[Metadata, str]:
        """Wait for a connection and a token: the call's metadata, and the token in it. Raises TryFailed."""
        if not self._endpoints.is_open:
            raise ClientClosed("the etcd client is closed")
        if not endpoint.ready and not await endpoint.connected(min(self._limits.connect_timeout_ms / 1000, timeout_s)):
            raise TryFailed(Fault.NOT_DONE, grpc.StatusCode.UNAVAILABLE, await self._why_not(endpoint))
        token = await self._token(endpoint, timeout_s)
        if not self._endpoints.is_open:
            raise ClientClosed("the etcd client was closed")
        return ((*_HAS_LEADER, ("token", token)) if token else _HAS_LEADER), token

    async def own_cancellation(self, waiting: Awaitable[T]) -> T:
        """Await a call. grpc.aio cancels whoever waits when a channel closes: that is ClientClosed, no cancellation."""
        try:
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._endpoints.is_open or (task is not None and task.cancelling()):
                raise
            raise ClientClosed("the etcd client was closed during the call") from None

    async def _why_not(self, endpoint: Endpoint) -> str:
        """Why there is no connection; gRPC says so to a call only, which ends at once."""
        if endpoint.refused:
            try:
                await endpoint.unary(STATUS, pb.StatusRequest(), timeout_s=_WHY_S, metadata=())
            except grpc.aio.AioRpcError as error:
                return error.details() or "no connection"
        return "no connection in time"

    async def _token(self, endpoint: Endpoint, timeout_s: float) -> str:
        try:
            return await self._login.token(endpoint, timeout_s=timeout_s)
        except grpc.aio.AioRpcError as error:
            failed = failed_try(error, "")
            if isinstance(failed, TryFailed):  # a login is no change: another endpoint may do it
                failed = TryFailed(Fault.NOT_DONE, failed.code, failed.text)
            raise failed from error
        except TimeoutError as error:
            raise TryFailed(Fault.NOT_DONE, grpc.StatusCode.DEADLINE_EXCEEDED, "no token in time") from error
