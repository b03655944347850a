"""What is on its way to one lender over its open session: acknowledgements, ends, renewals, and the end of the session.

Asyncio, no gRPC: the servicer takes from here and writes. Filled without waiting, so that nothing that happens to a
lease waits for a slow lender. Bounded: a lender that does not read loses its session, and learns what it missed when it
presents its leases again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvlease.registry.errors import KvleaseError, Overloaded
from kvlease.registry.table_changes import SessionId
from kvlease.registry.values import EndReason, LeaseId, PublishResult

MAX_WAITING: Final = 65_536
"""Messages and lease ids that wait for a lender: all leases of a large engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Message `seq` has been applied; `results` if it published."""

    seq: int
    results: Sequence[PublishResult] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    leases: tuple[tuple[LeaseId, EndReason], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    lease_id: LeaseId
    ttl_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GoElsewhere:
    """This replica is going away."""


Message = Ack | Ends | Renewal | GoElsewhere


class Outbox:
    """Filled by the shell, emptied by the one writer of the session's stream."""

    def __init__(self, session: SessionId) -> None:
        self.session: Final = session
        self._messages: list[Ack | Renewal | GoElsewhere] = []
        self._ends: list[tuple[LeaseId, EndReason]] = []
        self._error: KvleaseError | None = None
        self._finished = False
        self._news = asyncio.Event()

    def ack(self, seq: int, results: Sequence[PublishResult] = ()) -> None:
        self._add(Ack(seq=seq, results=results))

    def renew(self, lease_id: LeaseId, ttl_ms: int) -> None:
        self._add(Renewal(lease_id=lease_id, ttl_ms=ttl_ms))

    def go_elsewhere(self) -> None:
        self._add(GoElsewhere())

    def end(self, lease_id: LeaseId, reason: EndReason) -> None:
        """Joined with other ends that wait."""
        self._ends.append((lease_id, reason))
        self._check_room()

    def close(self, error: KvleaseError) -> None:
        """The stream ends with `error`, at once."""
        self._error = self._error or error
        self._news.set()

    def finish(self) -> None:
        """The stream ends in good order, after what waits has been written."""
        self._finished = True
        self._news.set()

    async def take(self, *, max_ends: int) -> list[Message] | None:
        """What is to be written now, `max_ends` ends to a message; None when finished. Raises the error of `close`."""
        await self._news.wait()
        if self._error is not None:
            raise self._error
        messages: list[Message] = list(self._messages)
        ends = self._ends
        messages.extend(Ends(leases=tuple(ends[i : i + max_ends])) for i in range(0, len(ends), max_ends))
        self._messages, self._ends = [], []
        if self._finished and not messages:
            return None
        if not self._finished:
            self._news.clear()
        return messages

    def _add(self, message: Ack | Renewal | GoElsewhere) -> None:
        self._messages.append(message)
        self._check_room()

    def _check_room(self) -> None:
        if len(self._messages) + len(self._ends) > MAX_WAITING:
            self.close(Overloaded("the lender does not read what it is sent"))
        self._news.set()
