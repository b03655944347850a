"""What a lender owes its pool: everything comes back once, in order, in portions no larger than asked for.

The pool's side, references and reuse, is for the stateful tests and the simulation.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvlease.connector.lender_effects import Free, Unpin
from kvlease.connector.returns import Returns
from kvlease.registry.values import LeaseId

A, B = LeaseId("a"), LeaseId("b")


def test_the_last_blocks_of_a_lease_go_first_and_leases_in_their_order() -> None:
    returns = Returns()
    returns.owe(Free(blocks=(1, 2, 3)))
    returns.owe(Unpin(lease_id=A, blocks=(4, 5)))
    assert returns.blocks == 5
    assert list(returns.take(2)) == [Free(blocks=(2, 3))]
    assert list(returns.take(2)) == [Free(blocks=(1,)), Unpin(lease_id=A, blocks=(5,))]
    returns.owe(Unpin(lease_id=B, blocks=(6,)))
    assert returns.blocks == 2
    assert list(returns.take(9)) == [Unpin(lease_id=A, blocks=(4,)), Unpin(lease_id=B, blocks=(6,))]
    assert (returns.blocks, list(returns.take(9))) == (0, [])


def test_nothing_owed_is_nothing() -> None:
    returns = Returns()
    returns.owe(Free(blocks=()))
    assert (returns.blocks, list(returns.take(1))) == (0, [])


@given(st.lists(st.one_of(st.integers(1, 9).map(lambda n: -n), st.integers(0, 6)), max_size=40))
def test_everything_comes_back_once(steps: list[int]) -> None:
    """Negative: so many blocks are owed; others: so many are taken."""
    returns, numbers = Returns(), 0
    owed: list[int] = []
    given_back: list[int] = []
    for step in steps:
        if step < 0:
            blocks = tuple(range(numbers, numbers - step))
            numbers -= step
            returns.owe(Free(blocks=blocks))
            owed += blocks[::-1]
        else:
            portions = list(returns.take(step))
            taken = [block for portion in portions for block in portion.blocks[::-1]]
            assert len(taken) == min(step, len(owed) - len(given_back))
            given_back += taken
        assert returns.blocks == len(owed) - len(given_back)
    assert given_back == owed[: len(given_back)]
