"""Carries out what commands brought about, in one order: store, then watchers, then lenders and callers.

One task writes; commands only queue up and wait. Whatever waits is stored as one batch, so a slow store is asked seldom
and not once a command.
Invariant: changes are carried out in the order in which the table made them, and nobody hears of a change that the
store does not hold.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, NoReturn

from kvlease.registry.errors import Overloaded, RegistryUnavailable
from kvlease.registry.store import Store
from kvlease.registry.table_changes import Changes, StoreChange

MAX_WAITING: Final = 262_144
"""Changes that wait for the store, as many as a large fleet presents at once; while there are more, no command is begun
that would bring others."""
MAX_TOGETHER: Final = 1_024
"""Changes asked of the store at once, unless one command has more: a few of its transactions."""
COMMIT_WAIT_S: Final = 5.0
"""How long a command waits for the store. What it did is still stored later; repeating it is safe."""
STORE_RETRY_S: Final = 0.2

_log = logging.getLogger(__name__)


class Committer:
    """Queue of changes, and the loop that carries them out."""

    def __init__(self, store: Store, deliver: Callable[[Changes], None]) -> None:
        """`deliver` tells watchers, lenders and callers; it must not wait."""
        self._store: Final = store
        self._deliver: Final = deliver
        self._waiting: deque[tuple[Changes, asyncio.Future[None]]] = deque()
        self._waiting_changes = 0
        self._news = asyncio.Event()
        self._busy = False
        self._storing: list[StoreChange] = []
        self._lock = asyncio.Lock()
        self._asked_s: float | None = None
        """Since when the store has owed the answer to a commit."""
        self._fault = ""

    def check_room(self) -> None:
        """Before a command changes anything. Raises Overloaded if too much waits for the store already."""
        if self._waiting_changes > MAX_WAITING:
            raise Overloaded("too many changes wait for the store")

    async def carry_out(self, changes: Changes) -> None:
        """Wait until `changes`, and all before them, are stored and delivered.

        Raises RegistryUnavailable if the store takes too long.
        """
        if not changes and not self._waiting and not self._busy:
            return
        done = self.enqueue(changes)
        try:
            async with asyncio.timeout(COMMIT_WAIT_S):
                await asyncio.shield(done)
        except TimeoutError as error:
            raise RegistryUnavailable("the store does not answer") from error

    def enqueue(self, changes: Changes) -> asyncio.Future[None]:
        """Carry `changes` out without waiting for it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((changes, done))
        self._waiting_changes += len(changes.stored)
        self._news.set()
        return done

    def pending(self, kept: int) -> list[StoreChange]:
        """What is not known to be stored yet, in order. `kept`: of the commit under way so much is."""
        return [*self._storing[kept:], *(change for changes, _ in self._waiting for change in changes.stored)]

    @property
    def unanswered_ms(self) -> int:
        """For so long the store has owed the answer to a commit; 0 if it owes none."""
        return 0 if self._asked_s is None else int((asyncio.get_running_loop().time() - self._asked_s) * 1000)

    def no_commit_under_way(self) -> AbstractAsyncContextManager[None]:
        """The store is asked for nothing inside; commands queue up as ever."""
        return self._lock

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await self._news.wait()
            batch = self._take()
            self._busy = True
            self._storing = [change for changes, _ in batch for change in changes.stored]
            if self._storing:
                await self._store_all(self._storing)
            self._storing = []
            for changes, done in batch:
                self._deliver(changes)
                if not done.done():
                    done.set_result(None)
            self._busy = False

    def _take(self) -> list[tuple[Changes, asyncio.Future[None]]]:
        """Commands in their order, until their changes are enough for one commit; at least one."""
        taken: list[tuple[Changes, asyncio.Future[None]]] = []
        count = 0
        while self._waiting and (not taken or count + len(self._waiting[0][0].stored) <= MAX_TOGETHER):
            taken.append(self._waiting.popleft())
            count += len(taken[-1][0].stored)
        self._waiting_changes -= count
        if not self._waiting:
            self._news.clear()
        return taken

    async def _store_all(self, stored: list[StoreChange]) -> None:
        self._asked_s = asyncio.get_running_loop().time()
        tries = 0
        while True:
            try:
                async with self._lock:
                    await self._store.commit(stored)
            except RegistryUnavailable as error:
                tries += 1
                self._note(tries, error.message)
                await asyncio.sleep(STORE_RETRY_S)  # the order must hold, so nothing else can be done meanwhile
            else:
                self._asked_s = None
                self._fault = ""
                return

    def _note(self, tries: int, fault: str) -> None:
        """Each reason once, until something is stored; not one that is over with the next try."""
        if tries > 1 and fault != self._fault:
            _log.warning("the store does not take what is to be written: %s", fault)
            self._fault = fault
