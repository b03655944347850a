"""Sends what `messages.py` makes to a server, over every rpc, and judges each answer.

Allowed: an answer, or an error with google.rpc.ErrorInfo of our domain and a reason other than INTERNAL. What gRPC
itself refuses before we see it has no details: only a message above the size limit.
Invariant: every call and every read has a bound; a call that does not end within it is a fault.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from kvlease.registry.errors import ERROR_DOMAIN, Reason
from kvlease.registry.errors_grpc import DETAILS_KEY
from kvlease.registry.values import MAX_MESSAGE_BYTES
from kvlease.v1 import registry_pb2 as pb

from tests.fuzz.messages import RPCS, Maker

CALL_S: Final = 20.0
"""The longest bound inside the registry is 5 s."""
SAID: Final = 8
"""Messages on one stream at most."""
SHOWN_BYTES: Final = 200
STREAMS: Final = frozenset({"Session", "ResolveStream", "Watch"})
CLIENT_FAULT: Final = "Internal error from Core"
"""What grpc.aio's own client says, instead of the server's status, when a stream ends during a write."""
CUT: Final = "cut by the caller"
OK: Final = "OK"


@dataclass(slots=True)
class Verdicts:
    """What came of all messages so far."""

    messages: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By rpc and reason."""
    faults: list[str] = field(default_factory=list)


class Attacker:
    """One connection, one call at a time."""

    def __init__(self, channel: grpc.aio.Channel, maker: Maker, verdicts: Verdicts) -> None:
        self._channel: Final = channel
        self._maker: Final = maker
        self._verdicts: Final = verdicts

    async def call(self, rpc: str) -> None:
        """One call with everything that it sends."""
        raws = [self._maker.make(rpc)] if rpc != "Session" else self._session()
        if rpc in ("Session", "ResolveStream"):
            raws += [self._maker.make(rpc) for _ in range(self._maker.count(SAID) - 1)]
        self._verdicts.messages += len(raws)
        try:
            async with asyncio.timeout(CALL_S):
                outcome = await self._exchange(rpc, raws)
        except TimeoutError:
            outcome = "no end"
            self._fault(rpc, "not over within its time", raws)
        except grpc.aio.AioRpcError as error:
            outcome = self._judge(rpc, error, raws)
        self._verdicts.outcomes[rpc, outcome] += 1

    async def _exchange(self, rpc: str, raws: Sequence[bytes]) -> str:
        method = f"/kvlease.v1.Registry/{rpc}"
        if rpc not in STREAMS:
            unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(method)
            await unary(raws[0])
            return OK
        if rpc == "Watch":
            watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(method)
            news = watch(raws[0])
            await news.read()
            news.cancel()
            return CUT
        streams: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(method)
        stream = streams()
        in_step = self._maker.choose(0.6)
        try:
            for raw in raws:
                await stream.write(raw)
                if in_step and await stream.read() is grpc.aio.EOF:
                    break
        except asyncio.InvalidStateError:
            pass  # closed already: reading says why
        if self._maker.choose(0.3):
            stream.cancel()
            return CUT
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            pass
        if await stream.code() is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                await stream.code(), await stream.initial_metadata(), await stream.trailing_metadata()
            )
        return OK

    def _session(self) -> list[bytes]:
        """A session that starts well, mostly; what comes after its hello is what the maker makes, numbered right."""
        first = pb.SessionRequest(seq=1, hello=self._maker.hello())
        raws = [first.SerializeToString()]
        for seq in range(2, 2 + self._maker.count(SAID)):
            message = pb.SessionRequest()
            self._maker.say(message)
            message.seq = seq + 1 if self._maker.errs(0.05) else seq
            raws.append(message.SerializeToString())
        return raws[1:] if self._maker.errs(0.1) else raws

    def _judge(self, rpc: str, error: grpc.aio.AioRpcError, raws: Sequence[bytes]) -> str:
        code = error.code()
        reason = _reason(error)
        if reason is None:
            if error.details() == CLIENT_FAULT:
                return "closed while we wrote"
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED and max(map(len, raws)) > MAX_MESSAGE_BYTES:
                return "too large for gRPC"
            self._fault(rpc, f"{code.name} without a reason: {error.details()}", raws)
            return code.name
        if reason == Reason.INTERNAL:
            self._fault(rpc, "INTERNAL", raws)
        return reason

    def _fault(self, rpc: str, what: str, raws: Sequence[bytes]) -> None:
        shown = " ".join(raw[:SHOWN_BYTES].hex() for raw in raws)
        self._verdicts.faults.append(f"{rpc}: {what}; sent {shown[: 4 * SHOWN_BYTES]}")


def rpcs() -> list[str]:
    """Which rpc each of a round of calls goes to."""
    return list(RPCS)


def _reason(error: grpc.aio.AioRpcError) -> str | None:
    """The reason in the details, if they are ours."""
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        info = error_details_pb2.ErrorInfo()
        try:
            status = status_pb2.Status.FromString(value)
            found = any(detail.Unpack(info) for detail in status.details)
        except DecodeError:
            return None
        return str(info.reason) if found and info.domain == ERROR_DOMAIN else None
    return None
