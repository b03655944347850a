"""Every error of kvlease as a type, and the one table that gives each its gRPC status and its retry hint.

Pure: a core may raise these. No grpc here; `errors_grpc.py` turns an error into status details and back.
Invariant: `TABLE` has exactly one row per `Reason` and per concrete error, so nothing that is raised can reach a
peer without a reason. Reason strings are part of the contract (registry.proto): never renamed, never reused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Final, Self

ERROR_DOMAIN: Final = "kvlease"
"""Domain of google.rpc.ErrorInfo."""


class Reason(StrEnum):
    """Stable reason strings, as they travel in ErrorInfo."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    SESSION_GAP = "SESSION_GAP"
    SESSION_REPLACED = "SESSION_REPLACED"
    ENGINE_ID_IN_USE = "ENGINE_ID_IN_USE"
    NO_SESSION = "NO_SESSION"
    LENDER_SILENT = "LENDER_SILENT"
    OVERLOADED = "OVERLOADED"
    LIMIT_REACHED = "LIMIT_REACHED"
    COMPACTED = "COMPACTED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    MALFORMED_ANSWER = "MALFORMED_ANSWER"
    INTERNAL = "INTERNAL"


class Status(StrEnum):
    """The gRPC status codes that kvlease uses, by gRPC's own names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    INTERNAL = "INTERNAL"


class Limit(StrEnum):
    """Names of the limits of registry.proto, as `InvalidRequest.limit` gives them."""

    MESSAGE_BYTES = "max_message_bytes"
    RECORD_BYTES = "max_record_bytes"
    DIGESTS = "max_digests"
    BLOCKS = "max_blocks"
    BATCH = "max_batch"
    ID = "id_alphabet"
    ALIASES = "max_aliases"
    LABELS = "max_labels"
    FINGERPRINT_FIELDS = "max_fingerprint_fields"
    TRACEPARENT = "max_traceparent_chars"
    TEXT = "max_text_chars"
    PAGE = "max_page_size"


class KvleaseError(Exception):
    """Base of all errors that kvlease raises on purpose.

    `retry_after_ms` is how long to wait before asking again, None if the table's hint for this reason is meant.
    """

    reason: ClassVar[Reason]

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message: Final = message
        self.retry_after_ms: Final = retry_after_ms

    @property
    def details(self) -> Mapping[str, str]:
        """What travels as ErrorInfo metadata beside the message."""
        return _NO_DETAILS

    @classmethod
    def restore(cls, message: str, details: Mapping[str, str], retry_after_ms: int | None) -> Self:
        """The error again, from what travelled. Unknown details are ignored: a newer peer may send more."""
        del details
        return cls(message, retry_after_ms=retry_after_ms)

    def again(self) -> Self:
        """A fresh instance, for the next of several callers that fail for the same cause."""
        return type(self).restore(self.message, self.details, self.retry_after_ms)


_NO_DETAILS: Final[Mapping[str, str]] = MappingProxyType({})


class InvalidRequest(KvleaseError):
    """A field breaks the contract; `limit` names the limit if one was exceeded, "" otherwise. Never worth a retry."""

    reason = Reason.INVALID_ARGUMENT

    def __init__(
        self, message: str, *, field: str = "", limit: Limit | str = "", retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.field: Final = field
        self.limit: Final = str(limit)

    @property
    def details(self) -> Mapping[str, str]:
        return {"field": self.field, "limit": self.limit}

    @classmethod
    def restore(cls, message: str, details: Mapping[str, str], retry_after_ms: int | None) -> Self:
        return cls(
            message, field=details.get("field", ""), limit=details.get("limit", ""), retry_after_ms=retry_after_ms
        )


class SessionGap(KvleaseError):
    """A numbered message of a session is missing: connect again and present what is held."""

    reason = Reason.SESSION_GAP


class SessionReplaced(KvleaseError):
    """Another session of this engine took over: one of a twin, or an older one of the same lender that came late."""

    reason = Reason.SESSION_REPLACED


class EngineIdInUse(KvleaseError):
    """Another incarnation of the engine id is connected and heard."""

    reason = Reason.ENGINE_ID_IN_USE


class NoSession(KvleaseError):
    """The lender has no session on this registry, so nothing can be published for it."""

    reason = Reason.NO_SESSION


class LenderSilent(KvleaseError):
    """The lender did not answer a renewal in time."""

    reason = Reason.LENDER_SILENT


class Overloaded(KvleaseError):
    """Shed: the registry has more to do than it can."""

    reason = Reason.OVERLOADED


class LimitReached(KvleaseError):
    """A named limit on a count (sessions, streams, watchers, leases ...) is used up. `limit` names it."""

    reason = Reason.LIMIT_REACHED

    def __init__(self, message: str, *, limit: str = "", retry_after_ms: int | None = None) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.limit: Final = limit

    @property
    def details(self) -> Mapping[str, str]:
        return {"limit": self.limit}

    @classmethod
    def restore(cls, message: str, details: Mapping[str, str], retry_after_ms: int | None) -> Self:
        return cls(message, limit=details.get("limit", ""), retry_after_ms=retry_after_ms)


class Compacted(KvleaseError):
    """The watched revision is older than what is kept, or the watcher fell behind: list again."""

    reason = Reason.COMPACTED


class Unauthenticated(KvleaseError):
    """The caller did not say who it is, or could not prove it."""

    reason = Reason.UNAUTHENTICATED


class PermissionDenied(KvleaseError):
    """The caller's role may not do this."""

    reason = Reason.PERMISSION_DENIED


class RegistryUnavailable(KvleaseError):
    """No registry could be reached, or it is going away, or the client is closed."""

    reason = Reason.UNAVAILABLE


class DeadlineExceeded(KvleaseError):
    """The registry did not answer within the caller's time."""

    reason = Reason.DEADLINE_EXCEEDED


class MalformedAnswer(KvleaseError):
    """The registry's answer breaks the contract. Treated by borrowers as a miss."""

    reason = Reason.MALFORMED_ANSWER


class InternalError(KvleaseError):
    """A fault of the peer that has no reason of its own."""

    reason = Reason.INTERNAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: the type, the status it travels under, and the default retry hint (None: do not)."""

    error: type[KvleaseError]
    status: Status
    retry_after_ms: int | None = None


_ROWS: Final = (
    Row(error=InvalidRequest, status=Status.INVALID_ARGUMENT),
    Row(error=SessionGap, status=Status.FAILED_PRECONDITION, retry_after_ms=100),
    Row(error=SessionReplaced, status=Status.ABORTED),
    Row(error=EngineIdInUse, status=Status.ALREADY_EXISTS, retry_after_ms=2_000),
    Row(error=NoSession, status=Status.FAILED_PRECONDITION, retry_after_ms=500),
    Row(error=LenderSilent, status=Status.UNAVAILABLE, retry_after_ms=1_000),
    Row(error=Overloaded, status=Status.RESOURCE_EXHAUSTED, retry_after_ms=200),
    Row(error=LimitReached, status=Status.RESOURCE_EXHAUSTED),
    Row(error=Compacted, status=Status.OUT_OF_RANGE),
    Row(error=Unauthenticated, status=Status.UNAUTHENTICATED),
    Row(error=PermissionDenied, status=Status.PERMISSION_DENIED),
    Row(error=RegistryUnavailable, status=Status.UNAVAILABLE, retry_after_ms=200),
    Row(error=DeadlineExceeded, status=Status.DEADLINE_EXCEEDED),
    Row(error=MalformedAnswer, status=Status.INTERNAL),
    Row(error=InternalError, status=Status.INTERNAL),
)

TABLE: Final[Mapping[Reason, Row]] = MappingProxyType({row.error.reason: row for row in _ROWS})
"""The total table: reason -> type, status, retry hint."""


def retry_hint_ms(error: KvleaseError) -> int | None:
    """How long a caller should wait before a retry, in milliseconds; None if a retry is not worth it."""
    return error.retry_after_ms if error.retry_after_ms is not None else TABLE[error.reason].retry_after_ms
