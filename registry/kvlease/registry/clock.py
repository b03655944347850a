"""The clock: the only module of kvlease that reads the real one.

Cores get `now_ms` as a parameter; shells get a `Clock`; tests and the simulation pass their own. Monotonic only: no
wall clock decides anything in kvlease, so a step of the system time has no effect.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock. Its zero is arbitrary: only differences mean something, and only within one process."""

    def now_ms(self) -> int:
        """Milliseconds; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    __slots__ = ()

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000
