"""What other replicas read of changes that shared a transaction: the last word on each key, and no other.

Packing against etcd's limits, and etcd itself, are for tests/etcd.
"""

from __future__ import annotations

from itertools import count

from kvlease.etcd import Changes, Event, EventKind, KeyValue, PutOp, Revision
from kvlease.etcd import LeaseId as EtcdLeaseId
from kvlease.registry.etcd_batches import MAX_CHANGES, Owner, Unfinished, parcels
from kvlease.registry.etcd_codec import Keys
from kvlease.registry.etcd_reader import EtcdReader
from kvlease.registry.table_changes import (
    Batch,
    EndHeard,
    EnginePut,
    LeaseGone,
    LeasePut,
    StoreChange,
    StoredView,
)
from kvlease.registry.values import EndReason, LeaseId

from tests.unit.table_story import Lender, Story, owed_to

KEYS = Keys("/kvlease/")
LEASE = EtcdLeaseId(7)


def read(*changes: StoreChange) -> Batch:
    """The batch that another replica sees of one commit of these."""
    (parcel,) = parcels(KEYS, "writer", changes)
    leases: dict[Owner, EtcdLeaseId] = dict.fromkeys(parcel.owners, LEASE)
    events = []
    for operation in parcel.operations(leases, LEASE):
        put = isinstance(operation, PutOp)
        kv = KeyValue(
            key=operation.key,
            value=operation.value if isinstance(operation, PutOp) else b"",
            create_revision=Revision(2),
            mod_revision=Revision(2),
            version=1,
            lease=LEASE,
        )
        events.append(Event(kind=EventKind.PUT if put else EventKind.DELETE, kv=kv, previous=None))
    batch = EtcdReader(KEYS, "reader").batch(Changes(revision=Revision(2), events=tuple(events)))
    assert batch is not None
    return batch


def lease_put(lender: Lender, lease_id: str) -> LeasePut:
    engine = lender.engine
    return LeasePut(
        engine_id=engine.engine_id, incarnation=engine.incarnation, publication=lender.lease(lease_id, "abc")
    )


def test_a_lease_that_was_taken_out_and_put_again_is_there() -> None:
    """A lender came back and presented it, before the end that had been concluded was written."""
    put = lease_put(Story().lender("d0"), "l1")
    gone = LeaseGone(lease_id=LeaseId("l1"), reason=EndReason.LENDER_LOST)
    assert read(gone, put).changes == (put,)
    assert read(put, gone).changes == (gone,)
    assert read(gone, put, gone).changes == (gone,)


def test_the_leases_of_an_engine_come_after_it() -> None:
    lender = Story().lender("d0")
    put, engine = lease_put(lender, "l1"), EnginePut(engine=lender.engine, now_lender_ms=1)
    assert read(put, engine).changes == (engine, put)


def gone(lease_id: str) -> LeaseGone:
    return LeaseGone(lease_id=LeaseId(lease_id), reason=EndReason.RELEASED)


def test_an_end_and_that_its_lender_has_yet_to_confirm_it_are_one_transaction() -> None:
    lender = Story().lender("d0")
    ends: list[StoreChange] = [gone("odd")]
    for i in range(2 * MAX_CHANGES):
        ends += [owed_to(lender, f"l{i}"), gone(f"l{i}")]
    sent = list(parcels(KEYS, "writer", ends))
    assert len(sent) > 2
    for parcel in sent:
        deleted = {KEYS.lease_of(key) for key in parcel.deletes} - {"odd"}
        assert {KEYS.lease_of(key) for key in parcel.puts} == deleted
        leases: dict[Owner, EtcdLeaseId] = dict.fromkeys(parcel.owners, LEASE)
        assert len(parcel.operations(leases, LEASE)) <= MAX_CHANGES + 1


def test_what_is_owed_is_read_before_the_end_and_goes_with_its_confirmation() -> None:
    lender = Story().lender("d0")
    told, heard = owed_to(lender, "l1"), EndHeard(lease_id=LeaseId("l1"))
    assert read(told, gone("l1")).changes == (told, gone("l1"))
    assert read(heard).changes == (heard,)
    assert read(told, gone("l1"), heard).changes == (gone("l1"), heard)


def test_what_is_owed_lives_by_itself_and_not_with_its_engine_or_replica() -> None:
    (parcel,) = parcels(KEYS, "writer", (owed_to(Story().lender("d0"), "l1", ttl_ms=3_600_000), gone("l1")))
    assert [owner for _, owner in parcel.puts.values()] == [Owner(shared_ttl_s=4_096)]
    assert not parcel.hellos


def test_keys_that_a_newer_release_adds_are_left_alone() -> None:
    """As those of ends that are owed are by the release before."""
    kv = KeyValue(
        key=KEYS.prefix + b"later/l1",
        value=b"\xff",
        create_revision=Revision(2),
        mod_revision=Revision(2),
        version=1,
        lease=LEASE,
    )
    reader = EtcdReader(KEYS, "reader")
    reader.load([kv])
    assert reader.view() == StoredView()
    for kind in EventKind:
        event = Event(kind=kind, kv=kv, previous=None)
        batch = reader.batch(Changes(revision=Revision(2), events=(event,)))
        assert batch is not None
        assert not batch.changes


def test_of_a_commit_that_is_to_be_repeated_the_last_transaction_in_etcd_says_how_much_is_kept() -> None:
    lender, numbers = Story().lender("d0"), count(5)
    changes = [lease_put(lender, f"l{i}") for i in range(2 * MAX_CHANGES + 1)]
    unfinished = Unfinished(KEYS, "writer", changes, numbers)
    assert [unfinished.kept(last) for last in (0, 4, 5, 6)] == [0, 0, MAX_CHANGES, 0]
    unfinished.go_on()
    assert [unfinished.kept(last) for last in (0, 4, 5, 6, 7)] == [0, 0, MAX_CHANGES, 2 * MAX_CHANGES, 0]
    unfinished.go_on()
    assert unfinished.kept(7) == len(changes)
    unfinished.go_on()
    assert unfinished.parcel is None
    assert unfinished.kept(7) == 0, "nothing is to be repeated"
