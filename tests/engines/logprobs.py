"""Whether two answers are the same, judged by log-probs.

With a small random model, greedy tokens are often equal although the KV behind them is wrong, so tokens prove nothing.
Right answers differ by rounding only (seen: 2e-6), wrong ones by 0.04 and more; the tolerance lies far from both.
"""

from __future__ import annotations

from typing import Final

from tests.engines.openai_client import Answer

TOLERANCE: Final = 1e-4
"""Largest accepted difference of one token's log-prob (natural logarithm)."""


class DifferentAnswers(AssertionError):
    """Two answers that had to be the same are not."""


def largest_difference(one: Answer, other: Answer) -> float:
    """Over all tokens; infinite if the tokens themselves differ or there are none to compare."""
    if not one.logprobs or one.tokens != other.tokens or len(one.logprobs) != len(other.logprobs):
        return float("inf")
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def assert_same(one: Answer, other: Answer, what: str = "answers") -> None:
    """Raise DifferentAnswers unless tokens are equal and log-probs agree within TOLERANCE."""
    difference = largest_difference(one, other)
    if difference > TOLERANCE:
        raise DifferentAnswers(f"{what} differ: {difference:.6f} in log-prob, tolerance {TOLERANCE}")
