"""One stream of a lender's session: its numbers, what it has presented, and how late its acknowledgements are.

Sends and counts; what is said and when is `lender_session.py`'s.
Invariant: one writer numbers the messages, so numbers and order agree. A message that is not acknowledged in time is
cause for doubt in the replica, no more: what a publish waits for may be slow.
"""

from __future__ import annotations

import asyncio
from typing import Final

import grpc.aio
from kvlease.registry.client_replica import Replica
from kvlease.registry.lender_mirror import Batch, Ends, Publishes, Renewals
from kvlease.registry.stream_writer import StreamWriter
from kvlease.registry.wire import (
    encode_ended,
    encode_publication,
    encode_renew_refused,
    encode_renewed,
)
from kvlease.v1 import registry_pb2 as pb

Call = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]


class LenderStream:
    """A stream's state: its call, its numbers, what its Welcome said."""

    __slots__ = (
        "_ack_ms",
        "_loop",
        "_moved",
        "_writer",
        "acked",
        "call",
        "dismissed",
        "goodbye_seq",
        "interval_ms",
        "overflowed",
        "presented",
        "replica",
        "seq",
        "snapshot_seq",
        "welcomed",
    )

    def __init__(self, replica: Replica, *, ack_ms: int) -> None:
        """Opens the stream on `replica`. `ack_ms`: a later acknowledgement is cause for doubt."""
        self._loop: Final = asyncio.get_running_loop()
        self._ack_ms: Final = ack_ms
        self.replica: Final = replica
        self.call: Final[Call] = replica.stub.Session()
        self._writer: Final = StreamWriter(self.call)
        self.seq = 0
        self.acked = 0
        self.snapshot_seq = 0
        self.goodbye_seq = 0
        self.interval_ms = 1_000
        self.presented = False
        self.overflowed = False
        self.dismissed = False
        self.welcomed: Final = asyncio.Event()
        self._moved: Final = asyncio.Event()

    async def send(self, message: pb.SessionRequest) -> None:
        """Number the message and send it. Raises StreamOver."""
        self.seq += 1
        message.seq = self.seq
        self._loop.call_later(self._ack_ms / 1000, self._check, self.seq)
        await self._writer.write(message)

    def acknowledged(self, seq: int) -> None:
        """The replica has acknowledged all messages up to `seq`."""
        self.acked = max(self.acked, seq)
        self._moved.set()

    def over(self) -> None:
        """The stream has ended."""
        self._moved.set()

    async def progress(self) -> None:
        """Wait for the next acknowledgement, or the stream's end. Bounded by the caller."""
        self._moved.clear()
        await self._moved.wait()

    def _check(self, seq: int) -> None:
        if self.acked < seq:
            self.replica.doubted.set()


async def wait(event: asyncio.Event, limit_s: float) -> None:
    """Wait for `event`, or for `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return


def encode_batch(batch: Batch) -> pb.SessionRequest:
    """As a message without a number."""
    if isinstance(batch, Publishes):
        return pb.SessionRequest(publish=pb.PublishBatch(leases=map(encode_publication, batch.items)))
    if isinstance(batch, Ends):
        return pb.SessionRequest(ended=pb.EndedBatch(ended=[encode_ended(*item) for item in batch.items]))
    if isinstance(batch, Renewals):
        return pb.SessionRequest(renewed=pb.RenewedBatch(renewed=[encode_renewed(*item) for item in batch.items]))
    return pb.SessionRequest(renew_refused=encode_renew_refused(batch.lease_id, batch.status))
