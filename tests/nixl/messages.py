"""What the pair's processes say to each other and to the test that started them: frozen values, and running counts.

No behaviour beyond encoding. Settings travel as JSON on the command line, counts and readiness as JSON lines on
standard output, records over a Unix socket between lender and borrower; it stands where a deployment has the registry.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final

from kvlease.registry.values import EngineId, LeaseId, Record

from tests.nixl.content import Prompt

ENGINE: Final = EngineId("lender")


class Transport(StrEnum):
    """How UCX moves bytes. `sm`: the borrower copies by itself; `tcp`: the lender's progress thread answers."""

    SM = "sm"
    TCP = "tcp"

    @property
    def ucx_tls(self) -> str:
        return "sm,tcp,self" if self is Transport.SM else "tcp,self"


class Fault(StrEnum):
    """Ways to break the contract, each by a double in `faults.py`; NONE is the product as it is."""

    NONE = "none"
    SEAL_NOT_READ = "seal_not_read"
    SEAL_READ_BEFORE_BLOCKS = "seal_read_before_blocks"
    SEAL_BROKEN_AFTER_REUSE = "seal_broken_after_reuse"
    SLOT_VALUE_REUSED = "slot_value_reused"
    MAPPED_FROM_TAIL = "mapped_from_tail"
    REUSE_CALLBACK_PER_LEASE = "reuse_callback_per_lease"
    RECORD_HASH_NOT_COMPARED = "record_hash_not_compared"
    QUARANTINE_LEFT_OUT = "quarantine_left_out"


class Workload(StrEnum):
    """What the lender does."""

    CHURN = "churn"
    """Lends, lapses, renews, ends and reuses as fast as it can."""
    SAME_SLOT = "same_slot"
    """One lease at a time, always the same record but for the seal; other content in its blocks in between."""
    ONE_LEASE = "one_lease"
    """One lease for everybody, ended and overwritten on SIGUSR1, and handed out even then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LenderSettings:
    socket: str
    seed: int
    engine: str = ENGINE
    fault: str = Fault.NONE
    workload: str = Workload.CHURN
    blocks: int = 160
    block_bytes: int = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowerSettings:
    socket: str
    seed: int
    reads: int
    """READs to post before it ends."""
    fault: str = Fault.NONE
    block_bytes: int = 4_096
    in_flight: int = 6
    read_limit_ms: int = 5_000
    linger_ms: int = 2
    """A borrower that is slow to look: now and then a load rests this long at most before and after its READ."""
    patience_s: float = 30.0
    """How long it looks for a lender before it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The lender lends."""

    pid: int
    table_address: int
    memory_address: int
    shared_file: str


@dataclass(slots=True, kw_only=True)
class Counts:
    """What a borrower saw so far. Each READ ends as right, wrong or refused."""

    pid: int = 0
    reads: int = 0
    right: int = 0
    wrong: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    refused_right: int = 0
    """Refused although the bytes were right."""
    overlap: int = 0
    """The seal was whole when the READ was posted and broken when it was over."""
    overlap_wrong: int = 0
    """Of these: the bytes were wrong, and only the seal said so."""
    not_asked: int = 0
    """Offers that the borrower's core turned down before any READ: its prompt had diverged, nothing was left."""
    wrong_in_use: int = 0
    """Local blocks that changed while a request was using them."""
    late: int = 0
    """READs over the limit whose blocks went into quarantine."""
    late_landed: int = 0
    """Of these: landed afterwards and changed the blocks that waited for it."""
    late_over: int = 0
    """Of these: over, landed or not; their blocks are back."""
    old_incarnation: int = 0
    """READs by a record of an earlier incarnation, sent to the one that took its place; all must be refused."""
    old_incarnation_accepted: int = 0
    incarnations: int = 0
    quarantined: int = 0
    retired_seals: int = 0
    reading: int = 0
    """READs of blocks posted and not over, those that are late left out."""
    read_us: list[int] = field(default_factory=list)
    """p50, p90, p99 of a READ from post to seen, microseconds."""
    seal_us: list[int] = field(default_factory=list)
    """The same of the seal's READ."""
    done: bool = False

    @property
    def refusals(self) -> int:
        return sum(self.refused.values())


def add(parts: list[Counts]) -> Counts:
    """All borrowers together; percentiles are the worst borrower's."""
    total = Counts()
    for part in parts:
        for name in Counts.__dataclass_fields__:
            if name in {"refused", "read_us", "seal_us", "done", "pid"}:
                continue
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for reason, count in part.refused.items():
            total.refused[reason] = total.refused.get(reason, 0) + count
        total.read_us = max(total.read_us, part.read_us)
        total.seal_us = max(total.seal_us, part.seal_us)
    total.done = all(part.done for part in parts)
    return total


def to_line(value: Ready | Counts | LenderSettings | BorrowerSettings) -> str:
    return json.dumps(asdict(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The lender's first word to a borrower: the handshake that vLLM's side channel makes in a deployment."""

    agent_metadata: bytes
    memory_address: int
    incarnation: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """A borrower asks for this many offers."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One lease as a registry would tell it, right or not; and whose words its blocks should be."""

    lease_id: LeaseId
    incarnation: bytes
    record: Record
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    offers: tuple[Offer, ...]
