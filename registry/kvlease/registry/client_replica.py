"""One replica of the registry as a client knows it: its channel, what is open on it, and whether it lives.

No choice is made here; `client_replicas.py` has several and leaves one for another.
Invariant: once a replica is left, every stream on it is cancelled, and who carries one finds out at its next read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

import grpc
import grpc.aio
from kvlease.registry.client_addresses import Address
from kvlease.registry.errors import KvleaseError, RegistryUnavailable
from kvlease.registry.errors_grpc import from_rpc_error
from kvlease.v1 import registry_pb2 as pb
from kvlease.v1.registry_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from kvlease.v1.registry_pb2_grpc import RegistryAsyncStub  # exists in the stubs only

LEAVE_S: Final = 1.0
"""For single calls that are on their way when a replica is left."""

# The standard health service, by hand: the package for it is not in every engine's environment.
_HEALTH: Final = "/grpc.health.v1.Health/Check"
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Registry"].full_name.encode()
_QUESTION: Final = b"\x0a" + bytes([len(_SERVICE)]) + _SERVICE
_NOT_SERVING: Final = b"\x08\x02"
_SILENT: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_REASON: Final = "last error: "
_CERTIFICATE: Final = "CERTIFICATE_VERIFY_FAILED"
"""From here on it is said what is wrong with the registry's certificate."""


class Cancellable(Protocol):
    """A stream of gRPC."""

    def cancel(self) -> bool: ...


class Replica:
    """A replica with a channel of its own, made for it."""

    __slots__ = ("_calls", "_loop", "address", "channel", "doubted", "heard_s", "left", "since_s", "stub", "unwanted")

    def __init__(self, address: Address, channel: grpc.aio.Channel) -> None:
        """Needs a running event loop."""
        self._loop: Final = asyncio.get_running_loop()
        self._calls: Final[set[Cancellable]] = set()
        self.address: Final = address
        self.channel: Final = channel
        self.stub: Final[RegistryAsyncStub] = RegistryStub(channel)
        self.since_s: Final = self._loop.time()
        self.heard_s = self.since_s
        """When it last gave a sign of life."""
        self.doubted: Final = asyncio.Event()
        """Something was not answered in time."""
        self.unwanted: Final = asyncio.Event()
        """It still serves, and will not for long."""
        self.left: Final = asyncio.Event()

    def heard(self) -> None:
        """It has said something."""
        self.heard_s = self._loop.time()

    async def ask(self, *, timeout_ms: int) -> KvleaseError | None:
        """A ping by the health service; why it is not to be used, None if it is. Whoever has no such service lives.

        The time limit is kept by gRPC's own threads, so an answer counts that came in time while this one was busy.
        """
        ping: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(_HEALTH)
        try:
            answer = await ping(_QUESTION, timeout=timeout_ms / 1000)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:  # it has begun to listen, and not yet to serve
                self.heard()
                self.unwanted.set()
                return RegistryUnavailable("it does not serve yet")
            if error.code() not in _SILENT:
                self.heard()
                return None
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return RegistryUnavailable(f"no answer within {timeout_ms} ms")
            return _unreachable(error)
        except asyncio.CancelledError:
            if cancelled():
                raise
            return RegistryUnavailable("the connection was closed")
        self.heard()
        if answer != _NOT_SERVING:
            return None
        self.unwanted.set()
        return RegistryUnavailable("it does not serve now")

    @contextmanager
    def carrying(self, call: Cancellable) -> Iterator[None]:
        """`call` is a stream on this replica, and ends with it."""
        self._calls.add(call)
        if self.left.is_set():
            call.cancel()
        try:
            yield
        finally:
            self._calls.discard(call)
            call.cancel()

    def leave(self) -> None:
        """Nothing new is to be asked of it."""
        self.left.set()
        for call in tuple(self._calls):
            call.cancel()

    async def close(self, *, at_once: bool = False) -> None:
        """Close the channel, unless `at_once` when single calls have ended, for which they have LEAVE_S."""
        self.leave()
        await self.channel.close(None if at_once else LEAVE_S)


def cancelled() -> bool:
    """In an `except CancelledError`: whether it was this task, and not only the call that it waits for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _unreachable(error: grpc.aio.AioRpcError) -> KvleaseError:
    """In the few words that matter of gRPC's many."""
    typed = from_rpc_error(error)
    text = typed.message.rpartition(_REASON)[2].removesuffix(": OK")  # the status of what went well until then
    certificate = text.find(_CERTIFICATE)
    text = text[certificate:] if certificate >= 0 else text.rpartition(": ")[2]
    return RegistryUnavailable(text or typed.message)
