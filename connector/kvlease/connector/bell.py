"""Wakes another thread's event loop without giving the interpreter lock away.

asyncio's own `call_soon_threadsafe` writes to a socket, which lets other threads run: the engine's thread would wait
within its step until the connector's thread has done what it was woken for (0.2-0.4 ms, seen). Putting into a
`SimpleQueue` does not, so a thread that does nothing else waits for one and wakes the loop.

Invariant: after `ring`, `answer` is called at least once; many rings before that may be answered by one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final


class Bell:
    """`answer` is called in a thread of its own and must return soon."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer: Final = answer
        self._rung: Final[SimpleQueue[bool]] = SimpleQueue()
        self._thread: Final = threading.Thread(target=self._wait, name="kvlease-bell", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def ring(self) -> None:
        """From any thread; costs about a microsecond. A ring before `open` is answered after it."""
        self._rung.put(True)

    def close(self) -> None:
        """No ring is answered from now on."""
        self._rung.put(False)

    def _wait(self) -> None:
        while self._rung.get():
            self._answer()
