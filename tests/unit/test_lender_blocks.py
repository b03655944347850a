"""Blocks that leases hold: those that they have in common count once, in whichever order leases come and go.

What follows from the count, who ends and when, is in `test_lender_pressure.py`.
"""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from kvlease.connector.lender_blocks import HeldBlocks

branches = st.lists(st.integers(0, 2), min_size=1, max_size=6)
"""The blocks of a lease as choices: block ids depend on all choices before them, as in an engine's prefix cache."""


def blocks(choices: list[int]) -> tuple[int, ...]:
    number = 0
    made: list[int] = []
    for choice in choices:
        number = 3 * number + choice + 1
        made.append(number)
    return tuple(made)


@given(st.lists(st.tuples(branches, branches), max_size=12), st.randoms(use_true_random=False))
def test_each_block_counts_once(turns: list[tuple[list[int], list[int]]], random: Random) -> None:
    """Two KV groups, as two sets of ids."""
    held = HeldBlocks()
    leases: list[tuple[tuple[int, ...], ...]] = []
    for one, other in turns:
        lease = (blocks(one), tuple(-block for block in blocks(other)))
        before = held.count
        more = held.more(lease)
        held.add(lease)
        leases.append(lease)
        assert held.count == before + more == _distinct(leases)
        held.check(group for lease in leases for group in lease)
    random.shuffle(leases)
    while leases:
        held.drop(leases.pop())
        assert held.count == _distinct(leases)
        held.check(group for lease in leases for group in lease)
    assert not held._first, "nothing is left of it"


def _distinct(leases: list[tuple[tuple[int, ...], ...]]) -> int:
    return len({block for lease in leases for group in lease for block in group})


def test_forks_that_are_over_leave_no_seams() -> None:
    """Else a lease that many have forked from would be walked in ever smaller steps."""
    held = HeldBlocks()
    trunk = tuple(range(1_000))
    held.add((trunk,))
    for place in range(1, 1_000):
        fork = ((*trunk[:place], 2_000),)
        held.add(fork)
        held.drop(fork)
    (run,) = held._first.values()
    assert (run.blocks, run.after) == (trunk, {})


def test_a_beginning_that_was_computed_twice_and_mixed_counts_twice_and_never_not_at_all() -> None:
    held = HeldBlocks()
    for lease in ((1, 2, 3), (4, 5, 6), (1, 5, 7)):
        held.add((lease,))
    assert held.count == 8, "block 5 counts in both"
    held.drop(((4, 5, 6),))
    held.drop(((1, 2, 3),))
    assert held.count == 3
