"""Calls at the level of bytes, the same for the echo and for the registry: what differs is the server alone.

Requests are serialised beforehand and answers are not parsed, so that the caller, who shares the machine with the
server, costs the same whoever answers. An answer that is too short to be a hit ends the run.
Invariant: every call and every read is bounded by `CALL_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Final, Self

import grpc
import grpc.aio
from kvlease.registry.client_channel import CLIENT_OPTIONS

CALL_S: Final = 10.0
WARM_CALLS: Final = 5
BATCH: Final = 32
"""Resolves or leases in one message, where they are batched."""


class AnswerTooShort(RuntimeError):
    """A server did not answer what the benchmark asks for, so its speed means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What to send to one method, in turns, and how long each answer must be at least."""

    method: str
    requests: Sequence[bytes]
    least_bytes: int

    def take(self, count: int) -> list[bytes]:
        return list(islice(cycle(self.requests), count))


class Wire:
    """A channel of its own to one server; use it as an async context manager."""

    def __init__(self, port: int) -> None:
        self._target: Final = f"127.0.0.1:{port}"
        self._open: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._open = grpc.aio.insecure_channel(self._target, options=CLIENT_OPTIONS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def once(self, method: str, request: bytes) -> bytes:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(method)
        return await call(request, timeout=CALL_S)

    async def warm(self, script: Script, *, stream: bool) -> None:
        """A few calls that do not count: connections, buffers and code paths exist afterwards."""
        measure = self.stream_latencies if stream else self.unary_latencies
        await measure(script, WARM_CALLS)

    async def unary_latencies(self, script: Script, count: int) -> list[float]:
        """One caller; microseconds of each call."""
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(script.method)
        samples: list[float] = []
        for request in script.take(count):
            began = time.perf_counter_ns()
            answer = await call(request, timeout=CALL_S)
            samples.append((time.perf_counter_ns() - began) / 1e3)
            _check(answer, script)
        return samples

    async def unary_seconds(self, script: Script, count: int, *, callers: int) -> float:
        """Many callers; how long all calls together take."""
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(script.method)
        left = iter(script.take(count))

        async def caller() -> None:
            for request in left:
                _check(await call(request, timeout=CALL_S), script)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(caller())
        return time.perf_counter() - began

    async def stream_latencies(self, script: Script, count: int) -> list[float]:
        """One caller on an open stream; microseconds from each message to its answer."""
        stream = self._stream(script.method)
        samples: list[float] = []
        try:
            async with asyncio.timeout(CALL_S + count / 100):
                for request in script.take(count):
                    began = time.perf_counter_ns()
                    await stream.write(request)
                    answer = await stream.read()
                    samples.append((time.perf_counter_ns() - began) / 1e3)
                    _check(answer, script)
        finally:
            stream.cancel()
        return samples

    async def stream_seconds(self, script: Script, count: int, *, window: int) -> float:
        """At most `window` messages without an answer; how long all of them together take."""
        stream = self._stream(script.method)
        free = asyncio.Semaphore(window)

        async def write() -> None:
            for request in script.take(count):
                await free.acquire()
                await stream.write(request)

        began = time.perf_counter()
        try:
            async with asyncio.timeout(CALL_S + count / 10), asyncio.TaskGroup() as group:
                group.create_task(write())
                for _ in range(count):
                    _check(await stream.read(), script)
                    free.release()
        finally:
            stream.cancel()
        return time.perf_counter() - began

    @property
    def _channel(self) -> grpc.aio.Channel:
        assert self._open is not None, "the channel is not open"
        return self._open

    def _stream(self, method: str) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(method)
        return call()


def _check(answer: object, script: Script) -> None:
    if not isinstance(answer, bytes) or len(answer) < script.least_bytes:
        raise AnswerTooShort(f"{script.method} gave {str(answer)[:80]!r} instead of {script.least_bytes} bytes")
