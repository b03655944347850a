"""What goes into and comes out of etcd, as plain frozen values. No protobuf, no I/O.

Keys and values are bytes. A *revision* counts the changes of the whole store: one transaction, one revision. Invariant:
everything that an answer carries is as of its header's revision, unless the caller asked for an older one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NewType

Revision = NewType("Revision", int)
LeaseId = NewType("LeaseId", int)

NO_LEASE: Final = LeaseId(0)
NEWEST: Final = Revision(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Who answered, and how far it was: `revision` is that member's newest, `raft_term` its term of the last change."""

    cluster_id: int
    member_id: int
    revision: Revision
    raft_term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """`version` counts writes since the key was created; `value` is empty where only keys were asked for."""

    key: bytes
    value: bytes
    create_revision: Revision
    mod_revision: Revision
    version: int
    lease: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class GetResult:
    """`count` is how many keys there are, `more` whether the limit left some out of `kvs`."""

    header: Header
    kvs: tuple[KeyValue, ...]
    more: bool
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    """`previous`: what the key held, if it was asked for and there was something."""

    header: Header
    previous: KeyValue | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteResult:
    """`deleted` keys; `previous` holds them if they were asked for."""

    header: Header
    deleted: int
    previous: tuple[KeyValue, ...]


OpResult = GetResult | PutResult | DeleteResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnResult:
    """`succeeded`: all compares held, so the success operations were done; `results` are those of the branch taken."""

    header: Header
    succeeded: bool
    results: tuple[OpResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGrant:
    """A lease and the time to live, in seconds, that etcd gave it; etcd may give more than was asked for."""

    lease_id: LeaseId
    ttl_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseInfo:
    """`ttl_s` is what is left, `granted_ttl_s` what a renewal gives; `keys` if they were asked for."""

    lease_id: LeaseId
    ttl_s: int
    granted_ttl_s: int
    keys: tuple[bytes, ...]


class EventKind(StrEnum):
    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A DELETE has a key and its mod_revision only. `previous` if it was asked for and is not compacted."""

    kind: EventKind
    kv: KeyValue
    previous: KeyValue | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """All events of one revision within what is watched, in etcd's order: never a part of them, never two revisions."""

    revision: Revision
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The watch has a stream on `endpoint`, its first or a new one after a failure. Nothing was missed in between."""

    endpoint: str
    revision: Revision
    """The member's newest at that moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The member had reached `revision`. Only if `complete`, all events up to it have been delivered before this."""

    revision: Revision
    complete: bool


WatchItem = Changes | Opened | Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One member's state. `leader` is a member id, 0 where the member knows none."""

    header: Header
    version: str
    db_bytes: int
    leader: int
    raft_index: int
    raft_term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member as the cluster knows it."""

    member_id: int
    name: str
    peer_urls: tuple[str, ...]
    client_urls: tuple[str, ...]
    is_learner: bool


def prefix_end(prefix: bytes) -> bytes:
    """The end of the range of all keys that start with `prefix`, as etcd wants it; b"\\0" means to the very end."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b"\0"


def prefix_start(prefix: bytes) -> bytes:
    """The first key of that range; etcd takes no empty key."""
    return prefix or b"\0"
