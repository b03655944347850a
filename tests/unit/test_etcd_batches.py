"""What other replicas read of changes that shared a transaction: the last word on each key, and no other.

Packing against etcd's limits, and etcd itself, are for tests/etcd.
"""

from __future__ import annotations

from kvlease.etcd import Changes, Event, EventKind, KeyValue, PutOp, Revision
from kvlease.etcd import LeaseId as EtcdLeaseId
from kvlease.registry.etcd_batches import Owner, parcels
from kvlease.registry.etcd_codec import Keys
from kvlease.registry.etcd_reader import EtcdReader
from kvlease.registry.table_changes import Batch, EnginePut, LeaseGone, LeasePut, StoreChange
from kvlease.registry.values import EndReason, LeaseId

from tests.unit.table_story import Lender, Story

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
