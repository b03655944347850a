"""Resolves over one open stream: correlation ids out, answers in any order back.

A resolve is asked once, of one replica, unless that fails under it: then the next replica gets it, within its time.
Invariants: every resolve ends by its own time, with an answer or a typed error; no correlation id outlives its
caller; an answer that nobody waits for is dropped. What waits while a message is being written goes into the next
one, so a batch forms by itself under load and a lone resolve is never held back.
While no replica is to be had, resolves fail at once instead of using up their time; while one is looked for, they wait.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Final, NoReturn

import grpc.aio
from kvlease.registry.backoff import Backoff
from kvlease.registry.batches import MESSAGE_ROOM_BYTES
from kvlease.registry.client_calls import MOST_ASKED
from kvlease.registry.client_channel import ClientLimits
from kvlease.registry.client_replica import Replica, cancelled
from kvlease.registry.client_replicas import Replicas
from kvlease.registry.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvleaseError,
    MalformedAnswer,
    Overloaded,
    RegistryUnavailable,
)
from kvlease.registry.errors_grpc import from_rpc_error
from kvlease.registry.stream_writer import StreamOver, StreamWriter
from kvlease.registry.values import MAX_BATCH, Hit, Miss, ResolveQuery
from kvlease.registry.wire_resolve import check_query, decode_answer, fill_query
from kvlease.v1 import registry_pb2 as pb

StreamCall = grpc.aio.StreamStreamCall[pb.ResolveStreamRequest, pb.ResolveStreamResponse]


class ResolveStream:
    """One stream, kept open from the first resolve on. `run` must be running while `resolve` is used."""

    def __init__(self, replicas: Replicas, limits: ClientLimits, backoff: Backoff) -> None:
        self._replicas: Final = replicas
        self._limits: Final = limits
        self._backoff: Final = backoff
        self._waiting: Final[dict[int, _Asked]] = {}
        self._unsent: Final[dict[int, pb.CorrelatedResolve]] = {}
        self._wake: Final = asyncio.Event()
        self._next_id = 1
        self._down: KvleaseError | None = None
        self._late_answers = 0

    @property
    def outstanding(self) -> int:
        """Resolves that have neither an answer nor an error yet."""
        return len(self._waiting)

    @property
    def late_answers(self) -> int:
        """Answers that came after their caller had gone."""
        return self._late_answers

    async def resolve(self, query: ResolveQuery, *, timeout_ms: int) -> Hit | Miss:
        """The registry's answer.

        Raises InvalidRequest before anything is sent, RegistryUnavailable (or what the registry closed the stream
        with), DeadlineExceeded after `timeout_ms`, Overloaded if too many resolves wait, and MalformedAnswer.
        """
        if self._down is not None:
            raise self._down.again()
        if len(self._waiting) >= self._limits.max_waiting:
            raise Overloaded(f"{self._limits.max_waiting} resolves are waiting already")
        check_query(query)
        correlation_id = self._next_id
        self._next_id += 1
        item = pb.CorrelatedResolve(correlation_id=correlation_id)
        fill_query(item.request, query)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Hit | Miss] = loop.create_future()
        self._waiting[correlation_id] = _Asked(future, item)
        self._unsent[correlation_id] = item
        self._wake.set()
        timer = loop.call_later(timeout_ms / 1000, self._expire, future, timeout_ms)
        try:
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(correlation_id, None)
            self._unsent.pop(correlation_id, None)

    async def run(self) -> NoReturn:
        """Keep the stream open, for as long as this task lives. Opens nothing before the first resolve."""
        try:
            await self._wake.wait()
            while True:
                try:
                    replica = await self._replicas.connected()
                except RegistryUnavailable as away:
                    self._lose(away)
                    replica = await self._replicas.connected(patient=True)
                self._down = None
                error = await self._exchange(replica)
                if self._replicas.ended(replica, error):
                    self._ask_again(error)
                    continue
                self._lose(error)
                await asyncio.sleep(self._backoff.next_ms() / 1000)
        finally:
            self._lose(RegistryUnavailable("the client is closed"))

    async def _exchange(self, replica: Replica) -> KvleaseError:
        """Serve one stream to its end; why it ended."""
        call = replica.stub.ResolveStream()
        with replica.carrying(call):
            async with asyncio.TaskGroup() as group:
                return await self._read(replica, call, group.create_task(self._write(call)))

    async def _read(self, replica: Replica, call: StreamCall, writer: asyncio.Task[None]) -> KvleaseError:
        try:
            while isinstance(message := await call.read(), pb.ResolveStreamResponse):
                replica.heard()
                self._take(message)
            return RegistryUnavailable("the registry closed the stream")
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        except asyncio.CancelledError:
            if cancelled():
                raise
            return RegistryUnavailable("the registry was left")
        finally:
            writer.cancel()

    async def _write(self, call: StreamCall) -> None:
        stream = StreamWriter(call)
        try:
            while True:
                while self._unsent:
                    await stream.write(self._next_message())
                self._wake.clear()
                await self._wake.wait()
        except StreamOver:
            return  # the reader sees why

    def _next_message(self) -> pb.ResolveStreamRequest:
        message = pb.ResolveStreamRequest()
        room_bytes = MESSAGE_ROOM_BYTES
        for correlation_id, item in list(islice(self._unsent.items(), MAX_BATCH)):
            room_bytes -= item.ByteSize()
            if room_bytes < 0 and message.requests:
                break
            message.requests.append(item)
            del self._unsent[correlation_id]
        return message

    def _take(self, message: pb.ResolveStreamResponse) -> None:
        self._backoff.reset()
        for answer in message.answers:
            asked = self._waiting.get(answer.correlation_id)
            outcome: Hit | Miss | MalformedAnswer
            try:
                outcome = decode_answer(answer.response)
            except InvalidRequest as error:
                outcome = MalformedAnswer(f"answer to a resolve: {error.message}")
            # Last: a signal handler that cancels the caller may run between any two byte codes before.
            if asked is None or asked.future.done():
                self._late_answers += 1
            elif isinstance(outcome, MalformedAnswer):
                asked.future.set_exception(outcome)
            else:
                asked.future.set_result(outcome)

    def _ask_again(self, error: KvleaseError) -> None:
        """The stream has failed, another one follows: what was asked on it is asked on that one.

        Not for ever: it may be what the replicas fail over.
        """
        for correlation_id, asked in self._waiting.items():
            if asked.future.done() or correlation_id in self._unsent:
                continue
            asked.times += 1
            if asked.times > MOST_ASKED:
                asked.future.set_exception(error.again())
            else:
                self._unsent[correlation_id] = asked.item

    def _lose(self, error: KvleaseError) -> None:
        """No stream any more: nobody waits for it, and nobody starts to."""
        self._down = error
        self._unsent.clear()
        for asked in self._waiting.values():
            if not asked.future.done():
                asked.future.set_exception(error.again())

    def _expire(self, future: asyncio.Future[Hit | Miss], timeout_ms: int) -> None:
        if not future.done():
            future.set_exception(DeadlineExceeded(f"no answer to a resolve within {timeout_ms} ms"))
            self._replicas.doubt()


class _Asked:
    """A resolve that waits, and of how many replicas it was asked."""

    __slots__ = ("future", "item", "times")

    def __init__(self, future: asyncio.Future[Hit | Miss], item: pb.CorrelatedResolve) -> None:
        self.future: Final = future
        self.item: Final = item
        self.times = 1
