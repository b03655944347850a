"""Single calls of the registry's client: asked of the current replica, and of the next one where that fails.

Knows no rpc. Every call of the contract may be repeated, so one that failed with its replica is asked of another while
there is time; no more than MOST_ASKED, because it may be what they fail over.
Invariant: what fails is a typed error, and a replica that is to blame is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import grpc.aio
from kvlease.registry.client_replica import Replica, cancelled
from kvlease.registry.client_replicas import Replicas
from kvlease.registry.errors import DeadlineExceeded, RegistryUnavailable
from kvlease.registry.errors_grpc import from_rpc_error

if TYPE_CHECKING:
    from kvlease.v1.registry_pb2_grpc import RegistryAsyncStub  # exists in the stubs only

MOST_ASKED: Final = 3
"""Replicas that are asked the same, each after the one before has failed over it."""

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)
Message = TypeVar("Message")
Value = TypeVar("Value")


class UnaryMethod(Protocol[Request, Response]):
    """One unary rpc of the stub."""

    def __call__(self, request: Request, /, *, timeout: float | None = None) -> Awaitable[Response]: ...


Method = Callable[["RegistryAsyncStub"], UnaryMethod[Message, Value]]
"""Which rpc: `lambda stub: stub.Locate`."""


class Calls:
    """Calls on `replicas`."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas: Final = replicas

    async def call(self, method: Method[Message, Value], request: Message, *, timeout_ms: int) -> Value:
        """The answer, within `timeout_ms` in all."""
        deadline_s = self._now_s() + timeout_ms / 1000

        async def ask(replica: Replica) -> Value:
            left_ms = int((deadline_s - self._now_s()) * 1000)
            return await self.ask(replica, method, request, timeout_ms=left_ms)

        return await self.of_one(ask, timeout_ms=timeout_ms)

    async def of_one(self, work: Callable[[Replica], Awaitable[Value]], *, timeout_ms: int) -> Value:
        """What `work` returns, all of it done with one replica; from the start with the next one where that fails.

        `timeout_ms`: for finding one.
        """
        for _ in range(MOST_ASKED - 1):
            try:
                return await work(await self.replica(timeout_ms=timeout_ms))
            except RegistryUnavailable:
                if self._replicas.down is not None:
                    raise self._replicas.down.again() from None
        return await work(await self.replica(timeout_ms=timeout_ms))

    async def replica(self, *, timeout_ms: int) -> Replica:
        """The current one. Raises RegistryUnavailable if all have failed, DeadlineExceeded if that is not known yet."""
        current = self._replicas.current
        if current is not None:
            return current
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._replicas.connected()
        except TimeoutError as error:
            raise DeadlineExceeded(f"no connection to the registry within {timeout_ms} ms") from error

    async def ask(
        self, replica: Replica, method: Method[Message, Value], request: Message, *, timeout_ms: int
    ) -> Value:
        """The answer of this replica."""
        try:
            answer = await method(replica.stub)(request, timeout=max(0, timeout_ms) / 1000)
        except grpc.aio.AioRpcError as error:
            typed = from_rpc_error(error)
            if isinstance(typed, RegistryUnavailable):
                self._replicas.leave(replica, typed)
            elif isinstance(typed, DeadlineExceeded):
                self._replicas.doubt()
            else:
                replica.heard()
            raise typed from error
        except asyncio.CancelledError as error:
            if cancelled():
                raise
            # Not this task was cancelled but its call: the replica was left, or the channel closed under it.
            raise RegistryUnavailable("the connection was closed") from error
        replica.heard()
        return answer

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
