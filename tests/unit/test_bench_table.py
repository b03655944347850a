"""Figures of the benchmark: budgets, quantiles, spread and their JSON.

Pure; nothing is measured.
"""

from __future__ import annotations

import json

import pytest

from tests.bench.contest import Outcome, Role, ratio
from tests.bench.figures import (
    Budget,
    Figure,
    FigureInvalid,
    Unit,
    Verdict,
    at_least,
    at_most,
    decode,
    encode,
    over_rounds,
    quantile,
)
from tests.bench.report import Report


def figure(value: float, budget: Budget | None) -> Figure:
    return over_rounds("section", "name", Unit.RATIO, [value], budget=budget, note="note")


@pytest.mark.parametrize(
    ("value", "budget", "verdict"),
    [
        (1.15, at_most(1.15), Verdict.OK),
        (1.16, at_most(1.15), Verdict.OVER),
        (0.80, at_least(0.80), Verdict.OK),
        (0.79, at_least(0.80), Verdict.OVER),
        (1e9, None, Verdict.FOR_INFORMATION),
        (1e9, at_most(goal=1.0), Verdict.FOR_INFORMATION),
        (0.81, at_least(0.80, goal=0.90), Verdict.OK),
    ],
)
def test_verdict(value: float, budget: Budget | None, verdict: Verdict) -> None:
    assert figure(value, budget).verdict is verdict


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 50.0), (0.99, 99.0), (0.991, 100.0), (1.0, 100.0)])
def test_quantile_is_a_sample_that_enough_do_not_exceed(share: float, expected: float) -> None:
    assert quantile([float(number) for number in range(100, 0, -1)], share) == expected


def test_no_samples_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.5)


def test_rounds_give_median_and_quartiles() -> None:
    found = over_rounds("section", "name", Unit.MICROSECONDS, [900.0, 3.0, 1.0, 2.0, 4.0])
    assert (found.value, found.low, found.high) == (3.0, 2.0, 4.0)


def test_a_ratio_is_made_within_each_round() -> None:
    """Both slow in the second round: the ratio is the same. Medians divided would give 3."""
    outcomes = {
        Role.ECHO: Outcome(per_second=[100.0, 10.0, 50.0]),
        Role.REGISTRY: Outcome(per_second=[50.0, 5.0, 150.0]),
    }
    assert ratio("section", "name", outcomes, lambda outcome: outcome.per_second, Role.ECHO, None).value == 0.5


@pytest.mark.parametrize(
    ("figures", "skipped", "kept"),
    [
        ([figure(1.0, at_most(1.0)), figure(9.0, None)], [], True),
        ([figure(1.0, at_most(1.0)), figure(2.0, at_most(1.0))], [], False),
        ([figure(1.0, at_most(1.0))], [("seals", "no NIXL")], False),
    ],
)
def test_a_run_is_good_if_everything_was_measured_and_held(
    figures: list[Figure], skipped: list[tuple[str, str]], kept: bool
) -> None:
    assert Report(quick=False, seconds=1.0, load=0.0, figures=figures, skipped=skipped).kept is kept


@pytest.mark.parametrize("budget", [None, at_most(2.0), at_least(0.8), at_least(0.4, goal=0.8), at_most(goal=2.0)])
def test_json_says_all(budget: Budget | None) -> None:
    original = figure(1.5, budget)
    assert decode(json.loads(json.dumps(encode(original)))) == original


@pytest.mark.parametrize(
    "change", [{"unit": "parsec"}, {"value": "fast"}, {"value": True}, {"budget": {"bound": "at_most"}}]
)
def test_what_is_no_figure_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(FigureInvalid):
        decode({**encode(figure(1.5, None)), **change})
    with pytest.raises(FigureInvalid):
        decode([])
