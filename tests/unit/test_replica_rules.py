"""What a home does about its engine's keys when another replica, or the store, did something to them.

One table each, told by hand what the store says; that all replicas come to agree is for the stateful test and the
simulation, which found each of these.
"""

from __future__ import annotations

from kvlease.registry.staleness import Staleness
from kvlease.registry.table_changes import (
    Batch,
    EnginePut,
    LeaseGone,
    LeasePut,
    StoreChange,
    StoredEngine,
    StoredView,
)
from kvlease.registry.values import EndReason, LeaseId

from tests.unit.table_story import Lender, Story


def confirmed(story: Story, lender: Lender) -> None:
    """The lender's hello has its place in the store's order."""
    put = EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms)
    story.heard(story.table.apply(Batch(changes=(put,), own=True), now_ms=story.now_ms))


def foreign(story: Story, *changes: StoreChange) -> tuple[StoreChange, ...]:
    """Another replica wrote these; what this one wants to be stored then."""
    return story.heard(story.table.apply(Batch(changes=changes), now_ms=story.now_ms)).stored


def test_a_home_writes_again_what_another_replica_only_concluded() -> None:
    """A former home took the lender for lost, and said so late."""
    story = Story()
    lender = story.lender("d0")
    confirmed(story, lender)
    lender.lend("l1", "abc")
    for reason in (EndReason.LENDER_LOST, EndReason.EXPIRED):
        stored = foreign(story, LeaseGone(lease_id=LeaseId("l1"), reason=reason))
        assert [x.publication.lease_id for x in stored if isinstance(x, LeasePut)] == ["l1"], reason
        assert story.found("abc") == "l1"
        assert not story.last.ends


def test_what_the_lender_has_not_presented_yet_is_a_copy() -> None:
    """The home before this one took it out, and only this lender's snapshot can say that it was wrong."""
    story = Story()
    lender = story.lender("d0")
    confirmed(story, lender)
    lender.lend("l1", "abc")
    lender.hello()
    assert not foreign(story, LeaseGone(lease_id=LeaseId("l1"), reason=EndReason.LENDER_LOST))
    assert story.found("abc") is None
    lender.snapshot(lender.lease("l1", "abc"))
    assert story.found("abc") == "l1"


def test_a_home_carries_out_what_somebody_asked_of_another_replica() -> None:
    story = Story()
    lender = story.lender("d0")
    confirmed(story, lender)
    lender.lend("l1", "abc")
    gone = LeaseGone(lease_id=LeaseId("l1"), reason=EndReason.RELEASED)
    assert foreign(story, gone) == (gone,)
    assert [x.lease_id for x in story.last.ends] == ["l1"]
    assert story.found("abc") is None


def test_a_home_writes_its_engine_again_when_the_store_went_back_to_an_earlier_incarnation() -> None:
    """A snapshot of etcd from before the engine's restart, which was at this same replica, was restored."""
    story = Story()
    before = EnginePut(engine=Lender(story, "d0", b"old", 0).engine, now_lender_ms=0)
    lender = story.lender("d0", incarnation=b"new")
    confirmed(story, lender)
    view = StoredView(engines=(StoredEngine(put=before, own=True),))
    stored = story.heard(story.table.replace(view, [], now_ms=story.now_ms)).stored
    assert [x.engine for x in stored if isinstance(x, EnginePut)] == [lender.engine]


def test_an_engine_that_the_store_says_is_ours_and_we_have_forgotten_is_a_copy() -> None:
    """A snapshot of etcd from before the engine left us was restored: its leases are in the store again."""
    story = Story()
    lender = Lender(story, "d0", b"i", 0)
    engine = lender.engine
    put = LeasePut(engine_id=engine.engine_id, incarnation=engine.incarnation, publication=lender.lease("l1", "abc"))
    view = StoredView(engines=(StoredEngine(put=EnginePut(engine=engine, now_lender_ms=0), own=True),), leases=(put,))
    assert not story.heard(story.table.replace(view, [], now_ms=story.now_ms)).stored
    assert len(story.table) == 1


def test_what_a_session_withdrew_is_a_copy_again_when_the_engine_moves_on() -> None:
    """It was not taken out of the store yet; whoever is home next must have it to take out."""
    story = Story()
    lender = story.lender("d0")
    confirmed(story, lender)
    lender.lend("l1", "abc")
    lender.hello()
    lender.snapshot()  # holds nothing any more
    assert story.found("abc") is None
    confirmed(story, lender)
    foreign(story, EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms))
    story.settle()
    lender.hello()
    lender.snapshot()
    story.settle()
    gone = LeaseGone(lease_id=LeaseId("l1"), reason=EndReason.LENDER_LOST)
    assert gone in story.last.stored


def test_what_a_load_does_not_find_is_no_copy_either() -> None:
    """Withdrawn and already gone from the store: it does not come back when the engine moves on."""
    story = Story()
    lender = story.lender("d0")
    confirmed(story, lender)
    lender.lend("l1", "abc")
    lender.hello()
    lender.snapshot()
    put = EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms)
    view = StoredView(engines=(StoredEngine(put=put, own=True),))
    assert not story.heard(story.table.replace(view, [], now_ms=story.now_ms)).stored
    foreign(story, EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms + 1))
    assert story.found("abc") is None


def test_hellos_that_shared_a_transaction_are_confirmed_together() -> None:
    """A store keeps the last of them only; a replica that waited for the others would never let the engine go."""
    story = Story()
    lender = story.lender("d0")
    story.now_ms += 1
    lender.hello()
    session = lender.session
    confirmed(story, lender)
    foreign(story, EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms + 1))
    assert [x.session for x in story.last.closed] == [session]


def test_an_own_late_write_of_an_engine_that_moved_on_is_a_copy() -> None:
    """The store has it now; its next home must have it, to take it out if the lender does not hold it."""
    story = Story()
    lender = story.lender("d0")
    confirmed(story, lender)
    engine = EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms + 1)
    foreign(story, engine)
    lease = lender.lease("l1", "abc")
    put = LeasePut(engine_id=lender.engine.engine_id, incarnation=lender.engine.incarnation, publication=lease)
    story.heard(story.table.apply(Batch(changes=(put,), own=True), now_ms=story.now_ms))
    assert story.found("abc") == "l1"
    gone = LeaseGone(lease_id=lease.lease_id, reason=EndReason.LENDER_LOST)
    assert not story.heard(story.table.apply(Batch(changes=(gone,), own=True), now_ms=story.now_ms)).stored
    assert story.found("abc") is None


def test_staleness_is_counted_from_when_a_beat_was_sent() -> None:
    staleness = Staleness(max_ms=100, max_under_way=2)
    assert staleness.age_ms(0) is None
    assert not staleness.is_current(0)
    first, second = staleness.send(10), staleness.send(50)
    assert staleness.unanswered_ms(60) == 50
    staleness.came_back(second)
    staleness.came_back(first)  # overtaken: says nothing new
    assert staleness.unanswered_ms(60) == 0
    assert staleness.age_ms(60) == 10
    assert staleness.is_current(150)
    assert not staleness.is_current(151)


def test_beats_that_never_come_back_are_forgotten() -> None:
    staleness = Staleness(max_ms=100, max_under_way=2)
    lost = staleness.send(10)
    staleness.send(20)
    staleness.send(30)
    staleness.came_back(lost)
    assert staleness.age_ms(40) is None
