"""The handler before the engine's at SIGTERM: in which order things happen, and that nothing is waited for in vain.

Real signals to this process. Times are no judges: a wait in vain would last until the test's own limit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from kvlease.connector import termination
from kvlease.connector.termination import Termination


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What happened, in order; the engine's own handler is in place."""
    words: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: words.append("engine"))
    yield words
    signal.signal(signal.SIGTERM, before)


def test_the_engine_hears_of_it_when_the_other_thread_is_done(heard: list[str]) -> None:
    def elsewhere() -> None:
        time.sleep(0.05)
        heard.append("elsewhere")

    chained = Termination(lambda: heard.append("flag"), elsewhere)
    chained.open()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    chained.close()
    assert heard == ["flag", "elsewhere", "engine", "flag", "engine"]


def test_a_thread_that_fails_is_not_waited_for(heard: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination, "PAUSE_S", 1_000.0)

    def fails() -> None:
        raise OSError("no link")

    chained = Termination(lambda: None, fails)
    chained.open()
    os.kill(os.getpid(), signal.SIGTERM)
    chained.close()
    assert heard == ["engine"]


def test_after_closing_nobody_is_waited_for(heard: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has chained a handler of their own on top, so that ours stays in the chain."""
    monkeypatch.setattr(termination, "PAUSE_S", 1_000.0)
    chained = Termination(lambda: None, lambda: heard.append("elsewhere"))
    chained.open()
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)
    signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
    chained.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert "elsewhere" not in heard
