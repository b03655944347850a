"""One prompt on its way through a prefill engine, and its loads: what the engine's steps change.

No rules here; those are in `borrower.py`. Invariant: `blocks` are the turn's own until the engine drops them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvlease.connector.borrower import Question
from kvlease.connector.prover import Release
from kvlease.connector.seal import Proof
from kvlease.registry.values import ConversationId, LeaseId, TenantId

from tests.sim.fabric import BlockRead, SlotRead
from tests.sim.tokens import Text


class Stage(StrEnum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    GONE = "gone"


@dataclass(slots=True, kw_only=True)
class Load:
    """One rank's share of a READ."""

    read: BlockRead
    proofs: tuple[Proof, ...]
    address: str
    early: list[SlotRead] | None
    slots: list[SlotRead] = field(default_factory=list)
    whole_before: bool = False


@dataclass(slots=True, kw_only=True)
class BorrowerTurn:
    """One prompt to prefill. `done` is told whether it finished, once."""

    request_id: str
    tenant: TenantId
    conversation: ConversationId | None
    lease_id: LeaseId | None
    text: Text
    done: Callable[[bool], None]
    stamps: tuple[int, ...] = ()
    question: Question | None = None
    stage: Stage = Stage.WAITING
    aborted: bool = False
    begun_ms: int = 0
    paused_ms: int = 0
    """When it began to wait, or to load, and how long the engine had been paused by then."""
    blocks: list[int] = field(default_factory=list)
    targets: tuple[int, ...] = ()
    computed: int = 0
    matched: int = 0
    loads: dict[int, Load] = field(default_factory=dict)
    released: dict[int, Release] = field(default_factory=dict)
    outcome: str = ""
