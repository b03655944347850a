"""What a benchmark says: a figure with its spread, the budget it is held to, and how samples become one. Pure.

A figure is a median over rounds with the quartiles beside it, so that a reader sees whether a difference is larger
than the noise; extremes would only show the worst moment of a shared machine. Nothing here measures.
Invariant: a figure without a limit is never a failure; `decode(encode(figure)) == figure`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Bound(StrEnum):
    AT_MOST = "at_most"
    AT_LEAST = "at_least"


class Unit(StrEnum):
    MICROSECONDS = "us"
    MILLISECONDS = "ms"
    PER_SECOND = "/s"
    RATIO = "x"
    BYTES = "B"


class Verdict(StrEnum):
    OK = "ok"
    OVER = "over"
    FOR_INFORMATION = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """From registry/DESIGN.md, section 8, in the unit of the figure.

    `limit` is judged. `goal` is aimed at and shown: where it is a time, it depends on the machine, and a ratio within
    the run is judged in its place.
    """

    bound: Bound
    limit: float | None = None
    goal: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the table. `low` and `high` are the quartiles of the rounds, or of single calls without rounds."""

    section: str
    name: str
    unit: Unit
    value: float
    low: float
    high: float
    budget: Budget | None = None
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.budget is None or self.budget.limit is None:
            return Verdict.FOR_INFORMATION
        if self.budget.bound is Bound.AT_MOST:
            return Verdict.OK if self.value <= self.budget.limit else Verdict.OVER
        return Verdict.OK if self.value >= self.budget.limit else Verdict.OVER


class FigureInvalid(ValueError):
    """What was read is not an encoded figure."""


def at_most(limit: float | None = None, *, goal: float | None = None) -> Budget:
    return Budget(bound=Bound.AT_MOST, limit=limit, goal=goal)


def at_least(limit: float | None = None, *, goal: float | None = None) -> Budget:
    return Budget(bound=Bound.AT_LEAST, limit=limit, goal=goal)


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all samples do not exceed. Raises ValueError if there is none."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    rank = -(-share * len(ordered) // 1)  # rounded up
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]


def over_rounds(
    section: str, name: str, unit: Unit, rounds: Sequence[float], *, budget: Budget | None = None, note: str = ""
) -> Figure:
    """The median of the rounds' values, with their quartiles."""
    return Figure(
        section=section,
        name=name,
        unit=unit,
        value=quantile(rounds, 0.5),
        low=quantile(rounds, 0.25),
        high=quantile(rounds, 0.75),
        budget=budget,
        note=note,
    )


def over_calls(section: str, name: str, unit: Unit, calls: Sequence[float], share: float, *, note: str = "") -> Figure:
    """The quantile `share` of single calls, with the quartiles of all of them."""
    return Figure(
        section=section,
        name=name,
        unit=unit,
        value=quantile(calls, share),
        low=quantile(calls, 0.25),
        high=quantile(calls, 0.75),
        note=note,
    )


def encode(figure: Figure) -> dict[str, object]:
    """As it stands in the JSON file; `verdict` is there for readers and ignored by `decode`."""
    budget = figure.budget
    return {
        "section": figure.section,
        "name": figure.name,
        "unit": figure.unit.value,
        "value": figure.value,
        "low": figure.low,
        "high": figure.high,
        "budget": None if budget is None else {"bound": budget.bound.value, "limit": budget.limit, "goal": budget.goal},
        "verdict": figure.verdict.value,
        "note": figure.note,
    }


def decode(given: object) -> Figure:
    """Raises FigureInvalid."""
    try:
        fields = _object(given)
        budget = fields["budget"]
        return Figure(
            section=str(fields["section"]),
            name=str(fields["name"]),
            unit=Unit(str(fields["unit"])),
            value=_number(fields["value"]),
            low=_number(fields["low"]),
            high=_number(fields["high"]),
            budget=None if budget is None else _budget(_object(budget)),
            note=str(fields["note"]),
        )
    except (KeyError, ValueError) as error:
        raise FigureInvalid(f"not a figure: {error}") from error


def _budget(fields: Mapping[str, object]) -> Budget:
    return Budget(
        bound=Bound(str(fields["bound"])),
        limit=_number_or_none(fields["limit"]),
        goal=_number_or_none(fields["goal"]),
    )


def _object(given: object) -> Mapping[str, object]:
    if not isinstance(given, Mapping):
        raise FigureInvalid(f"an object was expected, not {given!r}")
    return given


def _number(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise FigureInvalid(f"a number was expected, not {given!r}")
    return float(given)


def _number_or_none(given: object) -> float | None:
    return None if given is None else _number(given)
