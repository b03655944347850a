"""What the lender's core asks its adapter to do, as frozen values. Pure.

The adapter carries them out in the order given, on the engine's thread. `BreakSeal` always stands before the `Free`
or the hand-out that it protects.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlease.registry.values import EndReason, LeaseId, Publication, RenewStatus


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

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSeal:
    """Write the hash, then the value, in every rank's table."""

    slot: int
    value: int
    record_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakSeal:
    """Write 0 to the value in every rank's table."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    publication: Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceLapsed:
    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceRenewed:
    lease_id: LeaseId
    deadline_ms: int
    publication: Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceEnded:
    lease_id: LeaseId
    reason: EndReason
    publication: Publication


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
