"""Every error of the etcd client as a type with a stable reason. Pure: gRPC statuses become these in `faults.py`.

Two of them decide what a caller does next. `Unavailable` says that nothing was changed. `Doubtful` says that a change
may have happened, or may still happen: a member that hung with the request in its socket can propose it when it wakes.
So read back, and guard what is written next with a compare on what was read, which a late change then fails.
"""

from __future__ import annotations

from typing import ClassVar, Final

from kvlease.etcd.values import Header, LeaseId, Revision


class EtcdError(Exception):
    """Base of all errors that the client raises on purpose; `message` says what to do where something can be done."""

    reason: ClassVar[str] = "ETCD"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message: Final = message


class Unavailable(EtcdError):
    """No endpoint answered within the call's time, and nothing was changed by it. Worth a retry."""

    reason = "UNAVAILABLE"


class Doubtful(EtcdError):
    """A change was sent and its outcome is unknown: read it back. It may yet be applied (see above)."""

    reason = "DOUBTFUL"


class Compacted(EtcdError):
    """The revision asked for is gone: list again. `compact_revision` is the oldest kept, 0 where etcd did not say."""

    reason = "COMPACTED"

    def __init__(self, message: str, *, compact_revision: Revision) -> None:
        super().__init__(message)
        self.compact_revision: Final = compact_revision


class HistoryChanged(EtcdError):
    """etcd's past is not the one that was seen: restored from a snapshot, or another cluster. Forget all, list again.

    `seen` is what had been delivered, `found` what a linearizable read says now.
    """

    reason = "HISTORY_CHANGED"

    def __init__(self, message: str, *, seen: Header, found: Header) -> None:
        super().__init__(message)
        self.seen: Final = seen
        self.found: Final = found


class AuthenticationFailed(EtcdError):
    """Unknown user, wrong password, or etcd wants a user and none is configured. Not worth a retry."""

    reason = "AUTHENTICATION_FAILED"


class PermissionDenied(EtcdError):
    """The user's roles do not cover the keys."""

    reason = "PERMISSION_DENIED"


class LeaseNotFound(EtcdError):
    """The lease has expired, or was revoked, or never was."""

    reason = "LEASE_NOT_FOUND"


class LeaseExists(EtcdError):
    """A lease with that id is there already."""

    reason = "LEASE_EXISTS"

    def __init__(self, message: str, *, lease_id: LeaseId) -> None:
        super().__init__(message)
        self.lease_id: Final = lease_id


class InvalidRequest(EtcdError):
    """etcd, or this client before it, refuses the request as it is: too large, too many operations, a key put twice."""

    reason = "INVALID_REQUEST"


class AnswerTooLarge(EtcdError):
    """The answer is above `EtcdLimits.max_answer_bytes`: ask for less at once."""

    reason = "ANSWER_TOO_LARGE"


class NoSpace(EtcdError):
    """etcd's database has reached its quota and takes no more writes: compact, defragment, disarm the alarm."""

    reason = "NO_SPACE"


class Refused(EtcdError):
    """etcd refuses for a reason that has no type here; `code` is the gRPC status' name."""

    reason = "REFUSED"

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code: Final = code


class ClientClosed(EtcdError):
    """The client was closed, or not opened yet."""

    reason = "CLOSED"


class CredentialsInvalid(EtcdError):
    """Files or settings of the credentials cannot be used; the message says what to change."""

    reason = "CREDENTIALS_INVALID"
