"""What is said of peers that are faster: by how much, against the better of kvlease's two ways.

Pure: no peer is started.
"""

from __future__ import annotations

from tests.bench.figures import Figure, Unit, over_rounds
from tests.bench.peers import SECTION, slower


def figure(name: str, unit: Unit, value: float) -> Figure:
    return over_rounds(SECTION, name, unit, [value])


def test_only_what_is_faster_is_named_and_against_the_better_of_two_ways() -> None:
    lines = slower(
        [
            figure("kvlease, unary: resolve, p50", Unit.MICROSECONDS, 900),
            figure("kvlease, stream: resolve, p50", Unit.MICROSECONDS, 400),
            figure("kvlease, unary: resolve, 32 callers", Unit.PER_SECOND, 1_000),
            figure("kvlease, stream: resolve, 32 callers", Unit.PER_SECOND, 9_000),
            figure("Redis: resolve, p50", Unit.MICROSECONDS, 100),
            figure("Redis: resolve, 32 callers", Unit.PER_SECOND, 18_000),
            figure("etcd: resolve, p50", Unit.MICROSECONDS, 500),
            figure("etcd: resolve, 32 callers", Unit.PER_SECOND, 3_000),
        ]
    )
    assert len(lines) == 1
    assert lines[0].startswith("kvlease is slower than Redis: resolve, p50 4.0 x, resolve, 32 callers 2.0 x; ")
