"""Ends that somebody asked for, until their lender confirms them: told again to whoever presents the lease.

Tables that know of an end only what the store said, as if every replica that had made or seen it were gone. That all
replicas together keep to it is in tests/stateful; that etcd keeps it, in tests/etcd.
"""

from __future__ import annotations

import pytest
from kvlease.registry.table_changes import (
    Batch,
    Changes,
    EndHeard,
    EndOwed,
    EndPush,
    EnginePut,
    LeaseGone,
    LeasePut,
    StoreChange,
    StoredEngine,
    StoredView,
)
from kvlease.registry.table_limits import TICK_WORK, TableLimits
from kvlease.registry.values import EndReason, EndScope, LeaseId, PublishStatus

from tests.unit.table_story import Lender, Story, owed_to

FIRST = LeaseId("first")
LONG_MS = 10_000_000


def cold(*owed: EndOwed) -> Story:
    """A replica that has just loaded the store, in which there is nothing else."""
    story = Story()
    story.heard(story.table.replace(StoredView(owed=owed), (), now_ms=story.now_ms))
    return story


def take(story: Story, *changes: StoreChange, own: bool = False) -> Changes:
    return story.heard(story.table.apply(Batch(changes=changes, own=own), now_ms=story.now_ms))


def heard(story: Story) -> list[LeaseId]:
    """What the store is told in the next ticks."""
    found = []
    while (wake_ms := story.table.next_wake_ms()) is not None and wake_ms <= story.now_ms:
        changes = story.heard(story.table.tick(story.now_ms))
        found += [x.lease_id for x in changes.stored if isinstance(x, EndHeard)]
    return found


def pushed(changes: Changes) -> list[LeaseId]:
    return [push.lease_id for push in changes.ends]


@pytest.mark.parametrize(
    ("scope", "target"),
    [(EndScope.LEASE, FIRST), (EndScope.CONVERSATION, "chat"), (EndScope.ENGINE, "d-1"), (EndScope.TENANT, "")],
)
def test_an_end_that_was_asked_for_is_owed(scope: EndScope, target: str) -> None:
    story = Story()
    lender = story.lender("d-1")
    lender.lend(FIRST, "abc")
    assert story.end(scope, target) == 1
    gone = LeaseGone(lease_id=FIRST, reason=EndReason.RELEASED)
    assert story.last.stored == (owed_to(lender, FIRST), gone)
    assert not heard(story)
    lender.ended(FIRST, EndReason.RELEASED)
    assert heard(story) == [FIRST]


def test_what_the_lender_ends_by_itself_or_its_next_turn_supersedes_is_not() -> None:
    story = Story()
    lender = story.lender("d-1")
    lender.lend(FIRST, "abc")
    lender.lend("second", "abcd")
    assert not [x for x in story.last.stored if isinstance(x, EndOwed)]
    lender.ended("second")
    assert story.last.stored == (LeaseGone(lease_id=LeaseId("second"), reason=EndReason.PRESSURE),)
    assert not heard(story)


def test_a_lease_with_much_time_left_is_owed_for_longer_and_not_for_ever() -> None:
    limits = TableLimits()
    for ttl_ms, wanted_ms in (
        (LONG_MS, LONG_MS + limits.suspect_after_ms),
        (10**15, limits.max_owed_end_ttl_ms),
    ):
        story = Story()
        story.lender("d-1").lend(FIRST, "abc", ttl_ms=ttl_ms)
        story.end(EndScope.LEASE, FIRST)
        assert [x.ttl_ms for x in story.last.stored if isinstance(x, EndOwed)] == [wanted_ms]


@pytest.mark.parametrize("reason", [EndReason.EXPIRED, EndReason.LENDER_LOST])
def test_an_order_is_for_good_whatever_reason_it_gives(reason: EndReason) -> None:
    """A home takes these reasons for another replica's conclusion, and would write its lease again."""
    story = Story()
    lender = story.lender("d-1")
    lender.lend(FIRST, "abc")
    story.end(EndScope.LEASE, FIRST, reason=reason)
    assert story.last.stored == (owed_to(lender, FIRST), LeaseGone(lease_id=FIRST, reason=EndReason.RELEASED))


def test_a_lender_that_presents_the_lease_is_told_again() -> None:
    story = Story()
    lender = Lender(story, "d-1", b"i", 5_000_000)
    story = lender.story = cold(owed_to(lender, FIRST))
    lender.hello()
    (result,) = lender.snapshot(lender.lease(FIRST, "abc"))
    assert (result.status, result.message) == (PublishStatus.ENDED, EndReason.RELEASED.value)
    assert story.last.ends == (EndPush(session=lender.session, lease_id=FIRST, reason=EndReason.RELEASED),)
    assert not story.last.stored
    assert story.found("abc") is None
    assert not heard(story), "it has not confirmed anything yet"
    lender.ended(FIRST, EndReason.RELEASED)
    assert heard(story) == [FIRST]
    assert not heard(story)


def test_a_lender_that_publishes_it_late_is_told_again() -> None:
    story = Story()
    lender = story.lender("d-1")
    take(story, owed_to(lender, FIRST), LeaseGone(lease_id=FIRST, reason=EndReason.RELEASED))
    assert lender.lend(FIRST, "abc").status is PublishStatus.ENDED
    assert pushed(story.last) == [FIRST]


def test_a_lender_that_comes_back_without_the_lease_owes_nothing() -> None:
    lender = Lender(Story(), "d-1", b"i", 5_000_000)
    story = lender.story = cold(owed_to(lender, FIRST), owed_to(lender, "other"))
    lender.hello()
    lender.snapshot(lender.lease("other", "xyz"), last=False)
    assert not heard(story), "it may come in the rest of the snapshot"
    lender.snapshot()
    assert heard(story) == [FIRST]


def test_an_end_asked_for_while_the_lender_presents_waits_for_its_answer() -> None:
    story = Story()
    lender = Lender(story, "d-1", b"i", 5_000_000)
    lender.hello()
    lender.snapshot(lender.lease(FIRST, "abc"), last=False)
    story.end(EndScope.LEASE, FIRST)
    lender.snapshot()
    assert not heard(story)


def test_another_lenders_word_confirms_nothing() -> None:
    lender = Lender(Story(), "d-1", b"i", 5_000_000)
    story = cold(owed_to(lender, FIRST))
    for other in (Lender(story, "d-2", b"i", 1), Lender(story, "d-1", b"j", 1)):
        other.hello()
        other.snapshot()
        other.ended(FIRST)
        assert not heard(story)


def test_a_lender_that_leaves_in_good_order_has_heard_of_everything() -> None:
    lender = Lender(Story(), "d-1", b"i", 5_000_000)
    names = [f"lease-{i:03}" for i in range(3 * TICK_WORK)]
    story = lender.story = cold(*(owed_to(lender, x) for x in names))
    lender.hello()
    story.heard(story.table.goodbye(lender.session))
    changes = story.heard(story.table.tick(story.now_ms))
    assert len(changes.stored) == TICK_WORK, "a bounded number a tick"
    assert heard(story) == names[TICK_WORK:]


def test_a_home_that_hears_of_an_end_of_what_it_does_not_hold_asks_its_lender() -> None:
    """The lender may have ended it by itself in the same moment: then nobody else would clear the store."""
    story = Story()
    lender = story.lender("d-1")
    lender.lend(FIRST, "abc")
    lender.ended(FIRST)
    gone = LeaseGone(lease_id=FIRST, reason=EndReason.RELEASED)
    assert pushed(take(story, owed_to(lender, FIRST), gone)) == [FIRST]
    lender.ended(FIRST)
    assert heard(story) == [FIRST]
    assert not pushed(take(story, owed_to(lender, FIRST), own=True)), "its own word back is no news"


def test_the_lease_itself_in_the_store_does_not_bring_it_back() -> None:
    """A home wrote it late and died before it read of the end: both keys are there, in either order."""
    lender = Lender(Story(), "d-1", b"i", 5_000_000)
    engine = lender.engine
    lease = LeasePut(engine_id=engine.engine_id, incarnation=engine.incarnation, publication=lender.lease(FIRST, "abc"))
    home = EnginePut(engine=engine, now_lender_ms=1)
    view = StoredView(engines=(StoredEngine(put=home, own=False),), leases=(lease,), owed=(owed_to(lender, FIRST),))
    story = Story()
    loaded = story.heard(story.table.replace(view, (), now_ms=story.now_ms))
    assert loaded.stored == (LeaseGone(lease_id=FIRST, reason=EndReason.RELEASED),)
    assert not len(story.table)
    late = Story()
    take(late, home, lease)
    done = take(late, owed_to(lender, FIRST))
    assert not len(late.table)
    assert not done.stored


def test_a_home_that_loads_the_store_carries_out_what_it_missed() -> None:
    """The end was asked for elsewhere, its replica is gone, and the history that told of it was compacted."""
    story = Story()
    lender = story.lender("d-1")
    lender.lend(FIRST, "abc")
    engine = EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms)
    take(story, engine, own=True)
    view = StoredView(engines=(StoredEngine(put=engine, own=True),), owed=(owed_to(lender, FIRST),))
    done = story.heard(story.table.replace(view, (), now_ms=story.now_ms))
    assert pushed(done) == [FIRST]
    assert not [x for x in done.stored if isinstance(x, LeasePut)]
    assert story.found("abc") is None


def test_a_load_forgets_what_was_confirmed_elsewhere_and_not_what_is_still_to_be_written() -> None:
    story = Story()
    lender = story.lender("d-1")
    lender.lend(FIRST, "abc")
    story.end(EndScope.LEASE, FIRST)
    pending = story.last.stored
    engine = StoredEngine(put=EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms), own=True)
    view = StoredView(engines=(engine,))
    story.heard(story.table.replace(view, pending, now_ms=story.now_ms))
    lender.hello()
    assert pushed_after_presenting(lender) == [FIRST]
    story.heard(story.table.replace(view, (), now_ms=story.now_ms))
    lender.hello()
    assert pushed_after_presenting(lender) == []


def pushed_after_presenting(lender: Lender) -> list[LeaseId]:
    lender.snapshot(lender.lease(FIRST, "abc"))
    return pushed(lender.story.last)


def test_the_store_forgets_it_in_the_end() -> None:
    lender = Lender(Story(), "d-1", b"i", 5_000_000)
    story = cold(owed_to(lender, FIRST))
    gone = Batch(changes=(EndHeard(lease_id=FIRST),), expired=True)
    story.heard(story.table.apply(gone, now_ms=story.now_ms))
    lender.story = story
    lender.hello()
    lender.snapshot()
    assert not heard(story)


def test_memory_is_bounded() -> None:
    lender = Lender(Story(TableLimits(max_owed_ends=2)), "d-1", b"i", 5_000_000)
    story = lender.story
    take(story, *(owed_to(lender, x) for x in ("a", "b", "c")))
    lender.hello()
    lender.snapshot()
    assert heard(story) == ["b", "c"]
