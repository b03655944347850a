"""The nouns of a turn: what was asked, what is known while it is under way, and how it ended.

No behaviour. `turns.py` fills a `Turn` in step by step; `legs.py` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvlease.registry.values import Alias, ConversationId, LeaseView
from kvlease.router.body import AloneReason, JsonObject, LeaseTerms, TurnBody
from kvlease.router.conversations import AliasChain
from kvlease.router.routes import Role, Target
from opentelemetry.context import Context
from opentelemetry.trace import Span


class TurnOutcome(StrEnum):
    SERVED = "served"
    REFUSED = "refused"
    """An engine's 4xx, passed on."""
    FAILED = "failed"
    """No engine could serve it, or none in the time that a router that stops has; nothing was sent but an error."""
    BROKEN = "broken"
    """The stream had begun and ended with an error event."""
    CLIENT_GONE = "client_gone"
    INVALID = "invalid"
    """Refused by the router itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A turn as the edge hands it in. `headers` go to engines as they are."""

    body: TurnBody
    conversation: ConversationId | None
    """As a header named it."""
    headers: Mapping[str, str]
    context: Context
    """The client's trace context."""
    received_ms: int


@dataclass(slots=True, kw_only=True)
class Turn:
    """A turn under way."""

    request: TurnRequest
    conversation: ConversationId
    chain: AliasChain | None
    """None if nothing is to be named."""
    taken: Alias | None
    """Gave it its conversation. None if a client named that, or it is new."""
    terms: LeaseTerms | None
    lender: Target | None
    lease: LeaseView | None
    span: Span
    alone: AloneReason | None
    handoff: JsonObject | None = None
    tried: dict[Role, set[Target]] = field(default_factory=lambda: {role: set() for role in Role})
