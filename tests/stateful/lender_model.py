"""What the model of `test_lender_machine.py` knows of leases and of the turns that they are made of.

Values only; what should happen to them is decided there. Invariant: a lease's limit never moves.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lease:
    """What the model knows of one."""

    blocks: tuple[int, ...]
    text: str
    conversation: str | None
    deadline_ms: int
    limit_ms: int
    """No renewal moves the deadline past it."""
    lapsed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Blocks that the engine holds for a request, and the tokens in them, a letter for each."""

    text: str
    blocks: tuple[int, ...]
