"""What the demo shows: progress while processes start, the table of turns, the story of each lease.

Only `rich` and finished values here. On a terminal the progress is a live table; elsewhere each change is one line, so
that a log stays readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tests.demo.story import LeaseStory

MIB: Final = 2**20
FINAL_STATES: Final = ("ready", "stopped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One turn, with leases and without."""

    number: int
    prompt_tokens: int
    reused_tokens: int
    bytes_read: int
    outcome: str
    with_s: float
    without_s: float

    @property
    def ratio(self) -> float:
        """How many times longer the first token takes without leases."""
        return self.without_s / self.with_s


class Progress:
    """State of each process; a callable that fits the fleet's `progress`."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._states: dict[str, str] = {}
        self._spinner = Spinner("dots")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=5, transient=True)

    def __enter__(self) -> Self:
        self._console.print(Text(self._title, style="bold"))
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
            self._console.print(self._render())

    def __call__(self, name: str, state: str) -> None:
        self._states[name] = state
        if not self._console.is_terminal:
            self._console.print(f"  {name}: {state}")

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, state in self._states.items():
            done = state.startswith(FINAL_STATES)
            table.add_row(Text("  ✓", style="green") if done else self._spinner, name, Text(state, style="dim"))
        return table


def turn_table(rows: Sequence[Row]) -> Table:
    """Per turn: what was reused, and what that did to the time to first token."""
    table = Table(title="Time to first token, with leases and without (prefix cache of P off in both)")
    for heading in ("turn", "prompt tokens", "reused", "read by NIXL", "with", "without", "ratio"):
        table.add_column(heading, justify="right")
    for row in rows:
        share = f" ({row.reused_tokens / row.prompt_tokens:.0%})" if row.reused_tokens else f" ({row.outcome})"
        table.add_row(
            str(row.number),
            f"{row.prompt_tokens}",
            f"{row.reused_tokens}{share if row.number > 1 else ''}",
            f"{row.bytes_read / MIB:.1f} MiB",
            f"{row.with_s * 1000:.0f} ms",
            f"{row.without_s * 1000:.0f} ms",
            f"{row.ratio:.1f} ×",
        )
    return table


def story_table(stories: Sequence[LeaseStory]) -> Table:
    """Each lease from publish to end, as the processes' own spans tell it."""
    table = Table(title="The story of each lease, told by OpenTelemetry spans")
    for heading in ("lease", "event", "in turn", "after", "what"):
        table.add_column(heading, justify="right" if heading in ("in turn", "after") else "left")
    for story in stories:
        for position, event in enumerate(story.events):
            table.add_row(
                story.lease_id[:12] if position == 0 else "",
                event.what,
                str(event.turn) if event.turn else "",
                f"{event.at_ms / 1000:.2f} s" if event.at_ms > 0 else "",
                event.detail,
                end_section=position == len(story.events) - 1,
            )
    return table
