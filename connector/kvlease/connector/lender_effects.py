"""What the lender's core asks its adapter to do, as frozen values. Pure.

The adapter carries them out in the order given, on the engine's thread. `BreakSeal` always stands before the `Free`
or the hand-out that it protects.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlease.connector.lender_publication import Draft
from kvlease.connector.loan import Loan
from kvlease.registry.values import EndReason, LeaseId, RenewStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Take one reference on each block."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Give the reference back; the blocks may be handed out again at once."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin:
    """Give the reference back, last in the queue, and call `on_reuse` when a block is handed out."""

    lease_id: LeaseId
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSeal:
    """Write the value in every rank's table. The hash of the record follows before the lease is announced."""

    slot: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakSeal:
    """Write 0 to the value in every rank's table."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Make the publication, write the hash of its record beside the seal's value, then tell: on any one thread."""

    draft: Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceLapsed:
    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceRenewed:
    lease_id: LeaseId
    deadline_ms: int
    loan: Loan


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceEnded:
    lease_id: LeaseId
    reason: EndReason
    loan: Loan


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseRenewal:
    lease_id: LeaseId
    status: RenewStatus


Effect = (
    Pin
    | Free
    | Unpin
    | WriteSeal
    | BreakSeal
    | Announce
    | AnnounceLapsed
    | AnnounceRenewed
    | AnnounceEnded
    | RefuseRenewal
)
