"""Leases passed over, against a plain list of pairs, and their bound.

What a replica does with them is tried in `test_table_replicas.py`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlease.registry import table_passed_over
from kvlease.registry.table_passed_over import PassedOver
from kvlease.registry.values import EngineId, LeaseId

LEASES = st.integers(0, 7).map(lambda n: LeaseId(f"l{n}"))
ENGINES = st.integers(0, 2).map(lambda n: EngineId(f"e{n}"))
DOINGS = st.one_of(
    st.tuples(st.just("add"), LEASES, ENGINES),
    st.tuples(st.just("discard"), LEASES),
    st.tuples(st.just("take"), ENGINES),
    st.tuples(st.just("clear")),
)
MOST = 4


@given(st.lists(DOINGS, max_size=40))
def test_as_a_list_of_pairs_with_the_oldest_dropped(doings: list[tuple[str, ...]]) -> None:
    pairs: list[tuple[str, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_passed_over, "MAX_PASSED_OVER", MOST)
        passed_over = PassedOver()
        for doing, *what in doings:
            match doing:
                case "add":
                    lease_id, engine_id = what
                    passed_over.add(LeaseId(lease_id), EngineId(engine_id))
                    pairs = [*[pair for pair in pairs if pair[0] != lease_id], (lease_id, engine_id)][-MOST:]
                case "discard":
                    passed_over.discard(LeaseId(what[0]))
                    pairs = [pair for pair in pairs if pair[0] != what[0]]
                case "take":
                    expected = [lease_id for lease_id, of in pairs if of == what[0]]
                    assert passed_over.take(EngineId(what[0])) == expected
                    pairs = [pair for pair in pairs if pair[1] != what[0]]
                case _:
                    passed_over.clear()
                    pairs = []
            assert len(passed_over) == len(pairs)
    for engine_id in ("e0", "e1", "e2"):
        assert passed_over.take(EngineId(engine_id)) == [lease_id for lease_id, of in pairs if of == engine_id]
