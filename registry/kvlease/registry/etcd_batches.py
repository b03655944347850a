"""How changes become etcd transactions: small enough for etcd, each of one replica, in order.

Pure. A lease and those that it supersedes are never divided. Within a transaction a key is written once, with what the
last change wanted; what a deletion cannot say goes into the batch key as notes.
Invariant: the parcels of a list of changes, carried out in order, leave the same keys as the changes one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvlease.etcd import DeleteOp, Op, PutOp
from kvlease.etcd import LeaseId as EtcdLeaseId
from kvlease.registry.etcd_codec import (
    Keys,
    Notes,
    encode_alias_put,
    encode_end_owed,
    encode_engine_put,
    encode_lease_put,
    encode_notes,
)
from kvlease.registry.table_changes import (
    AliasPut,
    EndHeard,
    EndOwed,
    EngineGone,
    EnginePut,
    LeaseGone,
    LeasePut,
    RenewalAsked,
    RenewalRefused,
    StoreChange,
)
from kvlease.registry.values import EndReason, EngineId, Incarnation, LeaseId

MAX_CHANGES: Final = 100
"""Of one transaction; etcd takes 128 operations unless it is told otherwise."""
MAX_BYTES: Final = 1024 * 1024
"""Of one transaction's values; etcd takes 1.5 MiB unless it is told otherwise."""
MIN_SHARED_TTL_S: Final = 64
"""Names, and ends that are owed, live at least so long in etcd, and less than twice as long as was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What a key's etcd lease is of: an incarnation, what lives for one ttl, or (neither) this replica."""

    engine: tuple[EngineId, Incarnation] | None = None
    shared_ttl_s: int | None = None


@dataclass(slots=True)
class Parcel:
    """One transaction, but for the etcd leases, which are found when it is sent."""

    batch_key: bytes
    puts: dict[bytes, tuple[bytes, Owner]] = field(default_factory=dict)
    deletes: dict[bytes, None] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    hellos: set[tuple[EngineId, Incarnation]] = field(default_factory=set)
    """Engines that we say here to be the home of."""
    changes: int = 0
    """So many it carries out: the next ones of the list."""
    transaction: int = 0
    """Its number among those of its writer. Sent again, it keeps it."""

    @property
    def owners(self) -> set[Owner]:
        return {owner for _, owner in self.puts.values()} | {Owner()}

    def operations(self, leases: Mapping[Owner, EtcdLeaseId], replica: EtcdLeaseId) -> list[Op]:
        """The success branch."""
        return [
            *(DeleteOp(key=key) for key in self.deletes),
            *(PutOp(key=key, value=value, lease=leases[owner]) for key, (value, owner) in self.puts.items()),
            PutOp(key=self.batch_key, value=encode_notes(self._numbered()), lease=replica),
        ]

    def _numbered(self) -> Notes:
        return replace(self.notes, transaction=self.transaction)


class Unfinished:
    """A commit that was begun: the transaction that is next, and how many changes are in those before it."""

    def __init__(self, keys: Keys, writer: str, changes: Sequence[StoreChange], numbers: Iterator[int]) -> None:
        """`numbers`: of this writer's transactions, one after another."""
        self.changes: Final = changes
        self._waiting: Final = parcels(keys, writer, changes)
        self._numbers: Final = numbers
        self._kept = 0
        self.parcel = self._next()

    def go_on(self) -> None:
        """The next one is done."""
        if self.parcel is not None:
            self._kept += self.parcel.changes
            self.parcel = self._next()

    def kept(self, last: int) -> int:
        """How many changes were kept when this writer's last transaction in etcd had the number `last`.

        In a restored etcd that may be one of long ago: then nothing is known to be.
        """
        if self.parcel is None or last not in (self.parcel.transaction, self.parcel.transaction - 1):
            return 0
        return self._kept + (self.parcel.changes if last == self.parcel.transaction else 0)

    def _next(self) -> Parcel | None:
        parcel = next(self._waiting, None)
        if parcel is not None:
            parcel.transaction = next(self._numbers)
        return parcel


def own_batch_key(keys: Keys, writer: str) -> bytes:
    return keys.batch(writer)


def parcels(keys: Keys, writer: str, changes: Sequence[StoreChange]) -> Iterator[Parcel]:
    """As few as the limits allow. Each is made when it is asked for: all together may be gigabytes."""
    packing: list[tuple[StoreChange, bytes]] = []
    size = 0
    for group in _groups(writer, changes):
        group_size = sum(len(value) for _, value in group)
        if packing and (len(packing) + len(group) > MAX_CHANGES or size + group_size > MAX_BYTES):
            yield _parcel(keys, writer, packing)
            packing, size = [], 0
        packing.extend(group)
        size += group_size
    if packing:
        yield _parcel(keys, writer, packing)


def _groups(writer: str, changes: Sequence[StoreChange]) -> Iterator[list[tuple[StoreChange, bytes]]]:
    """Changes with their values.

    A superseded lease stays with what came before it, an engine with its predecessor, what is owed with the end.
    """
    group: list[tuple[StoreChange, bytes]] = []
    for change in changes:
        superseded = isinstance(change, LeaseGone) and change.reason is EndReason.SUPERSEDED
        successor = isinstance(change, EnginePut) and bool(group) and isinstance(group[-1][0], EngineGone)
        owed = isinstance(change, LeaseGone) and bool(group) and isinstance(group[-1][0], EndOwed)
        together = (superseded or successor or owed) and len(group) < MAX_CHANGES
        if group and not together:
            yield group
            group = []
        group.append((change, _value(writer, change)))
    if group:
        yield group


def _value(writer: str, change: StoreChange) -> bytes:
    match change:
        case LeasePut():
            return encode_lease_put(change)
        case EnginePut():
            return encode_engine_put(change, writer)
        case AliasPut():
            return encode_alias_put(change)
        case EndOwed():
            return encode_end_owed(change)
        case _:
            return b""


def _parcel(keys: Keys, writer: str, packed: Sequence[tuple[StoreChange, bytes]]) -> Parcel:
    parcel = Parcel(keys.batch(writer), changes=len(packed))
    leases_gone: dict[LeaseId, LeaseGone] = {}
    engines_gone: list[EngineGone] = []
    asked: list[RenewalAsked] = []
    refused: list[RenewalRefused] = []
    for change, value in packed:
        match change:
            case LeasePut():
                leases_gone.pop(change.publication.lease_id, None)  # it is there after all
                owner = Owner(engine=(change.engine_id, change.incarnation))
                _put(parcel, keys.lease(change.publication.lease_id), value, owner)
            case LeaseGone():
                _delete(parcel, keys.lease(change.lease_id))
                leases_gone[change.lease_id] = change
            case EnginePut():
                name = change.engine.engine_id, change.engine.incarnation
                _put(parcel, keys.engine(*name), value, Owner(engine=name))
                parcel.hellos.add(name)
            case EngineGone():
                _delete(parcel, keys.engine(change.engine_id, change.incarnation))
                engines_gone.append(change)
            case EndOwed():
                _put(parcel, keys.end(change.lease_id), value, Owner(shared_ttl_s=_shared_ttl_s(change.ttl_ms)))
            case EndHeard():
                _delete(parcel, keys.end(change.lease_id))
            case AliasPut():
                owner = Owner(shared_ttl_s=_shared_ttl_s(change.ttl_ms))
                parcel.puts[keys.alias(change.tenant, change.alias)] = value, owner
            case RenewalAsked():
                asked.append(change)
            case RenewalRefused():
                refused.append(change)
    parcel.notes = Notes(
        leases_gone=tuple(leases_gone.values()),
        engines_gone=tuple(engines_gone),
        asked=tuple(asked),
        refused=tuple(refused),
    )
    return parcel


def _shared_ttl_s(ttl_ms: int) -> int:
    """The next power of two: callers choose how long names last, and each ttl costs etcd a lease a minute."""
    return max(MIN_SHARED_TTL_S, 1 << (-(-ttl_ms // 1000) - 1).bit_length())


def _put(parcel: Parcel, key: bytes, value: bytes, owner: Owner) -> None:
    parcel.deletes.pop(key, None)
    parcel.puts[key] = value, owner


def _delete(parcel: Parcel, key: bytes) -> None:
    parcel.puts.pop(key, None)
    parcel.deletes[key] = None
