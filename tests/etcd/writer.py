"""A writer of numbered keys that goes on through failures, and says afterwards what it wrote and how long it was stuck.

Each number goes into a key of its own, so a repeated put shows as a second version and not as a second event of another
key. Invariant: numbers are put one after the other; the next one starts when the last one was acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from kvlease.etcd import EtcdClient, EtcdError


class Writer:
    """Use `writing`."""

    def __init__(self, etcd: EtcdClient, prefix: bytes, pause_s: float) -> None:
        self._etcd: Final = etcd
        self._prefix: Final = prefix
        self._pause_s: Final = pause_s
        self._stop = False
        self._progress: Final = asyncio.Event()
        self.acknowledged = 0
        self.longest_gap_s = 0.0
        self.errors: Final[list[EtcdError]] = []

    def key(self, number: int) -> bytes:
        return self._prefix + b"%06d" % number

    async def reached(self, number: int, timeout_s: float = 20.0) -> None:
        """Wait until `number` keys are acknowledged."""
        async with asyncio.timeout(timeout_s):
            while self.acknowledged < number:
                self._progress.clear()
                await self._progress.wait()

    async def go_on(self, more: int = 20) -> None:
        """Wait for some more."""
        await self.reached(self.acknowledged + more)

    def stop(self) -> None:
        self._stop = True

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while not self._stop:
            try:
                await self._etcd.put(self.key(self.acknowledged), b"", idempotent=True)
            except EtcdError as error:
                self.errors.append(error)
                continue
            now = loop.time()
            self.longest_gap_s = max(self.longest_gap_s, now - last)
            last = now
            self.acknowledged += 1
            self._progress.set()
            await asyncio.sleep(self._pause_s)


@asynccontextmanager
async def writing(etcd: EtcdClient, prefix: bytes, *, pause_s: float = 0.005) -> AsyncIterator[Writer]:
    """A writer at work; it has stopped when the block ends."""
    writer = Writer(etcd, prefix, pause_s)
    task = asyncio.create_task(writer.run(), name="etcd test writer")
    try:
        yield writer
    finally:
        writer.stop()
        await task
