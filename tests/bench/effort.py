"""How much a run measures: everything that trades time for confidence, in one place. Pure.

`FULL` takes minutes and is what budgets are judged by; `QUICK` takes seconds and shows only that everything runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    rounds: int
    """Each measures every server once, in a rotating order."""
    leases: int
    """Leases of each size that the registry holds, and that a lender has out."""
    calls: int
    """One caller: calls in a round."""
    many_calls: int
    """Many callers: calls in a round."""
    messages: int
    """Batched: messages of 32 in a round, for small leases; fewer for large ones."""
    publishes: int
    """Leases published in a round, one by one or batched."""
    steps: int
    """Engine steps, and calls of each hook."""
    seals: int
    """Seal READs."""
    held: int
    """Leases of a registry that is full."""


FULL: Final = Effort(
    rounds=15,
    leases=1_000,
    calls=120,
    many_calls=700,
    messages=64,
    publishes=640,
    steps=1_500,
    seals=1_000,
    held=1_000_000,
)
QUICK: Final = Effort(
    rounds=1, leases=40, calls=10, many_calls=40, messages=4, publishes=64, steps=20, seals=20, held=2_000
)
