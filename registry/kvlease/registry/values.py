"""The nouns of kvlease as frozen values: ids, lease states, records, what is asked and what is answered.

Shared by every part (registry, connector, router). No behaviour beyond validation, no I/O, no clock, no
protobuf: `wire.py` turns these into messages and back.

Units: `*_ms` are milliseconds; `deadline_ms` is an instant of the *lender's* monotonic clock, never of ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, NewType

EngineId = NewType("EngineId", str)
Incarnation = NewType("Incarnation", bytes)
"""16 random bytes, new at each start of an engine."""
LeaseId = NewType("LeaseId", str)
TenantId = NewType("TenantId", str)
ConversationId = NewType("ConversationId", str)
Alias = NewType("Alias", bytes)
"""16 bytes: a router's hash of a chat's message prefix."""

DEFAULT_TENANT: Final = TenantId("default")

DIGEST_BYTES: Final = 16
INCARNATION_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 16
ALIAS_BYTES: Final = 16
MAX_DIGESTS: Final = 4096
"""Strides a lease: 262 144 tokens at 64 tokens a stride."""
MAX_BLOCKS: Final = 65_536
"""Blocks a lease, all KV groups together: their ids alone would fill a record."""
MAX_RECORD_BYTES: Final = 256 * 1024
MAX_ID_CHARS: Final = 128
MAX_BATCH: Final = 256
"""Items in one publish or resolve message."""
MAX_ALIASES: Final = 64
MAX_INSTANT_MS: Final = 2**53 - 1
"""Of a lender's clock: far from what 64 bits hold, so that differences and estimates stay within them."""
MAX_TOKENS: Final = 2**32 - 1
"""A lease: what a message can say."""
MAX_SIZE_BYTES: Final = 2**53 - 1
"""Of a lease's KV: far from what 64 bits hold, so that sums are exact wherever they are shown."""
MAX_LABELS: Final = 16
MAX_FINGERPRINT_FIELDS: Final = 32
MAX_TRACEPARENT_CHARS: Final = 55
MAX_TEXT_CHARS: Final = 1024
"""Free text for operators: a base URL, a version, the name or value of a label or fingerprint field."""
MAX_PAGE: Final = 10_000
"""Leases in one answer to a list."""
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""One gRPC message, either way. Senders split what is larger."""

_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}\Z")


def is_id(text: str) -> bool:
    """Whether `text` is a legal engine, lease, tenant or conversation id: 1-128 of [A-Za-z0-9._:@/+=-]."""
    return _ID.match(text) is not None


class LeaseState(StrEnum):
    LIVE = "live"
    LAPSED = "lapsed"
    ENDED = "ended"


class EndReason(StrEnum):
    EXPIRED = "expired"
    RELEASED = "released"
    SUPERSEDED = "superseded"
    PRESSURE = "pressure"
    REUSED = "reused"
    DRAINED = "drained"
    WEIGHTS_CHANGED = "weights_changed"
    CACHE_RESET = "cache_reset"
    LENDER_LOST = "lender_lost"
    QUOTA = "quota"


class OnDeadline(StrEnum):
    LAPSE = "lapse"
    END = "end"


class MissReason(StrEnum):
    """Why the registry found nothing. Borrowers add reasons of their own (connector)."""

    UNKNOWN = "unknown"
    ENDED = "ended"
    SUSPECT = "suspect"
    DIVERGED = "diverged"
    FINGERPRINT = "fingerprint"
    INVALID = "invalid"
    OVERLOADED = "overloaded"


class RenewStatus(StrEnum):
    RENEWED = "renewed"
    UNKNOWN = "unknown"
    ENDED = "ended"
    AT_LIMIT = "at_limit"
    PRESSURE = "pressure"
    DISABLED = "disabled"


class PublishStatus(StrEnum):
    PUBLISHED = "published"
    CONFLICT = "conflict"
    ENDED = "ended"
    QUOTA = "quota"
    INVALID = "invalid"


class LeaseEventType(StrEnum):
    PUBLISHED = "published"
    RENEWED = "renewed"
    LAPSED = "lapsed"
    ENDED = "ended"
    SUSPECT = "suspect"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What lender and borrower must agree on before a digest means anything; `hash` is compared, `fields` explain."""

    hash: bytes = b""
    fields: tuple[tuple[str, str], ...] = ()
    """Sorted by name."""

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the fields in which the two differ, sorted."""
        mine, theirs = dict(self.fields), dict(other.fields)
        return tuple(sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the lender published, byte for byte. The seal holds a hash over both parts."""

    digests: bytes
    """16 bytes per stride of tokens, each covering everything before it."""
    body: bytes
    """A serialised RecordBody; the registry never decodes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    engine_id: EngineId
    incarnation: Incarnation
    api_url: str = ""
    version: str = ""
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A lease as its lender makes it known."""

    lease_id: LeaseId
    tenant: TenantId
    conversation: ConversationId | None
    stride_tokens: int
    block_count: int
    size_bytes: int
    deadline_ms: int
    on_deadline: OnDeadline
    fingerprint_hash: bytes
    record: Record
    traceparent: str = ""
    lapsed: bool = False

    @property
    def strides(self) -> int:
        return len(self.record.digests) // DIGEST_BYTES

    @property
    def tokens(self) -> int:
        """Tokens that the digests cover."""
        return self.strides * self.stride_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult:
    lease_id: LeaseId
    status: PublishStatus
    message: str = ""
    superseded: tuple[LeaseId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewResult:
    status: RenewStatus
    remaining_ms: int = 0
    """Until the new deadline, by the lender's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A lease as everyone but its borrower sees it: without the record."""

    lease_id: LeaseId
    tenant: TenantId
    conversation: ConversationId | None
    engine_id: EngineId
    incarnation: Incarnation
    tokens: int
    stride_tokens: int
    blocks: int
    size_bytes: int
    state: LeaseState
    remaining_ms: int
    """Until the deadline, by the lender's clock; negative once lapsed."""
    end_reason: EndReason | None = None
    suspect: bool = False
    traceparent: str = ""
    api_url: str = ""
    """Of the lender, "" if it did not say."""


class ResolveQuery(NamedTuple):
    """What a borrower asks. At least one of `lease_id`, `conversation` and `digests` must be given.

    A named tuple, because a registry makes one for every resolve: a third of a frozen dataclass's cost.
    """

    tenant: TenantId
    lease_id: LeaseId | None = None
    conversation: ConversationId | None = None
    digests: bytes = b""
    stride_tokens: int = 0
    fingerprint_hash: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    lease_id: LeaseId
    engine_id: EngineId
    incarnation: Incarnation
    conversation: ConversationId | None
    record: Record
    matched_strides: int
    state: LeaseState
    remaining_ms: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    reason: MissReason
    end_reason: EndReason | None = None
    lender_fingerprint: Fingerprint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where a conversation's KV is; `lease` is None on a miss, `conversation` is None if it is not known."""

    conversation: ConversationId | None
    lease: LeaseView | None
    api_url: str = ""
    reason: MissReason | None = None


class EndScope(StrEnum):
    """What an end is aimed at."""

    LEASE = "lease"
    CONVERSATION = "conversation"
    ENGINE = "engine"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOrder:
    """A request to end leases. `target` is the lease, conversation or engine id by `scope`; "" for a whole tenant.

    `tenant` does not restrict an end by engine: that is a drain, for operators.
    """

    tenant: TenantId
    scope: EndScope
    target: str
    reason: EndReason


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFilter:
    """Which leases a watch or a list is about; None: all of them."""

    tenant: TenantId | None = None
    engine_id: EngineId | None = None
    conversation: ConversationId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEvent:
    revision: int
    type: LeaseEventType
    lease: LeaseView


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEvents:
    """One message of a watch: everything up to `revision` has been delivered; `events` may be empty."""

    revision: int
    events: tuple[LeaseEvent, ...] = ()
    newest: int = 0
    """The registry's revision when it sent this; 0: it did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseList:
    """Leases, and the revision from which a watch misses nothing of what changed since.

    `source`: where the replica is whose revision it is.
    """

    revision: int
    leases: tuple[LeaseView, ...]
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    engine: Engine
    connected: bool
    suspect: bool
    silent_ms: int
    leases: int
    leased_blocks: int
    free_blocks: int
    total_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryStatus:
    """The registry that answered; what an older one does not tell is ""."""

    replica_id: str = ""
    version: str = ""
    """Of its kvlease."""
    shedding: bool = False
    """It refuses resolves at present, because it has more to do than it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A registry, and the engines that it knows."""

    registry: RegistryStatus
    engines: tuple[EngineStatus, ...]


def common_strides(a: bytes, b: bytes) -> int:
    """Length in strides of the common prefix of two digest chains.

    A digest covers everything before it, so equality at one place implies equality before it, and a binary search
    decides in O(log n) comparisons.
    """
    low, high = 0, min(len(a), len(b)) // DIGEST_BYTES
    if b.startswith(a) if len(a) <= len(b) else a.startswith(b):  # the common case, without a copy
        return high
    while low < high:
        middle = (low + high + 1) // 2
        start, stop = (middle - 1) * DIGEST_BYTES, middle * DIGEST_BYTES
        if a[start:stop] == b[start:stop]:
            low = middle
        else:
            high = middle - 1
    return low
