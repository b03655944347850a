"""Keeps a `LeaseCopy` up to date: list, replace, watch; and again from the list whenever there may be a gap.

The asyncio shell around `lease_copy.py`: it calls the registry and reads the clock, and knows nothing of leases.
Invariant: after a failed stream it resumes where the copy is, on the replica that it was listed from; what cannot be
resumed is listed anew, and the old copy answers until the new list is whole. It never gives up and never asks without a
pause.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NoReturn

from kvlease.registry.backoff import Backoff
from kvlease.registry.client import EVERYTHING, LeaseEventStream, RegistryClient
from kvlease.registry.clock import Clock
from kvlease.registry.errors import Compacted, DeadlineExceeded, KvleaseError, Overloaded, RegistryUnavailable
from kvlease.registry.lease_copy import LeaseCopy
from kvlease.registry.values import LeaseEvents, LeaseFilter

_LOG: Final = logging.getLogger(__name__)
LIST_PAGE: Final = 500
"""Leases to a page, and taken in at once, between two chances for other tasks: a few milliseconds."""
_SOON: Final = (RegistryUnavailable, DeadlineExceeded, Overloaded, Compacted)
"""What may be over in a moment. Anything else will not change by asking often: a limit, a right, a newer registry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedLimits:
    """Bounds of a feed."""

    page_timeout_ms: int = 5_000
    """For one page of a list."""
    silence_ms: int = 15_000
    """A watch that says nothing for so long is taken for dead: three times what an idle registry lets pass."""
    backoff_first_ms: int = 50
    backoff_cap_ms: int = 1_000
    long_pause_ms: int = 30_000
    """Before the next attempt, where a limit was met or a right is missing."""


class LeaseCopyFeed:
    """Feeds one copy from one client, as long as `run` runs."""

    def __init__(
        self,
        client: RegistryClient,
        copy: LeaseCopy,
        *,
        clock: Clock,
        selection: LeaseFilter = EVERYTHING,
        limits: FeedLimits | None = None,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        """`copy` is to be read by others and fed by this only; `fraction` spreads attempts: numbers in [0, 1)."""
        self._client: Final = client
        self._copy: Final = copy
        self._clock: Final = clock
        self._selection: Final = selection
        self._limits: Final = limits if limits is not None else FeedLimits()
        self._backoff: Final = Backoff(
            first_ms=self._limits.backoff_first_ms, cap_ms=self._limits.backoff_cap_ms, fraction=fraction
        )
        self._source = ""
        self._trouble = False

    async def run(self) -> NoReturn:
        """Feed until cancelled. Every failure is outlived; one that is not the connection's leads to a new list."""
        must_list = True
        while True:
            try:
                if must_list:
                    await self._list()
                    must_list = False
                await self._follow()
            except KvleaseError as error:
                must_list = must_list or not isinstance(error, RegistryUnavailable)
                self._tell(error)
                pause_ms = self._backoff.next_ms() if isinstance(error, _SOON) else self._limits.long_pause_ms
                await asyncio.sleep(pause_ms / 1000)

    async def _list(self) -> None:
        asked_ms = self._clock.now_ms()
        listed = await self._client.list_leases(
            self._selection, page_size=LIST_PAGE, timeout_ms=self._limits.page_timeout_ms
        )
        leases = self._copy.blank()
        for number, lease in enumerate(listed.leases, start=1):
            leases.put(lease, now_ms=asked_ms)
            if number % LIST_PAGE == 0:
                await asyncio.sleep(0)
        self._copy.replace(leases, revision=listed.revision, asked_ms=asked_ms)
        self._source = listed.source

    async def _follow(self) -> NoReturn:
        watch = self._client.watch(self._selection, from_revision=self._copy.revision or 0, source=self._source)
        async with aclosing(watch):
            self._copy.resume(await self._next(watch), now_ms=self._clock.now_ms())
            self._tell(None)
            while True:
                news = await self._next(watch)
                self._copy.apply(news, now_ms=self._clock.now_ms())
                if news.revision >= news.newest:  # not after a message: a watcher that falls behind would list for ever
                    self._backoff.reset()

    async def _next(self, watch: LeaseEventStream) -> LeaseEvents:
        try:
            async with asyncio.timeout(self._limits.silence_ms / 1000):
                return await anext(watch)
        except TimeoutError as error:
            raise RegistryUnavailable(f"the watch said nothing for {self._limits.silence_ms} ms") from error

    def _tell(self, error: KvleaseError | None) -> None:
        """Log when it turns from good to bad and back, not at each attempt."""
        if error is None and self._trouble:
            _LOG.info("the copy of leases is fed again: %d leases", len(self._copy))
        elif error is not None and not self._trouble:
            _LOG.warning("the copy of leases is not fed (%s): %s", error.reason, error.message)
        self._trouble = error is not None
