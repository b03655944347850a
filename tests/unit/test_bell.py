"""The bell: every ring is answered, none before it is open and none after it is closed.

That the ringer keeps the interpreter lock is seen without a clock: with an endless switch interval nobody else runs.
"""

from __future__ import annotations

import sys
import threading

from kvlease.connector.bell import Bell

WAIT_S = 10.0


def test_rings_before_it_is_open_are_answered_after_it() -> None:
    answered = threading.Event()
    bell = Bell(answered.set)
    bell.ring()
    assert not answered.is_set()
    bell.open()
    assert answered.wait(WAIT_S)
    bell.close()


def test_a_closed_bell_is_silent() -> None:
    threads = []
    bell = Bell(lambda: threads.append(threading.current_thread()))
    bell.open()
    bell.ring()
    bell.close()
    bell.ring()
    bell._thread.join(WAIT_S)
    assert threads == [bell._thread], "answered once, by a thread of its own"


def test_a_ring_keeps_the_interpreter_lock() -> None:
    """With a switch interval longer than the test, another thread runs only when this one gives the lock away."""
    interval = sys.getswitchinterval()
    answered: list[int] = []
    bell = Bell(lambda: answered.append(1))
    bell.open()
    sys.setswitchinterval(1_000.0)
    try:
        for _ in range(1_000):
            bell.ring()
        seen = len(answered)
    finally:
        sys.setswitchinterval(interval)
        bell.close()
    bell._thread.join(WAIT_S)
    assert (seen, len(answered)) == (0, 1_000)
