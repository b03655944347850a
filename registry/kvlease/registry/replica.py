"""A registry's part as one of several on a store: takes in what the others write, beats, and knows how current it is.

Asyncio, no gRPC. One task follows the store, one writes a beat each second, one looks how long ago one came back; what
that says about how current we are is reckoned in `staleness.py`.
Invariant: a batch is taken in before its beat counts, and nothing is answered on a beat that has not come back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NoReturn

from kvlease.registry.clock import Clock
from kvlease.registry.committer import STORE_RETRY_S, Committer
from kvlease.registry.errors import Compacted, RegistryUnavailable
from kvlease.registry.staleness import Staleness
from kvlease.registry.store import Followed, Store
from kvlease.registry.table import LeaseTable
from kvlease.registry.table_changes import Batch, StoreChange, StoredView

BEAT_S: Final = 1.0
"""Between two beats: other replicas learn so often how the lenders here are."""
LOOK_S: Final = 0.05
LOAD_WORK: Final = 64
"""Leases of a loaded store that are taken in before others get their turn: some milliseconds."""
BEAT_WAIT_S: Final = 2.0
"""For the store to take one."""

WARM_UP_MS: Final = 2_500
"""A replica that has just come waits so long at most, two beats and a little, to hear of the other homes how their
lenders are, before it says that it can serve: until then it would answer that they are suspect."""

MAX_STALENESS_MS: Final = 5_000
"""After so long without contact with a shared store, a registry answers nothing. Longer than etcd takes to elect."""

MAX_UNANSWERED_MS: Final = 1_500
"""A beat or a commit without an answer for so long: what is here may still be read, but lenders had better go to
another replica, if that one fares better."""

_log = logging.getLogger(__name__)


class Replica:
    """Follows one store for one table."""

    def __init__(
        self,
        table: LeaseTable,
        store: Store,
        clock: Clock,
        committer: Committer,
        *,
        max_staleness_ms: int,
        on_current: Callable[[bool], None],
        on_touch: Callable[[bool], None],
    ) -> None:
        """`on_current` hears when this replica becomes current, or has not been for `max_staleness_ms`.

        `on_touch` hears when the store answers it as it should, and when not.
        """
        self._table: Final = table
        self._store: Final = store
        self._clock: Final = clock
        self._committer: Final = committer
        self._staleness: Final = Staleness(
            max_ms=max_staleness_ms, max_under_way=2 * max_staleness_ms // int(BEAT_S * 1000) + 8
        )
        self._on_current: Final = on_current
        self._on_touch: Final = on_touch
        self._alone: Final = not store.shared
        self._told = False
        self._fault = ""
        self._beat_fault = ""
        self._told_touch = False
        self._warm = self._alone
        self._current_since_ms: int | None = None

    @property
    def staleness_ms(self) -> int | None:
        """At most so old is what this replica knows; None: it has never been current."""
        return 0 if self._alone else self._staleness.age_ms(self._clock.now_ms())

    @property
    def current(self) -> bool:
        """Whether what is here may be answered."""
        return self._alone or self._staleness.is_current(self._clock.now_ms())

    @property
    def in_touch(self) -> bool:
        """Whether the store answers, and this replica has heard how the lenders are."""
        if not self.current or not self._warm or self._committer.unanswered_ms > MAX_UNANSWERED_MS:
            return False
        return self._alone or self._staleness.unanswered_ms(self._clock.now_ms()) <= MAX_UNANSWERED_MS

    def check(self) -> None:
        """Raises RegistryUnavailable if this replica is not current."""
        if not self._alone and not self.current:
            raise RegistryUnavailable("this replica has no contact with the store: ask another one")

    async def follow(self) -> NoReturn:
        """Take in what is in the store and what others write. Until cancelled."""
        while True:
            try:
                async with self._committer.no_commit_under_way():
                    following = self._store.follow()
                    followed = await following.__aenter__()
                try:
                    await self._take_in(followed)
                finally:
                    await following.__aexit__(None, None, None)
            except Compacted as error:
                _log.warning("the store is loaded again: %s", error)
            except RegistryUnavailable as error:
                self._note(str(error))
                await asyncio.sleep(STORE_RETRY_S)

    async def look(self) -> NoReturn:
        """Say when this replica stops being current. Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._tell()

    async def beat(self) -> NoReturn:
        """Write beats. Until cancelled."""
        while True:
            started_ms = self._clock.now_ms()
            number = self._staleness.send(started_ms)
            try:
                async with asyncio.timeout(BEAT_WAIT_S):
                    await self._store.beat(number, self._table.beats(now_ms=started_ms))
                self._beat_fault = ""
            except RegistryUnavailable as error:
                if error.message != self._beat_fault:
                    _log.warning("the store does not take our beat: %s", error.message)
                    self._beat_fault = error.message
            except TimeoutError:
                _log.debug("beat %d did not reach the store within %.0f s", number, BEAT_WAIT_S)
            await asyncio.sleep(max(LOOK_S, BEAT_S - (self._clock.now_ms() - started_ms) / 1000))

    def _note(self, fault: str) -> None:
        """Each reason once, until the store can be read again."""
        if fault != self._fault:
            _log.warning("the store cannot be read: %s", fault)
        self._fault = fault

    async def _take_in(self, followed: Followed) -> None:
        self._fault = ""
        await self._load(followed)
        async for batch in followed.batches:
            self._apply(batch)
            if batch.beat_number is not None:
                self._staleness.came_back(batch.beat_number)
                self._tell()

    async def _load(self, followed: Followed) -> None:
        view, followed.view = followed.view, StoredView()  # else what has ended since is kept for as long as we follow
        pending, now_ms = self._committer.pending(followed.kept), self._clock.now_ms()
        self._committer.enqueue(self._table.replace(view, pending, now_ms=now_ms, rest_follows=True))
        rest: tuple[StoreChange, ...] = (*view.leases, *view.aliases)
        for start in range(0, len(rest), LOAD_WORK):
            self._apply(Batch(changes=rest[start : start + LOAD_WORK]))
            await asyncio.sleep(0)

    def _apply(self, batch: Batch) -> None:
        changes = self._table.apply(batch, now_ms=self._clock.now_ms())
        if changes:
            self._committer.enqueue(changes)

    def _tell(self) -> None:
        self._tell_current()
        self._warm_up()
        in_touch = self.in_touch
        if in_touch != self._told_touch:
            self._told_touch = in_touch
            if self._told and not in_touch:
                _log.info("the store has not answered for more than %d ms", MAX_UNANSWERED_MS)
            self._on_touch(in_touch)

    def _warm_up(self) -> None:
        if self._warm or not self.current:
            return
        now_ms = self._clock.now_ms()
        if self._current_since_ms is None:
            self._current_since_ms = now_ms
        self._warm = now_ms - self._current_since_ms >= WARM_UP_MS or self._table.all_heard()

    def _tell_current(self) -> None:
        current = self.current
        if current == self._told:
            return
        self._told = current
        if current:
            _log.info("current with the store")
        else:
            _log.warning("no contact with the store for %s ms: nothing is answered until there is", self.staleness_ms)
        self._on_current(current)
