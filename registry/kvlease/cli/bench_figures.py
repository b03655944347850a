"""Latencies of one kind of call, and what is said of them.

Pure. Invariant: what failed is counted and has no latency, so that errors cannot make a registry look fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`rate` in calls a second, over all callers; latencies are None if nothing succeeded."""

    what: str
    calls: int
    failed: int
    callers: int
    p50_ms: float | None
    p99_ms: float | None
    rate: float


@dataclass(slots=True)
class Samples:
    """Seconds of each call that succeeded, in the order of their ends."""

    took_s: list[float] = field(default_factory=list)
    failed: int = 0

    def figure(self, what: str, *, callers: int, over_s: float) -> Figure:
        ordered = sorted(self.took_s)
        return Figure(
            what=what,
            calls=len(ordered) + self.failed,
            failed=self.failed,
            callers=callers,
            p50_ms=_quantile_ms(ordered, 0.50),
            p99_ms=_quantile_ms(ordered, 0.99),
            rate=len(ordered) / over_s if over_s > 0 else 0.0,
        )


def _quantile_ms(ordered: list[float], part: float) -> float | None:
    """The nearest rank."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1_000
