"""What the connector did, as OpenTelemetry spans: made after the fact from notes of the engine's thread.

A note is a name, two instants of the monotonic clock and a few ids and numbers; never a prompt, a token id or an
error text of somebody else. Spans of one request share its trace; a READ links to the turn that lent.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvlease.registry.telemetry import Tracing, context_from_traceparent, link_from_traceparent
from opentelemetry.trace import NoOpTracer, SpanKind

Attribute = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A span to be: `start_ns` and `end_ns` are of the monotonic clock."""

    name: str
    start_ns: int
    end_ns: int
    traceparent: str = ""
    lent_by: str = ""
    """Traceparent of the turn that lent."""
    attributes: tuple[tuple[str, Attribute], ...] = ()


class Journal:
    """Turns notes into spans. `record` is called on one thread."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()

    @property
    def traced(self) -> bool:
        """Whether spans go anywhere."""
        return not isinstance(self._tracing.tracer, NoOpTracer)

    def record(self, note: Note) -> None:
        link = link_from_traceparent(note.lent_by)
        span = self._tracing.tracer.start_span(
            note.name,
            context=context_from_traceparent(note.traceparent),
            kind=SpanKind.INTERNAL,
            links=[link] if link else (),
            attributes=dict(note.attributes),
            start_time=note.start_ns + self._wall_offset_ns,
        )
        span.end(note.end_ns + self._wall_offset_ns)

    def close(self) -> None:
        """Sends what is left; blocks for the exporter's limit at most."""
        self._tracing.close()
