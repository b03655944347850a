"""The lender's mirror: whatever happens in whatever order, a registry that applies what it sends knows what is held.

The judge is a plain dict that applies snapshots and batches in the order in which they leave.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from kvlease.registry.batches import MESSAGE_ROOM_BYTES, publication_bytes, split
from kvlease.registry.lender_mirror import MAX_QUEUED, Ends, LenderMirror, Publishes, Refusal, Renewals
from kvlease.registry.values import (
    MAX_BATCH,
    EndReason,
    LeaseId,
    OnDeadline,
    Publication,
    PublishResult,
    PublishStatus,
    Record,
    RenewStatus,
    TenantId,
)


def publication(name: str, deadline_ms: int = 1_000, body: bytes = b"") -> Publication:
    return Publication(
        lease_id=LeaseId(name),
        tenant=TenantId("t"),
        conversation=None,
        stride_tokens=64,
        block_count=2,
        size_bytes=0,
        deadline_ms=deadline_ms,
        on_deadline=OnDeadline.LAPSE,
        fingerprint_hash=b"f" * 16,
        record=Record(digests=b"d" * 16, body=body),
    )


class Known:
    """What a registry knows that hears everything."""

    def __init__(self) -> None:
        self.leases: dict[LeaseId, Publication] = {}

    def present(self, mirror: LenderMirror) -> None:
        self.leases = {item.lease_id: item for item in mirror.present()}

    def drain(self, mirror: LenderMirror) -> None:
        while (batch := mirror.next_batch()) is not None:
            if isinstance(batch, Publishes):
                assert len(batch.items) <= MAX_BATCH
                self.leases |= {item.lease_id: item for item in batch.items}
            elif isinstance(batch, Ends):
                for lease_id, _ in batch.items:
                    self.leases.pop(lease_id, None)
            elif isinstance(batch, Renewals):
                for lease_id, deadline_ms in batch.items:
                    self.leases[lease_id] = replace(self.leases[lease_id], deadline_ms=deadline_ms, lapsed=False)


NAMES = st.sampled_from("abcde").map(LeaseId)
ACTIONS = st.tuples(
    st.sampled_from(
        ("publish", "ended", "renewed", "lapsed", "pushed", "refused", "superseded", "connect", "lose", "drain")
    ),
    NAMES,
    st.integers(1, 1_000),
)


@given(st.lists(ACTIONS, max_size=60))
def test_the_registry_knows_what_is_held(actions: list[tuple[str, LeaseId, int]]) -> None:
    mirror, known, online = LenderMirror(), Known(), False
    held: dict[LeaseId, int] = {}
    for serial, (action, name, number) in enumerate(actions):
        lease_id = LeaseId(f"{name}{serial}") if action == "publish" else LeaseId(name)
        # Names are used once, as lenders do: an action finds the newest lease of its letter.
        if action != "publish":
            lease_id = next((held_id for held_id in reversed(held) if held_id.startswith(name)), lease_id)
        match action:
            case "publish":
                mirror.publish(publication(lease_id, number))
                held[lease_id] = number
            case "ended":
                mirror.ended(lease_id, EndReason.PRESSURE)
                held.pop(lease_id, None)
            case "renewed":
                mirror.renewed(lease_id, number)
                if lease_id in held:
                    held[lease_id] = number
            case "lapsed":
                mirror.lapsed(lease_id)
            case "pushed" if online:
                known.drain(mirror)
                known.leases.pop(lease_id, None)
                assert mirror.told_to_end(lease_id, EndReason.RELEASED) == (lease_id in held)
                held.pop(lease_id, None)
            case "refused" if online:
                known.drain(mirror)
                known.leases.pop(lease_id, None)
                news, _ = mirror.answered(PublishResult(lease_id=lease_id, status=PublishStatus.QUOTA))
                assert news == (lease_id in held)
                held.pop(lease_id, None)
            case "superseded" if online and lease_id in held:
                known.drain(mirror)
                known.leases.pop(lease_id, None)
                result = PublishResult(
                    lease_id=LeaseId("new"), status=PublishStatus.PUBLISHED, superseded=(lease_id, LeaseId("other"))
                )
                assert mirror.answered(result) == (False, (lease_id,))
                del held[lease_id]
            case "connect":
                known.present(mirror)
                online = True
            case "lose":
                mirror.disconnected()
                online = False
            case "drain" if online:
                known.drain(mirror)
        assert len(mirror) == len(held)
    if not online:
        assert mirror.next_batch() is None, "nothing is queued for a stream that does not exist"
        known.present(mirror)
    known.drain(mirror)
    assert {lease_id: item.deadline_ms for lease_id, item in known.leases.items()} == held


def test_order_is_kept_and_neighbours_are_joined() -> None:
    mirror = LenderMirror()
    assert mirror.present() == ()
    for name in "abc":
        mirror.publish(publication(name))
    mirror.renewed(LeaseId("a"), 5)
    mirror.renewed(LeaseId("b"), 6)
    mirror.ended(LeaseId("a"), EndReason.EXPIRED)
    mirror.refuse_renewal(LeaseId("b"), RenewStatus.PRESSURE)
    mirror.publish(publication("d"))
    mirror.renewed(LeaseId("d"), 7)
    mirror.ended(LeaseId("d"), EndReason.EXPIRED)
    batches = [mirror.next_batch() for _ in range(8)]
    assert isinstance(batches[0], Publishes)
    assert [item.lease_id for item in batches[0].items] == ["a", "b", "c"]
    assert batches[1] == Renewals(items=[(LeaseId("a"), 5), (LeaseId("b"), 6)])
    assert batches[2] == Ends(items=[(LeaseId("a"), EndReason.EXPIRED)])
    assert batches[3] == Refusal(lease_id=LeaseId("b"), status=RenewStatus.PRESSURE)
    assert isinstance(batches[4], Publishes)
    assert batches[5] == Renewals(items=[(LeaseId("d"), 7)]), "not joined with the older ones: d was unknown then"
    assert batches[6] == Ends(items=[(LeaseId("d"), EndReason.EXPIRED)])
    assert batches[7] is None
    assert mirror.queued == 0


def test_batches_stay_under_the_limits() -> None:
    mirror = LenderMirror()
    mirror.present()
    for number in range(MAX_BATCH + 1):
        mirror.publish(publication(f"small-{number}"))
    body = bytes(200 * 1024)
    for number in range(40):
        mirror.publish(publication(f"large-{number}", body=body))
    sizes = []
    while isinstance(batch := mirror.next_batch(), Publishes):
        assert sum(map(publication_bytes, batch.items)) == batch.size_bytes <= MESSAGE_ROOM_BYTES
        sizes.append(len(batch.items))
    assert sizes[0] == MAX_BATCH
    assert sum(sizes) == MAX_BATCH + 1 + 40


def test_a_snapshot_says_lapsed_and_the_new_deadline() -> None:
    mirror = LenderMirror()
    for name in "ab":
        mirror.publish(publication(name))
        mirror.lapsed(LeaseId(name))
    mirror.renewed(LeaseId("b"), 9_000)
    a, b = mirror.present()
    assert (a.lapsed, b.lapsed, b.deadline_ms) == (True, False, 9_000)


def test_an_end_that_was_asked_for_is_confirmed_once_and_never_presented() -> None:
    mirror = LenderMirror()
    mirror.publish(publication("a"))
    mirror.present()
    assert mirror.told_to_end(LeaseId("a"), EndReason.RELEASED)
    assert not mirror.told_to_end(LeaseId("a"), EndReason.RELEASED)
    assert mirror.next_batch() is None, "the lender has not broken the seal yet"
    assert mirror.present() == ()
    mirror.ended(LeaseId("a"), EndReason.RELEASED)
    mirror.ended(LeaseId("a"), EndReason.RELEASED)
    assert mirror.next_batch() == Ends(items=[(LeaseId("a"), EndReason.RELEASED)])
    assert mirror.next_batch() is None


def test_an_end_of_an_unknown_lease_is_confirmed_at_once() -> None:
    mirror = LenderMirror()
    mirror.present()
    assert not mirror.told_to_end(LeaseId("x"), EndReason.RELEASED)
    assert mirror.next_batch() == Ends(items=[(LeaseId("x"), EndReason.RELEASED)])


def test_nothing_is_said_of_a_refused_lease() -> None:
    mirror = LenderMirror()
    mirror.publish(publication("a"))
    mirror.present()
    assert mirror.answered(PublishResult(lease_id=LeaseId("a"), status=PublishStatus.CONFLICT)) == (True, ())
    mirror.ended(LeaseId("a"), EndReason.RELEASED)
    assert mirror.next_batch() is None, "under this id the registry knows another lender's lease"


def test_a_queue_that_overflows_is_dropped_and_what_is_held_is_not() -> None:
    mirror = LenderMirror()
    mirror.present()
    mirror.publish(publication("a"))
    for number in range(MAX_QUEUED):
        assert not mirror.overflowed
        mirror.renewed(LeaseId("a"), number)
    assert mirror.overflowed
    assert mirror.next_batch() is None
    mirror.publish(publication("b"))
    assert [item.lease_id for item in mirror.present()] == ["a", "b"]
    assert not mirror.overflowed


@given(st.lists(st.integers(0, 120), max_size=600), st.integers(1, 300))
def test_split_keeps_order_and_limits(sizes: list[int], room_bytes: int) -> None:
    batches = list(split(sizes, lambda size: size, room_bytes=room_bytes))
    assert [size for batch in batches for size in batch] == sizes
    assert all(0 < len(batch) <= MAX_BATCH for batch in batches)
    assert all(sum(batch) <= room_bytes or len(batch) == 1 for batch in batches)
    pairs = itertools.pairwise(batches)
    assert all(sum(a) + b[0] > room_bytes or len(a) == MAX_BATCH for a, b in pairs), "no batch is cut too early"
