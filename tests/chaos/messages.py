"""What the processes of a chaos run are told, and what they say: frozen values and JSON lines, nothing else.

A lender says what became of its leases, a borrower its running counts (`tests.nixl.messages.Counts` and what it did
without a READ). Leases are named by id; content is never in a message.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosLenderSettings:
    engine: str
    registry: str
    socket: str
    seed: int
    turn_ms: int = 80
    """Between two turns."""
    blocks: int = 300
    block_bytes: int = 4_096
    slots: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosBorrowerSettings:
    registry: str
    sockets: tuple[str, ...]
    """One for each lender: the handshake that vLLM's side channel makes in a deployment."""
    seed: int
    fault: str
    turn_ms: int = 25
    block_bytes: int = 4_096
    in_flight: int = 6
    read_limit_ms: int = 5_000
    linger_ms: int = 80
    """Now and then a load rests this long at most before and after its READ: blocks are reused meanwhile."""


@dataclass(slots=True, kw_only=True)
class News:
    """What happened to a lender's leases since it said so last."""

    pid: int
    held: dict[str, str] = field(default_factory=dict)
    """With `answers`: all leases it holds, and the beginning of their records' hashes."""
    answers: int = 0
    """The number of the question that `held` answers; 0: none was asked."""
    acknowledged: list[str] = field(default_factory=list)
    """Publishes that the registry accepted."""
    ordered: list[tuple[str, str]] = field(default_factory=list)
    """Ends that the registry ordered, with reasons."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Publishes that it did not accept, with statuses."""
    ended: list[tuple[str, str]] = field(default_factory=list)
    """Ends by the lender itself or carried out by it, with reasons."""
    connects: int = 0
    wall_s: float = 0.0
    """Its wall clock, which the run may have stepped."""


@dataclass(slots=True, kw_only=True)
class Turns:
    """A borrower's turns that came to no READ, by reason, beside the counts of its READs."""

    pid: int
    turns: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)


def to_line(value: ChaosLenderSettings | ChaosBorrowerSettings | News | Turns) -> str:
    return json.dumps(asdict(value))
