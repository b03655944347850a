"""Spans that never quote what went wrong: an exception's message could hold what a client sent.

Attributes are ids, numbers and closed reasons; prompts, token ids and credentials are never among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer


@contextmanager
def quiet_span(tracer: Tracer, name: str, kind: SpanKind, context: Context | None = None) -> Iterator[Span]:
    """The current span for the block; `context` is its parent, the current one if None."""
    with tracer.start_as_current_span(
        name, context=context, kind=kind, record_exception=False, set_status_on_exception=False
    ) as span:
        yield span
