"""What a command to the lease table brings about: what to store, what to tell watchers, whom to push to.

Pure values. The table returns them, the shell carries them out in a fixed order: store, then watchers, then pushes
and replies. Invariant: applying `stored` of every `Changes` in order to an empty store gives the table's leases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

from kvlease.registry.errors import KvleaseError
from kvlease.registry.values import (
    Alias,
    ConversationId,
    EndReason,
    Engine,
    EngineId,
    Incarnation,
    LeaseEvent,
    LeaseId,
    Publication,
    RenewStatus,
    TenantId,
)

SessionId = NewType("SessionId", int)
"""One open line of one lender, numbered by the table; never used twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePut:
    """The lease is held: new, or with another deadline."""

    engine_id: EngineId
    incarnation: Incarnation
    publication: Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGone:
    lease_id: LeaseId
    reason: EndReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePut:
    """The replica that says so has the engine's session: it is the engine's home from now on."""

    engine: Engine
    now_lender_ms: int
    """Of the hello: the lender's clock has never shown less since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGone:
    engine_id: EngineId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasPut:
    tenant: TenantId
    alias: Alias
    conversation: ConversationId
    ttl_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalAsked:
    """For the replica that is the lender's home. A message: kept nowhere."""

    lease_id: LeaseId
    ttl_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalRefused:
    """The lender's answer to `RenewalAsked` when it declines. A message: kept nowhere."""

    lease_id: LeaseId
    status: RenewStatus
    remaining_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOwed:
    """Somebody asked for this lease's end, and its lender has yet to confirm it. The `LeaseGone` comes next."""

    lease_id: LeaseId
    engine_id: EngineId
    incarnation: Incarnation
    reason: EndReason
    ttl_ms: int
    """How long the store is to remember it, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndHeard:
    """The lender does not hold this lease any more; or the store has remembered its end for long enough."""

    lease_id: LeaseId


StoreChange = (
    LeasePut | LeaseGone | EndOwed | EndHeard | EnginePut | EngineGone | AliasPut | RenewalAsked | RenewalRefused
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBeat:
    """What a home knows of a lender that has its session there."""

    engine_id: EngineId
    incarnation: Incarnation
    now_lender_ms: int
    """The lender's clock as the home estimates it: never ahead of the lender."""
    silent_ms: int
    """Since the lender was last heard."""
    free_blocks: int
    total_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEngine:
    """An engine in the store. `own`: this replica wrote it last."""

    put: EnginePut
    own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredView:
    """Everything in the store at one moment."""

    engines: tuple[StoredEngine, ...] = ()
    leases: tuple[LeasePut, ...] = ()
    owed: tuple[EndOwed, ...] = ()
    aliases: tuple[AliasPut, ...] = ()
    """As they were named: whoever loads them remembers them for longer than was asked, which harms nobody."""
    beats: tuple[EngineBeat, ...] = ()
    """The last ones of each replica, of unknown age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one commit, or one beat, put into the store: whole, in the store's order."""

    changes: tuple[StoreChange, ...] = ()
    beats: tuple[EngineBeat, ...] = ()
    own: bool = False
    """Written by the replica that is reading it."""
    expired: bool = False
    """Written by no replica: the store let keys go whose time was over."""
    beat_number: int | None = None
    """For an own beat: which one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPush:
    """Tell this lender to break the seal and free the blocks."""

    session: SessionId
    lease_id: LeaseId
    reason: EndReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewPush:
    """Ask this lender to move the deadline at least `ttl_ms` ahead of now (0: its own ttl)."""

    session: SessionId
    lease_id: LeaseId
    ttl_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalSettled:
    """The answer to everyone who asked to renew this lease. `status` is None if the lender stayed silent."""

    lease_id: LeaseId
    status: RenewStatus | None
    remaining_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed:
    """The session is no longer accepted; its stream is to be closed with `error`."""

    session: SessionId
    error: KvleaseError


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Everything one command brought about, each list in order."""

    stored: tuple[StoreChange, ...] = ()
    events: tuple[LeaseEvent, ...] = ()
    ends: tuple[EndPush, ...] = ()
    renewals: tuple[RenewPush, ...] = ()
    settled: tuple[RenewalSettled, ...] = ()
    closed: tuple[SessionClosed, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.stored or self.events or self.ends or self.renewals or self.settled or self.closed)


NOTHING = Changes()


@dataclass(slots=True, kw_only=True)
class Draft:
    """Changes while a command is being carried out."""

    stored: list[StoreChange] = field(default_factory=list)
    events: list[LeaseEvent] = field(default_factory=list)
    ends: list[EndPush] = field(default_factory=list)
    renewals: list[RenewPush] = field(default_factory=list)
    settled: list[RenewalSettled] = field(default_factory=list)
    closed: list[SessionClosed] = field(default_factory=list)

    def done(self) -> Changes:
        return Changes(
            stored=tuple(self.stored),
            events=tuple(self.events),
            ends=tuple(self.ends),
            renewals=tuple(self.renewals),
            settled=tuple(self.settled),
            closed=tuple(self.closed),
        )
