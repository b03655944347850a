"""Quarantine: a late load's blocks are referred to once, until the last rank's READ can write no more.

References that go in come out again, each exactly once; what they protect from is shown by the simulation.
"""

from __future__ import annotations

from kvlease.connector.quarantine import Quarantine


def test_blocks_are_held_until_the_last_rank_has_landed() -> None:
    quarantine = Quarantine()
    assert quarantine.enter("r", 0, (1, 2)) == (1, 2)
    assert quarantine.enter("r", 1, (1, 2)) == (), "one reference, however many ranks are late"
    assert (len(quarantine), quarantine.blocks) == (1, 2)
    assert quarantine.leave("r", 0) == ()
    assert quarantine.leave("r", 1) == (1, 2)
    assert (len(quarantine), quarantine.blocks) == (0, 0)


def test_a_rank_that_tells_twice_changes_nothing() -> None:
    quarantine = Quarantine()
    quarantine.enter("r", 0, (1,))
    assert quarantine.enter("r", 0, (1,)) == ()
    assert quarantine.leave("r", 0) == (1,)
    assert quarantine.leave("r", 0) == ()


def test_a_rank_that_is_late_after_another_has_landed_holds_them_again() -> None:
    quarantine = Quarantine()
    quarantine.enter("r", 0, (1,))
    assert quarantine.leave("r", 0) == (1,)
    assert quarantine.enter("r", 1, (1,)) == (1,)
    assert quarantine.leave("r", 1) == (1,)


def test_loads_are_independent_and_may_share_a_block() -> None:
    quarantine = Quarantine()
    assert quarantine.enter("a", 0, (1, 2)) == (1, 2)
    assert quarantine.enter("b", 0, (2, 3)) == (2, 3)
    assert quarantine.blocks == 4
    assert quarantine.leave("a", 0) == (1, 2)
    assert quarantine.leave("unknown", 0) == ()
    assert quarantine.blocks == 2
