"""The matrix of conditions: the page says what the tests say, and a marker that makes no row is refused by name.

The page is compared as a whole: `make matrix` after changing a marker.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix.rows import GROUPS, PAGE, MarkerInvalid, page, rows

GOOD = 'group="A turn ends", condition="c", lent="l", reused="r", freed="f", recomputed="x"'


def with_marker(root: Path, marker: str) -> Path:
    (root / "tests").mkdir()
    (root / "tests" / "test_inprocess_some.py").write_text(
        f"import pytest\n\n@pytest.mark.matrix({marker})\nasync def test_it() -> None: ...\n"
    )
    return root


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(rows()), "make matrix"


def test_every_group_has_rows_and_every_condition_is_said_once() -> None:
    made = rows()
    assert {row.group for row in made} == set(GROUPS)
    conditions = [(row.group, row.condition) for row in made]
    assert len(conditions) == len(set(conditions))


def test_a_marker_is_a_row_with_its_test(tmp_path: Path) -> None:
    [row] = rows(with_marker(tmp_path, GOOD))
    assert (row.condition, row.recomputed, row.test) == ("c", "x", "test_it")
    assert row.ring == "vLLM's scheduler or worker, in-process"
    line = (
        '| c | l | r | f | x | [vLLM\'s scheduler or worker, in-process](../tests/test_inprocess_some.py "test_it") |'
    )
    assert line in page([row])


@pytest.mark.parametrize(
    "bad",
    [
        GOOD.replace('group="A turn ends"', 'group="Other"'),
        GOOD.replace(', freed="f"', ""),
        GOOD + ', more="m"',
        GOOD.replace('"c"', "name"),
        '"A turn ends", ' + GOOD,
    ],
    ids=["group", "missing", "more", "not-a-text", "by-place"],
)
def test_a_marker_that_makes_no_row_is_refused(tmp_path: Path, bad: str) -> None:
    with pytest.raises(MarkerInvalid, match="test_it"):
        rows(with_marker(tmp_path, bad))
