"""Writing to a stream that the peer may close at the same moment, without losing what it closes it with.

grpc.aio's own `write` makes INTERNAL of a message that could not be sent because the peer has ended the stream, and
puts that in the place of the peer's status: whoever reads then learns that something failed, not that its session was
replaced. So messages go past that method, to the call beneath; where there is none, `write` has to do.
Invariant: a failed write says only that the stream is over. What it ended with is the reader's to find out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import grpc.aio
from google.protobuf.message import Message

Request = TypeVar("Request", bound=Message)
Send = Callable[[bytes], Awaitable[None]]


class StreamOver(Exception):
    """The stream has ended; a read says with what."""


class StreamWriter(Generic[Request]):
    """The one writer of a stream. Not to be mixed with the call's own `write`."""

    __slots__ = ("_call", "_send", "_started")

    def __init__(self, call: grpc.aio.StreamStreamCall[Request, Any]) -> None:
        self._call: Final = call
        self._send: Final[Send | None] = getattr(getattr(call, "_cython_call", None), "send_serialized_message", None)
        self._started = False

    async def write(self, message: Request) -> None:
        """Send one message. Raises StreamOver."""
        try:
            if self._send is None:
                await self._call.write(message)
                return
            if not self._started:
                await self._call.wait_for_connection()
                self._started = True
            if self._call.done():
                raise StreamOver
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise StreamOver from error
        try:
            await self._send(message.SerializeToString())
        except asyncio.CancelledError:
            self._call.cancel()  # half a message may be out
            raise
        except Exception as error:  # the type of a failed send is not public
            raise StreamOver from error
