"""Learns that the engine is asked to terminate, before the engine does: leases are to end first.

Chains a SIGTERM handler in front of the one that the engine has installed. The engine goes on as it would: it serves
what runs until its shutdown time-out. Without a handler of the engine's nothing is chained, since then SIGTERM ends
the process (or is ignored) and there is nothing to be done first.

Invariant: what is called runs between two byte codes of the main thread, so it only sets a flag.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class Termination:
    """A chained handler; `close` takes it out again if nobody has chained another one since."""

    def __init__(self, on_terminate: Callable[[], None]) -> None:
        self._on_terminate = on_terminate
        self._earlier: Callable[[int, FrameType | None], object] | None = None

    def open(self) -> None:
        """From now on `on_terminate` is called at SIGTERM. Does nothing outside the process's main thread."""
        earlier = signal.getsignal(signal.SIGTERM)
        if callable(earlier) and threading.current_thread() is threading.main_thread():
            self._earlier = earlier
            signal.signal(signal.SIGTERM, self._handle)

    def close(self) -> None:
        earlier, self._earlier = self._earlier, None
        if earlier is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, earlier)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._on_terminate()
        if self._earlier is not None:
            self._earlier(number, frame)
