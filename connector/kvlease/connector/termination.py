"""Learns that the engine is asked to terminate, before the engine does: leases are to end first.

Chains a SIGTERM handler in front of the one that the engine has installed; without one, SIGTERM ends the process and
nothing is chained. A busy engine goes on until its shutdown time-out. An idle one takes no step any more, and a second
SIGTERM, which its own parent may send, kills it while it tears itself down. So a thread of its own is told as well, and
the handler gives it up to PAUSE_S: the only time that the engine's thread waits for kvlease; no lease is lent after it.

Invariant: what the handler itself does takes no lock that other code takes: it sets a flag, wakes the thread through a
reentrant queue, and waits once, for that thread alone.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

log = logging.getLogger(__name__)

PAUSE_S: Final = 1.0
"""How long the handler waits for the thread, at most; some 20 ms on a machine that is not overloaded."""


class Termination:
    """A chained handler; `close` takes it out again if nobody has chained another one since."""

    def __init__(self, on_terminate: Callable[[], None], elsewhere: Callable[[], None]) -> None:
        """`on_terminate` is called between two byte codes of the main thread, `elsewhere` on a thread of its own.

        `elsewhere` should return when what it began is safe from the process's end.
        """
        self._on_terminate = on_terminate
        self._elsewhere = elsewhere
        self._earlier: Callable[[int, FrameType | None], object] | None = None
        self._told: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._done = threading.Lock()
        self._waited = False

    def open(self) -> None:
        """From now on both are called at SIGTERM. Does nothing outside the process's main thread."""
        earlier = signal.getsignal(signal.SIGTERM)
        if callable(earlier) and threading.current_thread() is threading.main_thread():
            self._earlier = earlier
            self._done.acquire()
            self._thread = threading.Thread(target=self._wait, name="kvlease-termination", daemon=True)
            self._thread.start()
            signal.signal(signal.SIGTERM, self._handle)

    def close(self) -> None:
        self._told.put(False)
        earlier, self._earlier = self._earlier, None
        if earlier is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, earlier)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._on_terminate()
        self._told.put(True)
        if not self._waited:
            self._waited = True
            self._done.acquire(timeout=PAUSE_S)
        if self._earlier is not None:
            self._earlier(number, frame)

    def _wait(self) -> None:
        try:
            if self._told.get():
                self._elsewhere()
        except Exception:  # the thread's outermost frame
            log.exception("kvlease: leases could not be ended at once; the engine's next step ends them")
        finally:
            self._done.release()
