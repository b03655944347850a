"""The slice of the simulation that every test run includes, and the proof that its judge sees each broken rule.

`make sim SEEDS=10000` runs more. On failure the first line names the seed, with the command that repeats it.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.sim.breaks_named import BREAKS
from tests.sim.campaign import ENOUGH_SEEDS, How, campaign
from tests.sim.judge import Fault
from tests.sim.simulation import run_seed

REGRESSIONS: Final[tuple[int, ...]] = (
    3_000_485,  # leases written for an incarnation that was replaced and came back: in the store for ever
    3_002_089,  # the same, the hello overtaken several times
    3_002_515,  # the same, seen by a replica that was restarted while the other incarnation was there
    3_003_881,  # a lease that others had passed over was not written again together with its engine
    3_004_843,  # a lease taken out of the store by us stayed a copy here: its lender had said hello in between
    6_002_097,  # a hello in a commit nobody answered for was waited for, though it had been overwritten already
    6_008_029,  # in a restored store a transaction that was not done was taken for one that was
    3_001_310,  # the judge: an end asked for past the deadline is told as expired
    3_001_313,  # the network: a registry that died left a line open whose hello had not arrived
)
"""Seeds that once went red, each with the fault it found."""


def test_no_seed_uses_a_wrong_byte_or_hangs() -> None:
    tally = campaign((*REGRESSIONS, *range(ENOUGH_SEEDS)), How())
    assert tally.good, "\n".join(tally.report())


def test_a_seed_is_repeated_exactly() -> None:
    for seed in (3, 5):
        first, second = run_seed(seed), run_seed(seed)
        assert (first.steps, first.counts) == (second.steps, second.counts)


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_the_judge_sees_the_broken_rule(name: str) -> None:
    """Red with the rule broken, in what it is about; clean on the very same seeds and plans without."""
    seen: set[Fault] = set()
    shows, begin = BREAKS[name]().shows, BREAKS[name]().begin
    for seed in range(begin, begin + 120):
        tally = campaign((seed,), How(broken=name))
        seen |= {violation.fault for outcome in tally.red for violation in outcome.violations}
        if seen & shows:
            break
    assert seen & shows, f"{name} went unnoticed in {seed + 1 - begin} seeds, or showed in other ways only: {seen}"
    honest = campaign(range(max(begin, seed - 10), seed + 1), How(sharpened=name))
    assert not honest.red, "\n".join(honest.report())
