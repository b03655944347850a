"""One open stream to one member, whose every failure is a TryFailed. Used by the watch and by lease renewal.

Whoever opens a stream cancels it; cancelling is synchronous and may be done twice. Invariant: no exception of grpc.aio
but CancelledError of the waiting task itself passes.
"""

from __future__ import annotations

import asyncio
from typing import Final, Generic, cast

import grpc
import grpc.aio
from kvlease.etcd.calls import Calls, TryFailed, failed_try
from kvlease.etcd.endpoints import Endpoint, Method, Req, Res
from kvlease.etcd.faults import Fault


class Stream(Generic[Req, Res]):
    """Open it with `open_stream`."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Req, Res], calls: Calls, token: str) -> None:
        self._call: Final = call
        self._calls: Final = calls
        self.token: Final = token

    async def send(self, request: Req) -> None:
        """Raises TryFailed, or what etcd refused with."""
        try:
            await self._calls.own_cancellation(self._call.write(request))
        except grpc.aio.AioRpcError as error:
            raise failed_try(error, self.token) from error
        except asyncio.InvalidStateError as error:
            raise self._ended(str(error)) from error

    async def receive(self) -> Res:
        """Raises TryFailed, or what etcd refused with. Cancelling this cancels the stream."""
        try:
            response = await self._calls.own_cancellation(self._call.read())
        except grpc.aio.AioRpcError as error:
            raise failed_try(error, self.token) from error
        except asyncio.InvalidStateError as error:
            raise self._ended(str(error)) from error
        if response is grpc.aio.EOF:
            raise self._ended("the member ended the stream")
        return cast(Res, response)

    def cancel(self) -> None:
        self._call.cancel()

    def _ended(self, text: str) -> TryFailed:
        return TryFailed(Fault.IN_DOUBT, grpc.StatusCode.UNAVAILABLE, text, self.token)


async def open_stream(
    calls: Calls, endpoint: Endpoint, method: Method[Req, Res], *, connect_s: float, timeout_s: float | None
) -> Stream[Req, Res]:
    """A stream at `endpoint`, which ends after `timeout_s` if that is given. Raises TryFailed, ClientClosed."""
    metadata, token = await calls.prepare(endpoint, timeout_s=connect_s)
    return Stream(endpoint.stream(method, timeout_s=timeout_s, metadata=metadata), calls, token)
