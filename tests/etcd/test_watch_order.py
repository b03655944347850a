"""The order of a watch's answers, without an etcd: fragments, several revisions at once, members that lag, history.

Answers are built as etcd sends them; what real etcd sends is in test_watch.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from kvlease.etcd import Changes, GetResult, Header, HistoryChanged, KeyValue, LeaseId, Progress, Revision, WatchItem
from kvlease.etcd.watch import orders_progress
from kvlease.etcd.watch_order import WatchOrder
from kvlease.etcdv3 import etcd_pb2 as pb

AT = Header(cluster_id=1, member_id=1, revision=Revision(10), raft_term=3)


def header(revision: int, *, cluster_id: int = 1, raft_term: int = 3) -> Header:
    return Header(cluster_id=cluster_id, member_id=2, revision=Revision(revision), raft_term=raft_term)


def answer(*revisions: int, fragment: bool = False, watch_id: int = 0, at: int = 0) -> pb.WatchResponse:
    """Events, one for each number; equal numbers are of one transaction."""
    events = [
        pb.Event(kv=pb.KeyValue(key=b"%d" % place, mod_revision=revision)) for place, revision in enumerate(revisions)
    ]
    head = pb.ResponseHeader(revision=at or max(revisions, default=0))
    return pb.WatchResponse(header=head, events=events, fragment=fragment, watch_id=watch_id)


def taken(order: WatchOrder, *answers: pb.WatchResponse, ordered: bool = False) -> list[WatchItem]:
    return [item for one in answers for item in order.take(one, progress_ordered=ordered)]


def sizes(items: Sequence[WatchItem]) -> list[tuple[int, int]]:
    return [(item.revision, len(item.events)) for item in items if isinstance(item, Changes)]


def test_revisions_of_one_answer_are_told_apart() -> None:
    order = WatchOrder(Revision(5), None)
    assert sizes(taken(order, answer(5, 5, 7, 8, 8, 8))) == [(5, 2), (7, 1), (8, 3)]
    assert order.resume == 9


def test_fragments_are_joined_and_whole_revisions_not_kept_back() -> None:
    order = WatchOrder(Revision(5), None)
    assert sizes(taken(order, answer(5, 6, 6, fragment=True))) == [(5, 1)]
    assert order.resume == 6
    assert sizes(taken(order, answer(6, 6, fragment=True))) == []
    assert sizes(taken(order, answer(6, 7))) == [(6, 5), (7, 1)]


def test_parts_of_a_lost_stream_are_void() -> None:
    order = WatchOrder(Revision(5), None)
    taken(order, answer(5, 6, 6, fragment=True))
    order.opened(answer(at=9))
    assert order.request_revision == 6
    assert sizes(taken(order, answer(6, 6, 6, 6))) == [(6, 4)]


def test_what_was_delivered_is_not_delivered_again() -> None:
    order = WatchOrder(Revision(5), None)
    taken(order, answer(5, 6))
    assert sizes(taken(order, answer(4, 5, 6, 7))) == [(7, 1)]


def test_a_watch_from_now_on_starts_at_the_next_revision() -> None:
    order = WatchOrder(None, None)
    assert order.request_revision == 0
    order.opened(answer(at=9))
    assert order.request_revision == 10


@pytest.mark.parametrize(
    ("watch_id", "ordered", "resume"),
    [(-1, False, 5), (-1, True, 10), (0, False, 10)],
    ids=["asked, may overtake", "asked, in order", "etcd's own"],
)
def test_progress_counts_only_if_it_cannot_overtake(watch_id: int, ordered: bool, resume: int) -> None:
    order = WatchOrder(Revision(5), None)
    (item,) = taken(order, answer(at=9, watch_id=watch_id), ordered=ordered)
    assert item == Progress(revision=Revision(9), complete=resume == 10)
    assert order.resume == resume


def test_progress_at_what_was_delivered_is_complete() -> None:
    order = WatchOrder(Revision(5), None)
    (item,) = taken(order, answer(at=4, watch_id=-1))
    assert item == Progress(revision=Revision(4), complete=True)


def test_progress_between_fragments_proves_nothing() -> None:
    order = WatchOrder(Revision(5), None)
    first, progress = taken(order, answer(5, 6, fragment=True), answer(at=9, watch_id=-1), ordered=True)
    assert isinstance(first, Changes)
    assert progress == Progress(revision=Revision(9), complete=False)
    assert sizes(taken(order, answer(6))) == [(6, 2)]


@pytest.mark.parametrize(
    "found",
    [header(30, cluster_id=2), header(11), header(30, raft_term=2)],
    ids=["another cluster", "behind what was delivered", "behind in terms"],
)
def test_history_that_changed(found: Header) -> None:
    order = WatchOrder(Revision(11), AT)
    order.check_history(header(12, raft_term=3))
    taken(order, answer(12))
    with pytest.raises(HistoryChanged) as changed:
        order.check_history(found)
    assert changed.value.found == found


def test_history_that_went_on() -> None:
    order = WatchOrder(Revision(11), AT)
    taken(order, answer(12))
    for found in (header(12), header(12, raft_term=4), header(40, raft_term=4)):
        order.check_history(found)


def test_a_start_that_etcd_has_not_reached() -> None:
    WatchOrder(Revision(11), None).check_history(header(10))
    with pytest.raises(HistoryChanged):
        WatchOrder(Revision(11), None).check_history(header(9))


def test_the_last_event_is_the_witness() -> None:
    order = WatchOrder(Revision(11), AT)
    assert order.witness() is None
    put = pb.Event(kv=pb.KeyValue(key=b"k", value=b"v", mod_revision=12, create_revision=12, version=1))
    taken(order, pb.WatchResponse(events=[put]))
    there = KeyValue(
        key=b"k",
        value=b"v",
        create_revision=Revision(12),
        mod_revision=Revision(12),
        version=1,
        lease=LeaseId(0),
    )
    order.check_witness(got(there), got())
    for other in (got(), got(dataclasses.replace(there, value=b"w"))):
        with pytest.raises(HistoryChanged):
            order.check_witness(other, got())

    taken(order, pb.WatchResponse(events=[pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=b"k", mod_revision=13))]))
    then, before = order.witness() or (None, None)
    assert then is not None
    assert before is not None
    assert (then.key, then.revision, before.revision) == (b"k", 13, 12)
    order.check_witness(got(), got(there))
    for at, earlier in ((got(there), got(there)), (got(), got())):
        with pytest.raises(HistoryChanged):
            order.check_witness(at, earlier)


def got(*kvs: KeyValue) -> GetResult:
    return GetResult(header=header(20), kvs=kvs, more=False, count=len(kvs))


@pytest.mark.parametrize(
    ("version", "orders"),
    [
        ("3.4.23", False),
        ("3.4.25", True),
        ("3.5.7", False),
        ("3.5.8", True),
        ("3.6.0-rc.1", True),
        ("4.0.0", True),
        ("", False),
        ("3.5", False),
        ("unknown", False),
    ],
)
def test_which_etcd_orders_progress(version: str, orders: bool) -> None:
    assert orders_progress(version) is orders
