"""The log of refusals: everything at first, never a flood, and what is left out is said.

The clock is turned by hand.
"""

from __future__ import annotations

import pytest
from kvlease.registry.refusals import BURST, WINDOW_MS, Refusals


class HandClock:
    def __init__(self) -> None:
        self.time_ms = 1_000

    def now_ms(self) -> int:
        return self.time_ms


def test_a_caller_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    refusals = Refusals(clock)
    for number in range(BURST * 3):
        refusals.note("call %d", number)
    assert [x.getMessage() for x in caplog.records] == [f"refused: call {i}" for i in range(BURST)]
    caplog.clear()

    clock.time_ms += WINDOW_MS
    refusals.note("the next")
    assert [x.getMessage() for x in caplog.records] == [
        "refused: the next",
        f"refused: {BURST * 2} more, not logged one by one",
    ]
