"""Keeps many etcd leases alive, and says so when one is lost. One task for all; one stream for those that are due.

Each lease is renewed after a third of its time to live, over all endpoints. etcd may say that a lease is gone when a
fresh leader has not caught up yet, so it is asked once more before that is believed. Invariant: a lease that was lost
is told once and kept no more; one that is kept was renewed, or given to `keep`, less than its time to live ago.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Final, Self

from kvlease.etcd.errors import EtcdError
from kvlease.etcd.leases import Leases
from kvlease.etcd.limits import EtcdLimits
from kvlease.etcd.values import LeaseGrant, LeaseId

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S: Final = 0.5
"""Between tries to renew a lease that is due."""
_SAID_AGAIN_S: Final = 30.0
"""Between two messages about the same fault."""


class LeaseEnd(StrEnum):
    """Why a lease is not kept any more."""

    GONE = "gone"
    """etcd says that there is no such lease: its keys are deleted."""
    UNHEARD = "unheard"
    """Not renewed for its whole time to live. It may still be there: a new leader restarts every lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLease:
    lease_id: LeaseId
    end: LeaseEnd


@dataclass(slots=True)
class _Kept:
    ttl_s: float
    renewed_s: float
    due_s: float
    doubted: bool = False


class LeaseKeeper:
    """An async context manager; leaving it stops renewing and revokes nothing.

    `on_lost` is called in the event loop, must not block and must not raise.
    """

    def __init__(self, leases: Leases, limits: EtcdLimits, on_lost: Callable[[LostLease], None]) -> None:
        self._leases: Final = leases
        self._limits: Final = limits
        self._on_lost: Final = on_lost
        self._kept: Final[dict[LeaseId, _Kept]] = {}
        self._changed: Final = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._fault = ""
        self._said_s = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="etcd lease keeper")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=self._limits.close_timeout_ms / 1000)
            if task.done() and not task.cancelled():
                task.result()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self._kept

    def keep(self, grant: LeaseGrant) -> None:
        """Keep a lease that was granted or renewed just now."""
        now = asyncio.get_running_loop().time()
        self._kept[grant.lease_id] = _Kept(grant.ttl_s, renewed_s=now, due_s=now + grant.ttl_s / 3)
        self._changed.set()

    def forget(self, lease_id: LeaseId) -> None:
        """Renew it no more; nothing happens if it was not kept."""
        self._kept.pop(lease_id, None)

    async def _run(self) -> None:
        try:
            while True:
                self._changed.clear()
                await self._wait_until_due()
                await self._renew_due()
        except Exception:
            log.exception("the etcd lease keeper has ended: its leases will expire")
            raise

    async def _wait_until_due(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = min((kept.due_s for kept in self._kept.values()), default=loop.time() + 3600) - loop.time()
        if wait_s > 0:
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                return

    async def _renew_due(self) -> None:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        due = {lease_id: kept for lease_id, kept in self._kept.items() if kept.due_s <= asked_s}
        if not due:
            return
        shortest_s = min(kept.ttl_s for kept in due.values())
        try:
            timeout_ms = max(1, int(min(self._limits.call_timeout_ms, shortest_s * 1000 / 3)))
            answers = await self._leases.renew(tuple(due), timeout_ms=timeout_ms)
        except EtcdError as error:
            self._note(error, len(due))
            answers = {}
        else:
            self._fault = ""
        now = loop.time()
        for lease_id, kept in due.items():
            if self._kept.get(lease_id) is not kept:  # forgotten, or given anew, meanwhile
                continue
            self._settle(lease_id, kept, answers.get(lease_id), asked_s, now)

    def _note(self, error: EtcdError, leases: int) -> None:
        """Tries follow one another closely: what is wrong is said when it changes, and now and then while it lasts."""
        now = asyncio.get_running_loop().time()
        if error.reason == self._fault and now - self._said_s < _SAID_AGAIN_S:
            return
        self._fault, self._said_s = error.reason, now
        log.warning("%d etcd leases not renewed: %s", leases, error)

    def _settle(self, lease_id: LeaseId, kept: _Kept, ttl_s: int | None, asked_s: float, now: float) -> None:
        pause_s = min(_LONGEST_PAUSE_S, kept.ttl_s / 6)
        if ttl_s is not None and ttl_s > 0:
            kept.ttl_s, kept.renewed_s, kept.due_s, kept.doubted = ttl_s, asked_s, asked_s + ttl_s / 3, False
        elif ttl_s == 0 and kept.doubted:
            self._lose(lease_id, LeaseEnd.GONE)
        elif now - kept.renewed_s >= kept.ttl_s:
            self._lose(lease_id, LeaseEnd.GONE if ttl_s == 0 else LeaseEnd.UNHEARD)
        else:
            kept.doubted = kept.doubted or ttl_s == 0
            kept.due_s = now + pause_s

    def _lose(self, lease_id: LeaseId, end: LeaseEnd) -> None:
        del self._kept[lease_id]
        log.warning("etcd lease %x is lost: %s", lease_id, end.value)
        self._on_lost(LostLease(lease_id=lease_id, end=end))
