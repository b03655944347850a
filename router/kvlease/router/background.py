"""Work that no client waits for: naming a continuation, renewing a lease, giving a prefill back, feeding the copy.

Every such task is a child of the router's task group, there are at most `max_tasks` at once, and a failing one is
logged and ends alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Final

_LOG: Final = logging.getLogger(__name__)
MAX_TASKS: Final = 4_096
"""As many as turns in flight by default; each but the copy's feed lives for a registry call or a prefill."""


class Background:
    """Starts tasks in `group`."""

    def __init__(self, group: asyncio.TaskGroup, *, max_tasks: int = MAX_TASKS) -> None:
        self._group = group
        self._max_tasks = max_tasks
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None] | None:
        """Starts `work`; None, and `work` is dropped, if too much is going on already."""
        if len(self._running) >= self._max_tasks:
            work.close()
            return None
        task = self._group.create_task(_guarded(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        """Cancels all that runs; the task group waits for it."""
        for task in self._running:
            task.cancel()


async def _guarded(work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except Exception as error:  # noqa: BLE001 - a task's outermost frame
        # The type only: a message could quote what was sent.
        _LOG.error("background work failed: %s", type(error).__name__)
