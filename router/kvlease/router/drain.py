"""The end of a router, for work in flight: it has its time, and what is left then is broken off with a typed error.

An asyncio shell without I/O. Invariant: whoever is broken off gets ShuttingDown, never a bare cancellation, so that a
client that has left and a router that stops are two things.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kvlease.router.errors import ShuttingDown


class Drain:
    """Knows all work in flight. `begun`: none is to be taken on. `over`: what still runs is being broken off."""

    def __init__(self, *, timeout_ms: int) -> None:
        self._timeout_s = timeout_ms / 1000
        self._work: set[asyncio.Timeout] = set()
        self._reading: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self.begun = False
        self.over = False

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """Around what `run` is to wait for. Raises ShuttingDown if it took too long."""
        limit = asyncio.timeout(0 if self.over else None)
        try:
            async with limit:
                self._work.add(limit)
                yield
        except TimeoutError as error:
            if limit.expired():
                raise ShuttingDown("the router is shutting down") from error
            raise
        finally:
            self._work.discard(limit)
            if not self._work:
                self._idle.set()

    @asynccontextmanager
    async def reading(self, timeout_s: float) -> AsyncIterator[None]:
        """Around the read of a request's body, which does not arrive any more once `run` has begun.

        Raises TimeoutError, and ShuttingDown.
        """
        limit = asyncio.timeout(0 if self.begun else timeout_s)
        try:
            async with limit:
                self._reading.add(limit)
                yield
        except TimeoutError as error:
            if self.begun:
                raise ShuttingDown("the router is shutting down") from error
            raise
        finally:
            self._reading.discard(limit)

    async def run(self) -> None:
        """Waits until no work is in flight, at most the time-out; then breaks off what is."""
        self.begun = True
        _end(self._reading)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                while self._work:
                    self._idle.clear()
                    await self._idle.wait()
        self.over = True
        _end(self._work)


def _end(limits: set[asyncio.Timeout]) -> None:
    now = asyncio.get_running_loop().time()
    for limit in limits:
        limit.reschedule(now)
