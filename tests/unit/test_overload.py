"""The overload signal, driven by hand: when shedding starts, what is shed, when it ends.

No load is made and nothing is timed.
"""

from __future__ import annotations

import pytest
from kvlease.registry.identity import Rpc
from kvlease.registry.overload import LOWER_AFTER, RAISE_AFTER, SWAMPED_FACTOR, Load, Overload

LIMIT_MS = 100
LATE_MS = LIMIT_MS
CALM_MS = LIMIT_MS / 2 - 1


def loaded(lag_ms: float) -> Overload:
    overload = Overload(limit_ms=LIMIT_MS)
    for _ in range(RAISE_AFTER):
        overload.observe(lag_ms)
    return overload


@pytest.mark.parametrize(
    ("lag_ms", "shed"),
    [
        (LIMIT_MS - 1, set()),
        (LIMIT_MS, {Rpc.RESOLVE, Rpc.RESOLVE_STREAM}),
        (LIMIT_MS * SWAMPED_FACTOR, {Rpc.RESOLVE, Rpc.RESOLVE_STREAM, Rpc.LOCATE, Rpc.LIST_LEASES}),
    ],
)
def test_resolves_go_first_then_other_reads_and_never_what_keeps_leases_true(lag_ms: float, shed: set[Rpc]) -> None:
    overload = loaded(lag_ms)
    assert {rpc for rpc in Rpc if overload.sheds(rpc)} == shed


def test_a_few_late_rounds_are_not_overload() -> None:
    """However late: a host that was paused is not a registry that is overloaded."""
    overload = Overload(limit_ms=LIMIT_MS)
    for _ in range(3):
        for _ in range(RAISE_AFTER - 1):
            overload.observe(LATE_MS * 100)
        overload.observe(0)
    assert overload.load is Load.CALM


def test_it_ends_after_calm_rounds_in_a_row() -> None:
    overload = loaded(LATE_MS)
    for _ in range(LOWER_AFTER - 1):
        overload.observe(CALM_MS)
    overload.observe(LIMIT_MS / 2)  # not late, and not calm either: counted from the start
    for _ in range(LOWER_AFTER - 1):
        overload.observe(CALM_MS)
    assert overload.sheds(Rpc.RESOLVE)
    overload.observe(CALM_MS)
    assert not overload.sheds(Rpc.RESOLVE)


def test_it_gets_worse_at_once_and_not_better_in_between() -> None:
    overload = loaded(LATE_MS)
    overload.observe(LATE_MS * SWAMPED_FACTOR)
    assert overload.load is Load.SWAMPED
    overload.observe(LATE_MS)
    assert overload.load is Load.SWAMPED
