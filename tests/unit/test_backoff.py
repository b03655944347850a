"""Backoff: doubling, capped, spread by the fraction, small again after a reset.

Pure: no sleeping, and the randomness is the test's.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlease.registry.backoff import Backoff


def test_doubles_to_the_cap_and_starts_again() -> None:
    backoff = Backoff(first_ms=100, cap_ms=1_000, fraction=lambda: 0.0)
    assert [backoff.next_ms() for _ in range(6)] == [100, 200, 400, 800, 1_000, 1_000]
    backoff.reset()
    assert backoff.next_ms() == 100


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=12))
def test_spread_over_the_upper_half(fractions: list[float]) -> None:
    source = iter(fractions)
    backoff = Backoff(first_ms=100, cap_ms=1_000, fraction=lambda: next(source))
    asked = 100
    for _ in fractions:
        assert asked / 2 < backoff.next_ms() <= asked
        asked = min(1_000, asked * 2)


@pytest.mark.parametrize(("first_ms", "cap_ms"), [(0, 10), (-1, 10), (20, 10)])
def test_nonsense_is_refused(first_ms: int, cap_ms: int) -> None:
    with pytest.raises(ValueError, match="backoff"):
        Backoff(first_ms=first_ms, cap_ms=cap_ms, fraction=lambda: 0.0)
