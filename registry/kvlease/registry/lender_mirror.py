"""What one lender holds, and what the registry has yet to hear of it. Pure: no I/O, no clock, no protobuf.

`lender_session.py` carries it over the wire. `present` is the only source of a snapshot.
Invariants: a lease is held from `publish` until it is ended here, or the registry ends or refuses it; what is held
is exactly what the next snapshot says. Messages leave in the order in which things happened, neighbours of one kind
joined into one batch. While there is no stream nothing is queued: the next snapshot says it all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from kvlease.registry.batches import MESSAGE_ROOM_BYTES, publication_bytes
from kvlease.registry.values import (
    MAX_BATCH,
    EndReason,
    LeaseId,
    Publication,
    PublishResult,
    PublishStatus,
    RenewStatus,
)

MAX_QUEUED: Final = 65_536
"""Things the registry has yet to hear. Beyond it a new snapshot is cheaper than the queue."""


@dataclass(slots=True, kw_only=True)
class Publishes:
    """Leases to publish in one message."""

    items: list[Publication] = field(default_factory=list)
    size_bytes: int = 0

    def fits(self, size_bytes: int) -> bool:
        """Whether one more of that size stays under the limits."""
        return len(self.items) < MAX_BATCH and self.size_bytes + size_bytes <= MESSAGE_ROOM_BYTES


@dataclass(slots=True, kw_only=True)
class Ends:
    """Leases that ended, in one message."""

    items: list[tuple[LeaseId, EndReason]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Renewals:
    """Leases with their new deadlines on the lender's clock, in one message."""

    items: list[tuple[LeaseId, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A renewal that the lender declines."""

    lease_id: LeaseId
    status: RenewStatus


Batch = Publishes | Ends | Renewals | Refusal


class LenderMirror:
    """Commands in, batches out."""

    __slots__ = ("_ending", "_held", "_online", "_outbox", "_queued")

    def __init__(self) -> None:
        self._held: Final[dict[LeaseId, Publication]] = {}
        self._ending: Final[set[LeaseId]] = set()
        self._outbox: Final[deque[Batch]] = deque()
        self._queued = 0
        self._online = False

    def holds(self, lease_id: LeaseId) -> bool:
        """Whether the next snapshot would name this lease."""
        return lease_id in self._held

    @property
    def lease_ids(self) -> tuple[LeaseId, ...]:
        """Of the leases held."""
        return tuple(self._held)

    def __len__(self) -> int:
        """Leases held."""
        return len(self._held)

    @property
    def queued(self) -> int:
        """Things the registry has yet to hear."""
        return self._queued

    @property
    def overflowed(self) -> bool:
        """More was queued than MAX_QUEUED: the stream must be opened anew."""
        return self._queued > MAX_QUEUED

    # --- what the lender does ---

    def publish(self, publication: Publication) -> None:
        """A new lease."""
        self._held[publication.lease_id] = publication
        if not self._queues():
            return
        size_bytes = publication_bytes(publication)
        batch = self._last()
        if not isinstance(batch, Publishes) or not batch.fits(size_bytes):
            batch = Publishes()
            self._outbox.append(batch)
        batch.items.append(publication)
        batch.size_bytes += size_bytes

    def ended(self, lease_id: LeaseId, reason: EndReason) -> None:
        """The lender ended a lease, by itself or because it was told to. Unknown leases: nothing happens."""
        if lease_id in self._ending:
            self._ending.remove(lease_id)
        elif self._held.pop(lease_id, None) is None:
            return
        self._queue_end(lease_id, reason)

    def renewed(self, lease_id: LeaseId, deadline_ms: int) -> None:
        """The lender moved a lease's deadline; the blocks are pinned. Unknown leases: nothing happens."""
        publication = self._held.get(lease_id)
        if publication is None:
            return
        self._held[lease_id] = replace(publication, deadline_ms=deadline_ms, lapsed=False)
        if not self._queues():
            return
        batch = self._last()
        if not isinstance(batch, Renewals) or len(batch.items) == MAX_BATCH:
            batch = Renewals()
            self._outbox.append(batch)
        batch.items.append((lease_id, deadline_ms))

    def lapsed(self, lease_id: LeaseId) -> None:
        """A deadline has passed, the blocks went back. The registry knows by itself; only a snapshot must say it."""
        publication = self._held.get(lease_id)
        if publication is not None:
            self._held[lease_id] = replace(publication, lapsed=True)

    def refuse_renewal(self, lease_id: LeaseId, status: RenewStatus) -> None:
        """The lender declines a renewal."""
        if self._queues():
            self._outbox.append(Refusal(lease_id=lease_id, status=status))

    # --- what the registry says ---

    def told_to_end(self, lease_id: LeaseId, reason: EndReason) -> bool:
        """The registry has ended a lease; whether the lender must be told. Answered at once if it is not held."""
        if self._held.pop(lease_id, None) is not None:
            self._ending.add(lease_id)
            return True
        if lease_id not in self._ending:
            self._queue_end(lease_id, reason)
        return False

    def answered(self, result: PublishResult) -> tuple[bool, tuple[LeaseId, ...]]:
        """The registry's answer to a publish: whether it is news for the lender, and which leases it superseded.

        A lease that was refused is not held any more. Nothing more is said of it: under its id the registry may
        know another lender's lease.
        """
        news = result.lease_id in self._held
        if news and result.status is not PublishStatus.PUBLISHED:
            del self._held[result.lease_id]
        superseded = tuple(lease_id for lease_id in result.superseded if lease_id in self._held)
        for lease_id in superseded:
            del self._held[lease_id]
            self._ending.add(lease_id)
        return news, superseded

    # --- the stream ---

    def present(self) -> tuple[Publication, ...]:
        """A stream has opened: everything held, as of now. From here on changes are queued."""
        self._online = True
        self._outbox.clear()
        self._queued = 0
        return tuple(self._held.values())

    def disconnected(self) -> None:
        """The stream is gone, and with it what was queued."""
        self._online = False
        self._outbox.clear()
        self._queued = 0

    def next_batch(self) -> Batch | None:
        """The oldest batch, taken out; None if the registry has heard everything."""
        if not self._outbox:
            return None
        batch = self._outbox.popleft()
        self._queued -= 1 if isinstance(batch, Refusal) else len(batch.items)
        return batch

    def _queues(self) -> bool:
        """Whether there is a stream to queue for; counts what is about to be queued."""
        if not self._online:
            return False
        self._queued += 1
        if self.overflowed:
            self._outbox.clear()
            return False
        return True

    def _last(self) -> Batch | None:
        return self._outbox[-1] if self._outbox else None

    def _queue_end(self, lease_id: LeaseId, reason: EndReason) -> None:
        if not self._queues():
            return
        batch = self._last()
        if not isinstance(batch, Ends) or len(batch.items) == MAX_BATCH:
            batch = Ends()
            self._outbox.append(batch)
        batch.items.append((lease_id, reason))
