"""Pauses between attempts to reach a registry. Pure: the caller sleeps and supplies the randomness.

Invariant: a pause is never above `cap_ms`, and never below half of what doubling asks for; so many callers that
lost the registry at one instant come back spread out, and each within `cap_ms` of the registry's return.
"""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """Doubling pauses with jitter, in milliseconds: `first_ms`, twice that, ... `cap_ms`."""

    __slots__ = ("_cap_ms", "_first_ms", "_fraction", "_step_ms")

    def __init__(self, *, first_ms: int, cap_ms: int, fraction: Callable[[], float]) -> None:
        """`fraction` gives a number in [0, 1) for each pause. Raises ValueError unless 0 < first_ms <= cap_ms."""
        if not 0 < first_ms <= cap_ms:
            raise ValueError(f"backoff needs 0 < first_ms <= cap_ms, not {first_ms} and {cap_ms}")
        self._first_ms = first_ms
        self._cap_ms = cap_ms
        self._fraction = fraction
        self._step_ms = first_ms

    def next_ms(self) -> int:
        """The pause before the next attempt."""
        step_ms = self._step_ms
        self._step_ms = min(self._cap_ms, step_ms * 2)
        return step_ms - int(self._fraction() * step_ms / 2)

    def reset(self) -> None:
        """The last attempt was good: start small again."""
        self._step_ms = self._first_ms
