"""What the spans say: which lease was lent in which turn, who read how much of it, and how it ended.

Pure: spans in, frozen values out; no clock, no I/O. Nothing is computed from anything but spans, so the story is true
or a span is wrong. Names of spans and attributes are those of the router and the connector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.demo.spans import SeenSpan
from tests.engines.fleet import REGISTRY

TURN: Final = "turn"
PUBLISH: Final = "publish"
RESOLVE: Final = "resolve"
READ: Final = "read"
PROVE: Final = "prove"
END: Final = "end"
CONVERSATION: Final = "kvlease.conversation"
LEASE: Final = "kvlease.lease_id"
OUTCOME: Final = "kvlease.outcome"
BORROWED: Final = "borrowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """What one turn did not have to compute."""

    tokens: int = 0
    bytes_read: int = 0
    outcome: str = "nothing resolved"
    """"borrowed", or why the turn was computed instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened to a lease, `at_ms` after it was published."""

    what: str
    turn: int | None
    """Number of the turn it belongs to, from 1; None for what belongs to no turn."""
    at_ms: float
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStory:
    """A lease from publish to end."""

    lease_id: str
    turn: int
    """That lent it."""
    tokens: int
    events: tuple[Event, ...]

    @property
    def ended(self) -> bool:
        return any(event.what == "ended" for event in self.events)


def turns(spans: Iterable[SeenSpan], *, skip: int = 0) -> list[SeenSpan]:
    """The router's spans of turns in order of time, without the first `skip`.

    By time and not by conversation: a router that is too busy to ask the registry takes a turn for a new conversation.
    """
    return sorted((span for span in spans if span.name == TURN), key=lambda span: span.start_ns)[skip:]


def told_by_engines(spans: Iterable[SeenSpan]) -> list[SeenSpan]:
    """Without the registry's spans: they tell the same acts once more, from its side."""
    return [span for span in spans if span.service != REGISTRY]


def published_in(spans: Iterable[SeenSpan], trace_ids: Iterable[str]) -> list[SeenSpan]:
    """Leases that these turns lent, turn by turn."""
    published = [span for span in told_by_engines(spans) if span.name == PUBLISH]
    return [span for trace_id in trace_ids for span in published if span.trace_id == trace_id]


def reuse_of(spans: Iterable[SeenSpan], trace_id: str) -> Reuse:
    """What the turn of this trace reused. A READ that was refused counts its bytes, but no tokens."""
    mine = [span for span in told_by_engines(spans) if span.trace_id == trace_id]
    reads = [span for span in mine if span.name == READ]
    if reads:
        return Reuse(
            tokens=sum(span.number("kvlease.tokens_reused") for span in reads),
            bytes_read=sum(span.number("kvlease.bytes_read") for span in reads),
            outcome=reads[-1].text(OUTCOME),
        )
    resolves = [span for span in mine if span.name == RESOLVE]
    return Reuse(outcome=resolves[-1].text(OUTCOME)) if resolves else Reuse()


def lease_stories(spans: Sequence[SeenSpan], trace_ids: Sequence[str]) -> list[LeaseStory]:
    """Every lease that these turns published, in that order; the first of them is turn 1."""
    numbers = {trace_id: number for number, trace_id in enumerate(trace_ids, 1)}
    return [
        LeaseStory(
            lease_id=publish.text(LEASE),
            turn=numbers[publish.trace_id],
            tokens=publish.number("kvlease.tokens"),
            events=tuple(_events(spans, publish, numbers)),
        )
        for publish in published_in(spans, trace_ids)
    ]


def _events(spans: Iterable[SeenSpan], publish: SeenSpan, numbers: Mapping[str, int]) -> Iterable[Event]:
    lease_id = publish.text(LEASE)
    mine = [span for span in told_by_engines(spans) if span.text(LEASE) == lease_id]
    for span in sorted(mine, key=lambda span: span.end_ns):
        told = _told(span)
        if told is None:
            continue
        what, detail = told
        turn = None if span.name == END else numbers.get(span.trace_id)
        yield Event(what=what, turn=turn, at_ms=(span.end_ns - publish.end_ns) / 1e6, detail=detail)


def _told(span: SeenSpan) -> tuple[str, str] | None:
    """A span of an engine in words; None for spans that are not about a lease."""
    match span.name:
        case "publish":
            return "published", f"{span.number('kvlease.tokens')} tokens, {span.number('kvlease.blocks')} blocks"
        case "resolve":
            return "resolved", f"{span.number('kvlease.tokens_matched')} tokens in common, {span.ms:.1f} ms"
        case "read":
            return "read", f"{span.number('kvlease.bytes_read') / 2**20:.1f} MiB by NIXL in {span.ms:.1f} ms"
        case "prove":
            whole = span.text(OUTCOME) == BORROWED
            verdict = "seal whole" if whole else f"refused: {span.text(OUTCOME)}"
            return ("proven" if whole else "refused"), f"{verdict}, {span.ms:.2f} ms"
        case "renew":
            return "renewed", span.text(OUTCOME)
        case "end":
            return "ended", span.text("kvlease.end_reason")
        case _:
            return None
