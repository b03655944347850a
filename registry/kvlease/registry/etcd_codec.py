"""The registry's values as they are kept in etcd: keys, and versioned protobuf (proto/kvlease/v1/store.proto).

Pure. Reading is forgiving in one direction: a value of a newer version than ours is skipped, one that breaks the
contract too (with a reason for the log), so that one bad key does not blind a replica.
Invariant: what `encode_*` writes, `decode_*` of this release and the one before reads back equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, TypeVar

from google.protobuf.message import DecodeError
from kvlease.registry.errors import InvalidRequest
from kvlease.registry.table_changes import (
    AliasPut,
    EndOwed,
    EngineBeat,
    EngineGone,
    EnginePut,
    LeaseGone,
    LeasePut,
    RenewalAsked,
    RenewalRefused,
)
from kvlease.registry.values import (
    INCARNATION_BYTES,
    Alias,
    ConversationId,
    EngineId,
    Incarnation,
    LeaseId,
    TenantId,
)
from kvlease.registry.wire import (
    decode_ended,
    decode_engine,
    decode_publication,
    decode_renew_status,
    encode_ended,
    encode_engine,
    encode_publication,
    encode_renew_status,
)
from kvlease.registry.wire_checks import check_id, check_width
from kvlease.v1 import store_pb2 as pb

VERSION: Final = 1

Stored = TypeVar(
    "Stored", pb.StoredEngine, pb.StoredLease, pb.StoredAlias, pb.StoredOwedEnd, pb.StoredBatch, pb.StoredBeats
)


class Unreadable(Exception):
    """A value that this release cannot use; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What a commit says beside the keys that it puts and deletes."""

    leases_gone: tuple[LeaseGone, ...] = ()
    engines_gone: tuple[EngineGone, ...] = ()
    asked: tuple[RenewalAsked, ...] = ()
    refused: tuple[RenewalRefused, ...] = ()
    transaction: int = 0
    """Number of the commit's transaction, of its writer."""


class Keys:
    """Names of keys under one prefix, and back."""

    def __init__(self, prefix: str) -> None:
        """`prefix` ends with a slash."""
        self.prefix: Final = prefix.encode()
        self.engines: Final = self.prefix + b"engines/"
        self.leases: Final = self.prefix + b"leases/"
        self.aliases: Final = self.prefix + b"aliases/"
        self.ends: Final = self.prefix + b"ends/"
        self.batches: Final = self.prefix + b"batches/"
        self.beats: Final = self.prefix + b"beats/"

    def engine(self, engine_id: EngineId, incarnation: Incarnation) -> bytes:
        return self.engines + engine_id.encode() + b"/" + incarnation.hex().encode()

    def lease(self, lease_id: LeaseId) -> bytes:
        return self.leases + lease_id.encode()

    def alias(self, tenant: TenantId, alias: Alias) -> bytes:
        return self.aliases + sha256(tenant.encode() + b"\0" + alias).hexdigest().encode()

    def end(self, lease_id: LeaseId) -> bytes:
        return self.ends + lease_id.encode()

    def batch(self, writer: str) -> bytes:
        return self.batches + writer.encode()

    def beat(self, writer: str) -> bytes:
        return self.beats + writer.encode()

    def engine_of(self, key: bytes) -> tuple[EngineId, Incarnation]:
        """Raises Unreadable."""
        name, _, incarnation = key.removeprefix(self.engines).rpartition(b"/")
        try:
            return EngineId(name.decode()), Incarnation(bytes.fromhex(incarnation.decode()))
        except ValueError as error:
            raise Unreadable(f"{key!r} is not the key of an engine") from error

    def lease_of(self, key: bytes) -> LeaseId:
        """Of the key of a lease, or of its end."""
        prefix = self.ends if key.startswith(self.ends) else self.leases
        return LeaseId(key.removeprefix(prefix).decode(errors="replace"))


def encode_engine_put(put: EnginePut, writer: str) -> bytes:
    message = pb.StoredEngine(
        version=VERSION, engine=encode_engine(put.engine), now_lender_ms=put.now_lender_ms, writer=writer
    )
    return message.SerializeToString()


def decode_engine_put(value: bytes) -> tuple[EnginePut, str]:
    """The engine and who wrote it. Raises Unreadable."""
    message = _parsed(pb.StoredEngine(), value)
    try:
        return EnginePut(engine=decode_engine(message.engine), now_lender_ms=message.now_lender_ms), message.writer
    except InvalidRequest as error:
        raise Unreadable(f"an engine: {error.message}") from error


def encode_lease_put(put: LeasePut) -> bytes:
    message = pb.StoredLease(
        version=VERSION,
        engine_id=put.engine_id,
        incarnation=put.incarnation,
        lease=encode_publication(put.publication),
    )
    return message.SerializeToString()


def decode_lease_put(value: bytes) -> LeasePut:
    """Raises Unreadable."""
    message = _parsed(pb.StoredLease(), value)
    try:
        return LeasePut(
            engine_id=EngineId(check_id("engine_id", message.engine_id)),
            incarnation=Incarnation(check_width("incarnation", message.incarnation, INCARNATION_BYTES)),
            publication=decode_publication(message.lease),
        )
    except InvalidRequest as error:
        raise Unreadable(f"a lease: {error.message}") from error


def encode_alias_put(put: AliasPut) -> bytes:
    message = pb.StoredAlias(
        version=VERSION, tenant=put.tenant, alias=put.alias, conversation=put.conversation, ttl_ms=put.ttl_ms
    )
    return message.SerializeToString()


def decode_alias_put(value: bytes) -> AliasPut:
    """Raises Unreadable."""
    message = _parsed(pb.StoredAlias(), value)
    return AliasPut(
        tenant=TenantId(message.tenant),
        alias=Alias(message.alias),
        conversation=ConversationId(message.conversation),
        ttl_ms=message.ttl_ms,
    )


def encode_end_owed(owed: EndOwed) -> bytes:
    message = pb.StoredOwedEnd(
        version=VERSION,
        engine_id=owed.engine_id,
        incarnation=owed.incarnation,
        ended=encode_ended(owed.lease_id, owed.reason),
        ttl_ms=owed.ttl_ms,
    )
    return message.SerializeToString()


def decode_end_owed(value: bytes) -> EndOwed:
    """Raises Unreadable."""
    message = _parsed(pb.StoredOwedEnd(), value)
    try:
        lease_id, reason = decode_ended(message.ended)
        return EndOwed(
            lease_id=lease_id,
            engine_id=EngineId(check_id("engine_id", message.engine_id)),
            incarnation=Incarnation(check_width("incarnation", message.incarnation, INCARNATION_BYTES)),
            reason=reason,
            ttl_ms=message.ttl_ms,
        )
    except InvalidRequest as error:
        raise Unreadable(f"the end of a lease: {error.message}") from error


def encode_notes(notes: Notes) -> bytes:
    message = pb.StoredBatch(
        version=VERSION,
        ended=[encode_ended(x.lease_id, x.reason) for x in notes.leases_gone],
        engines_gone=[
            pb.StoredEngineGone(engine_id=x.engine_id, incarnation=x.incarnation) for x in notes.engines_gone
        ],
        renewals_asked=[pb.StoredRenewalAsked(lease_id=x.lease_id, ttl_ms=x.ttl_ms) for x in notes.asked],
        renewals_refused=[
            pb.StoredRenewalRefused(
                lease_id=x.lease_id, status=encode_renew_status(x.status), remaining_ms=x.remaining_ms
            )
            for x in notes.refused
        ],
        transaction=notes.transaction,
    )
    return message.SerializeToString()


def decode_notes(value: bytes) -> Notes:
    """Raises Unreadable."""
    message = _parsed(pb.StoredBatch(), value)
    try:
        ended = [decode_ended(x) for x in message.ended]
        return Notes(
            leases_gone=tuple(LeaseGone(lease_id=lease_id, reason=reason) for lease_id, reason in ended),
            engines_gone=tuple(
                EngineGone(engine_id=EngineId(x.engine_id), incarnation=Incarnation(x.incarnation))
                for x in message.engines_gone
            ),
            asked=tuple(RenewalAsked(lease_id=LeaseId(x.lease_id), ttl_ms=x.ttl_ms) for x in message.renewals_asked),
            refused=tuple(
                RenewalRefused(
                    lease_id=LeaseId(x.lease_id), status=decode_renew_status(x.status), remaining_ms=x.remaining_ms
                )
                for x in message.renewals_refused
            ),
            transaction=message.transaction,
        )
    except InvalidRequest as error:
        raise Unreadable(f"a batch: {error.message}") from error


def transaction_of(value: bytes) -> int:
    """Number of the transaction that wrote a batch key last; 0 if it cannot be read."""
    try:
        return decode_notes(value).transaction
    except Unreadable:
        return 0


def encode_beats(number: int, beats: Sequence[EngineBeat]) -> bytes:
    message = pb.StoredBeats(
        version=VERSION,
        number=number,
        beats=[
            pb.StoredBeat(
                engine_id=x.engine_id,
                incarnation=x.incarnation,
                now_lender_ms=x.now_lender_ms,
                silent_ms=x.silent_ms,
                free_blocks=x.free_blocks,
                total_blocks=x.total_blocks,
            )
            for x in beats
        ],
    )
    return message.SerializeToString()


def decode_beats(value: bytes) -> tuple[int, tuple[EngineBeat, ...]]:
    """The beat's number, and what it says. Raises Unreadable."""
    message = _parsed(pb.StoredBeats(), value)
    beats = tuple(
        EngineBeat(
            engine_id=EngineId(x.engine_id),
            incarnation=Incarnation(x.incarnation),
            now_lender_ms=x.now_lender_ms,
            silent_ms=x.silent_ms,
            free_blocks=x.free_blocks,
            total_blocks=x.total_blocks,
        )
        for x in message.beats
    )
    return message.number, beats


def _parsed(message: Stored, value: bytes) -> Stored:
    try:
        message.ParseFromString(value)
    except DecodeError as error:
        raise Unreadable(f"{len(value)} bytes are no {type(message).__name__}") from error
    if not 0 < message.version <= VERSION:
        raise Unreadable(f"a {type(message).__name__} of version {message.version}; this release reads {VERSION}")
    return message
