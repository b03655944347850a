"""Lease events for watchers: the latest ones by revision, and a cursor into them for each watcher.

Asyncio, no gRPC. All watchers share one bounded log, so a hundred of them cost no more memory than one.
Invariant: a watcher gets every event after its revision exactly once and in order, or it gets Compacted. It is never
skipped silently.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from types import TracebackType
from typing import Final, Self

from kvlease.registry.errors import Compacted, LimitReached
from kvlease.registry.values import LeaseEvent, LeaseEvents, LeaseFilter

EVENTS_PER_MESSAGE: Final = 512
"""Some 200 bytes each: far below the message limit."""


class EventLog:
    """The last `keep` events. Revisions are contiguous, so a revision is also a position."""

    def __init__(self, revision: int, *, keep: int = 65_536, max_watchers: int = 1_024) -> None:
        """`revision`: of the table when the log starts; `keep`: how far a watcher may fall behind, in events."""
        self.revision = revision
        self._keep: Final = keep
        self._max_watchers: Final = max_watchers
        self._events: deque[LeaseEvent] = deque(maxlen=keep)
        self._waiting: set[asyncio.Future[None]] = set()
        self._watchers = 0
        self._closed = False
        self.cuts = 0
        """How often all watches there were have been ended."""

    @property
    def watchers(self) -> int:
        return self._watchers

    def append(self, events: Sequence[LeaseEvent]) -> None:
        """The next events, in order of revision."""
        if events:
            self._events.extend(events)
            self.revision = events[-1].revision
            self._wake()

    def close(self) -> None:
        """End every watch, after what is there has been read."""
        self._closed = True
        self._wake()

    def cut(self) -> None:
        """End the watches there are, at once: what is here may not be told any more. Later ones are welcome."""
        self.cuts += 1
        self._wake()

    def watch(self, wanted: LeaseFilter, from_revision: int, *, current: Callable[[], bool] = lambda: True) -> Watch:
        """`current` says whether what is here may still be told; once it may not, the watch ends.

        Raises LimitReached; Compacted if events after `from_revision` (0: now) are gone, or never were here.
        """
        if self._watchers >= self._max_watchers:
            raise LimitReached("too many watchers", limit="max_watchers")
        cursor = from_revision or self.revision
        self._behind(cursor)
        self._watchers += 1
        return Watch(self, wanted, cursor, current)

    def leave(self) -> None:
        self._watchers -= 1

    async def read(self, cursor: int, *, wait_s: float) -> list[LeaseEvent] | None:
        """Some events after `cursor`; [] if none came within `wait_s`; None if the log is closed. Raises Compacted."""
        events = self._after(cursor, EVENTS_PER_MESSAGE)
        if events or self._closed:
            return events or None
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout(wait_s):
                await waiting
        except TimeoutError:
            return []
        finally:
            self._waiting.discard(waiting)
        return self._after(cursor, EVENTS_PER_MESSAGE) or (None if self._closed else [])

    def _behind(self, cursor: int) -> int:
        """How many events there are after `cursor`."""
        behind = self.revision - cursor
        if not 0 <= behind <= len(self._events):
            raise Compacted(f"events after revision {cursor} are not kept")
        return behind

    def _after(self, cursor: int, limit: int) -> list[LeaseEvent]:
        behind = self._behind(cursor)
        # From the near end: watchers that keep up are close to it, and a deque is a list of blocks.
        if behind <= limit:
            return list(reversed(list(islice(reversed(self._events), behind))))
        start = len(self._events) - behind
        return list(islice(self._events, start, start + limit))

    def _wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)


class Watch:
    """One watcher. A context manager, so that its place is given back."""

    def __init__(self, log: EventLog, wanted: LeaseFilter, cursor: int, current: Callable[[], bool]) -> None:
        self._log: Final = log
        self._current: Final = current
        self._wanted: Final = wanted
        self._cuts: Final = log.cuts
        self.revision = cursor
        """Everything up to here has been delivered."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._log.leave()

    @property
    def newest(self) -> int:
        """The log's revision: of the last event there is."""
        return self._log.revision

    async def next(self, *, wait_s: float) -> LeaseEvents | None:
        """The next events that match, maybe none (then only `revision` is news); None if the registry is going away.

        Raises Compacted.
        """
        events = await self._log.read(self.revision, wait_s=wait_s)
        if events is None or self._log.cuts != self._cuts or not self._current():
            return None
        if events:
            self.revision = events[-1].revision
        matching = tuple(event for event in events if self._matches(event))
        return LeaseEvents(revision=self.revision, events=matching, newest=self.newest)

    def _matches(self, event: LeaseEvent) -> bool:
        wanted, lease = self._wanted, event.lease
        return (
            (wanted.tenant is None or lease.tenant == wanted.tenant)
            and (wanted.engine_id is None or lease.engine_id == wanted.engine_id)
            and (wanted.conversation is None or lease.conversation == wanted.conversation)
        )
