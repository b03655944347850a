"""What a transaction consists of: compares, and the operations of its two branches. Pure values.

etcd's own limits: 128 operations a branch, 1.5 MiB a request, no key put twice in one transaction. Invariant: a compare
on a key that is not there sees version, create_revision, mod_revision and lease 0; a compare of its value is never
true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvlease.etcd.values import NEWEST, NO_LEASE, LeaseId, Revision


@dataclass(frozen=True, slots=True, kw_only=True)
class GetOp:
    """Read `key`, or [key, end). `revision` 0 is the newest; `limit` 0 is none."""

    key: bytes
    end: bytes = b""
    limit: int = 0
    revision: Revision = NEWEST
    keys_only: bool = False
    count_only: bool = False
    serializable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOp:
    """Write `key`; it is deleted when `lease` ends. Without a lease, one that the key had is taken off it."""

    key: bytes
    value: bytes
    lease: LeaseId = NO_LEASE
    previous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOp:
    """Delete `key`, or [key, end)."""

    key: bytes
    end: bytes = b""
    previous: bool = False


Op = GetOp | PutOp | DeleteOp


class Target(StrEnum):
    VERSION = "version"
    CREATE_REVISION = "create_revision"
    MOD_REVISION = "mod_revision"
    VALUE = "value"
    LEASE = "lease"


class Relation(StrEnum):
    EQUAL = "="
    NOT_EQUAL = "!="
    GREATER = ">"
    LESS = "<"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """True if the key's `target` stands in `relation` to `operand`; with `end`, if that holds for each key in range.

    `operand` is bytes for VALUE, a number for the rest.
    """

    key: bytes
    target: Target
    operand: int | bytes
    relation: Relation = Relation.EQUAL
    end: bytes = b""

    def __post_init__(self) -> None:
        """Raises ValueError if the operand does not fit the target."""
        if isinstance(self.operand, bytes) != (self.target is Target.VALUE):
            wanted = "bytes" if self.target is Target.VALUE else "a number"
            raise ValueError(f"a compare of {self.target} takes {wanted}")


def absent(key: bytes) -> Compare:
    """There is no such key."""
    return Compare(key=key, target=Target.VERSION, operand=0)


def present(key: bytes) -> Compare:
    """There is such a key."""
    return Compare(key=key, target=Target.VERSION, operand=0, relation=Relation.GREATER)


def unchanged(key: bytes, mod_revision: Revision) -> Compare:
    """The key's last change is the one that was read, `mod_revision` 0 meaning that there was no such key."""
    return Compare(key=key, target=Target.MOD_REVISION, operand=mod_revision)


def only_reads(*branches: Sequence[Op]) -> bool:
    """Whether a transaction of these branches changes nothing, so that it may be repeated."""
    return all(isinstance(op, GetOp) for branch in branches for op in branch)
