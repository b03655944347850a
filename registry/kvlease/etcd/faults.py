"""What a failed call means: which typed error it is, and whether the call may be made again. Pure but for gRPC's types.

etcd says most of it in the status' text, which is part of its API (rpctypes). Invariant: `NOT_DONE` and `TOKEN` are
only for failures after which the request cannot have been proposed to the cluster; all else that is no refusal is
`IN_DOUBT`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Final

import grpc
from kvlease.etcd.errors import (
    AnswerTooLarge,
    AuthenticationFailed,
    Compacted,
    EtcdError,
    InvalidRequest,
    LeaseExists,
    LeaseNotFound,
    NoSpace,
    PermissionDenied,
    Refused,
)
from kvlease.etcd.values import NO_LEASE, Revision


class Fault(Enum):
    """What to do about a failed try."""

    REFUSED = auto()
    """etcd answered no; another member will, too."""
    NOT_DONE = auto()
    """Surely not done; another member may do it."""
    IN_DOUBT = auto()
    """May have been done."""
    TOKEN = auto()
    """Not done: the token is not valid here, or not any more."""


_NOT_DONE: Final = (
    "etcdserver: no leader",  # by the interceptor for hasleader, before anything else
    "etcdserver: too many requests",  # refused before it is proposed
    "etcdserver: rpc not supported for learner",
    "failed to connect to all addresses",
)
_TOKEN: Final = (
    "etcdserver: invalid auth token",
    "etcdserver: revision of auth store is old",
    "etcdserver: user name is empty",  # authentication was turned on after we connected
)

_REFUSALS: Final[tuple[tuple[str, Callable[[str], EtcdError]], ...]] = (
    ("required revision has been compacted", lambda text: Compacted(text, compact_revision=Revision(0))),
    ("requested lease not found", LeaseNotFound),
    ("lease already exists", lambda text: LeaseExists(text, lease_id=NO_LEASE)),
    ("authentication failed", AuthenticationFailed),
    ("invalid auth token", AuthenticationFailed),
    ("user name is empty", lambda text: AuthenticationFailed(f"{text}: this etcd wants a user and password")),
    ("revision of auth store is old", AuthenticationFailed),
    ("permission denied", PermissionDenied),
    ("database space exceeded", NoSpace),
    ("etcdserver: no space", NoSpace),
    ("grpc: received message larger than max", InvalidRequest),
    ("Received message larger than max", AnswerTooLarge),
)
_LOST: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
    }
)


def judge(code: grpc.StatusCode, details: str) -> Fault:
    """What a status with this text says about the call."""
    if any(text in details for text in _TOKEN):
        return Fault.TOKEN
    if any(text in details for text in _NOT_DONE):
        return Fault.NOT_DONE
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return Fault.TOKEN
    return Fault.IN_DOUBT if code in _LOST else Fault.REFUSED


def refusal(code: grpc.StatusCode, details: str) -> EtcdError:
    """The typed error of a status that is a refusal."""
    for text, error in _REFUSALS:
        if text in details:
            return error(details)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(details)
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return PermissionDenied(details)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AuthenticationFailed(details)
    return Refused(f"{code.name}: {details}", code=code.name)
