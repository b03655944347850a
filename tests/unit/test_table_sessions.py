"""Lenders in the table: sessions opened, replaced, fenced, silent, lost, resumed; renewals passed on; clocks apart.

Each test says one rule of registry.proto or DESIGN.md, section 5.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvlease.registry.errors import (
    EngineIdInUse,
    InvalidRequest,
    LenderSilent,
    LimitReached,
    NoSession,
    SessionGap,
    SessionReplaced,
)
from kvlease.registry.table_changes import RenewalSettled, RenewPush
from kvlease.registry.table_limits import HEARTBEAT_WINDOW, TICK_WORK, TableLimits
from kvlease.registry.values import (
    EndReason,
    EndScope,
    Hit,
    Incarnation,
    LeaseEventType,
    LeaseId,
    LeaseState,
    Miss,
    MissReason,
    OnDeadline,
    PublishStatus,
    RenewStatus,
    TenantId,
)

from tests.unit.table_story import TENANT, Lender, Story, with_deadline

SUSPECT_MS = TableLimits().suspect_after_ms
LOST_MS = TableLimits().session_ttl_ms


def test_messages_are_numbered_and_a_gap_is_refused() -> None:
    story = Story()
    lender = story.lender("d0")
    story.table.receive(lender.session, 2)
    story.table.receive(lender.session, 3)
    for wrong in (5, 3):
        with pytest.raises(SessionGap):
            story.table.receive(lender.session, wrong)
    story.table.receive(lender.session, 4)


def test_the_newest_session_of_an_incarnation_wins() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz")
    old = lender.session
    lender.hello()
    (closed,) = story.last.closed
    assert closed.session == old
    assert isinstance(closed.error, SessionReplaced)
    assert story.found("xyz") == "a", "until the snapshot is complete, what was believed stays"
    with pytest.raises(SessionReplaced):
        story.table.receive(old, 2)
    story.table.disconnect(old)
    story.table.receive(lender.session, 2)


def test_a_hello_that_was_held_up_replaces_no_later_one() -> None:
    """Of two streams of one lender, the one that it opened first may arrive last."""
    story = Story()
    lender = story.lender("d-1")
    with pytest.raises(SessionReplaced):
        story.table.hello(lender.engine, now_lender_ms=lender.now_ms - 1, now_ms=story.now_ms)
    lender.heartbeat()
    assert not story.last.closed


def test_an_engine_id_in_use_is_refused_and_a_suspect_one_is_fenced() -> None:
    story = Story()
    old = story.lender("d0")
    old.lend("a", "xyz")
    revision = story.table.revision
    new = Lender(story, "d0", b"j", clock_ms=0)
    story.now_ms += SUSPECT_MS - 1
    with pytest.raises(EngineIdInUse) as refused:
        new.hello()
    assert refused.value.retry_after_ms == 1
    assert story.table.revision == revision
    story.now_ms += 1
    new.hello()
    assert [x.session for x in story.last.closed] == [old.session]
    assert story.found("xyz") is None, "at once, before any tick"
    new.snapshot()
    story.settle()
    assert story.ends() == {"a": EndReason.LENDER_LOST}
    with pytest.raises(SessionReplaced):
        old.lend("b", "uvw")


def test_a_restarted_engine_does_not_wait_for_its_own_ghost() -> None:
    story = Story()
    old = story.lender("d0")
    old.lend("a", "xyz")
    story.table.disconnect(old.session)
    assert story.found("xyz") == "a", "a line that breaks says nothing about what is held"
    new = Lender(story, "d0", b"j", clock_ms=0)
    new.hello()
    assert story.found("xyz") is None, "at once, before any tick"
    assert story.last.closed == ()
    new.snapshot()
    story.settle()
    assert story.ends() == {"a": EndReason.LENDER_LOST}
    with pytest.raises(EngineIdInUse):
        Lender(story, "d0", b"i", clock_ms=0).hello()


def test_a_silent_lender_is_suspect_and_the_next_heartbeat_brings_its_leases_back() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz")
    story.now_ms += SUSPECT_MS
    assert story.resolve("xyz") == Miss(reason=MissReason.SUSPECT), "before any tick"
    story.settle()
    story.now_ms += 5_000
    lender.heartbeat()
    assert story.found("xyz") == "a"
    kinds = [e.type for e in story.events]
    assert kinds == [LeaseEventType.PUBLISHED, LeaseEventType.SUSPECT, LeaseEventType.RESTORED]
    assert [e.lease.suspect for e in story.events] == [False, True, False]


def test_a_lender_silent_for_the_session_ttl_is_lost() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz")
    story.wait(LOST_MS - 1)
    assert [x.suspect for x in story.table.list_engines(now_ms=story.now_ms)] == [True]
    story.now_ms += 1
    (closed,) = story.table.tick(story.now_ms).closed
    assert isinstance(closed.error, NoSession)
    story.settle()
    assert story.table.list_engines(now_ms=story.now_ms) == []
    assert len(story.table) == 0
    assert story.resolve(lease="a") == Miss(reason=MissReason.ENDED, end_reason=EndReason.LENDER_LOST)
    assert story.table.next_wake_ms() is None


def test_the_loss_of_a_big_lender_is_worked_off_in_bounded_steps() -> None:
    story = Story()
    lender = story.lender("d0")
    many = 2 * TICK_WORK + 1
    lender.publish(*(lender.lease(f"l{i}", f"{i:04}", conversation=None) for i in range(many)))
    story.now_ms += LOST_MS
    story.heard(story.table.tick(story.now_ms))
    assert 0 < len(story.table) < many
    assert {story.resolve(lease=f"l{i}").__class__ for i in range(0, many, 50)} == {Miss}, "all are void at once"
    assert story.settle() >= 2
    assert len(story.table) == 0


def test_watchers_are_told_of_a_silent_lender_in_bounded_steps() -> None:
    story = Story()
    lender = story.lender("d0")
    many = 2 * TICK_WORK + 1
    lender.publish(*(lender.lease(f"l{i}", f"{i:04}", conversation=None) for i in range(many)))
    story.now_ms += SUSPECT_MS
    for expected in (TICK_WORK, TICK_WORK, 1):
        assert len(story.heard(story.table.tick(story.now_ms)).events) == expected
    assert story.settle() == 0


def test_a_lost_connection_ends_nothing_by_itself() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz")
    story.table.disconnect(lender.session)
    story.table.disconnect(lender.session)
    assert story.found("xyz") == "a"
    with pytest.raises(NoSession):
        story.table.session_of(lender.engine.engine_id, lender.engine.incarnation)
    lender.hello()
    assert story.table.session_of(lender.engine.engine_id, lender.engine.incarnation) == lender.session
    with pytest.raises(NoSession):
        story.table.session_of(lender.engine.engine_id, Incarnation(b"other incarnatio"))


def test_goodbye_ends_all_leases_as_drained() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz")
    story.heard(story.table.goodbye(lender.session))
    assert story.found("xyz") is None
    story.settle()
    assert story.ends() == {"a": EndReason.DRAINED}
    assert story.table.list_engines(now_ms=story.now_ms) == []
    Lender(story, "d0", b"j", clock_ms=0).hello()


def test_the_snapshot_replaces_what_was_believed() -> None:
    story = Story()
    lender = story.lender("d0")
    kept, gone = lender.lease("a", "abc"), lender.lease("b", "abd")
    lender.publish(kept, gone)
    story.table.disconnect(lender.session)
    lender.hello()
    new = lender.lease("c", "uvw", conversation="chat2")
    moved = with_deadline(kept, kept.deadline_ms + 7_000)
    assert [x.status for x in lender.snapshot(moved, last=False)] == [PublishStatus.PUBLISHED]
    assert story.found(lease="b") == "b", "not before the last part"
    lender.snapshot(new)
    assert {x for x in "abc" if story.found(lease=x)} == {"a", "c"}, "before any tick"
    story.settle()
    assert story.ends() == {"b": EndReason.LENDER_LOST}
    answer = story.resolve(lease="a")
    assert isinstance(answer, Hit)
    assert answer.remaining_ms == kept.deadline_ms + 7_000 - lender.now_ms
    with pytest.raises(InvalidRequest):
        lender.snapshot()


def test_a_lapse_during_the_snapshot_is_no_presentation() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz", ttl_ms=3_000)
    lender.hello()
    story.wait(3_000)
    assert story.events[-1].type is LeaseEventType.LAPSED
    lender.snapshot()
    assert story.found("xyz") is None


def test_a_snapshot_says_what_has_lapsed() -> None:
    story = Story()
    lender = story.lender("d0")
    lease = lender.lease("a", "xyz", ttl_ms=1_000)
    story.now_ms += 2_000
    lender.hello()
    lender.snapshot(replace(lease, lapsed=True))
    answer = story.resolve("xyz")
    assert isinstance(answer, Hit)
    assert (answer.state, answer.remaining_ms) == (LeaseState.LAPSED, -1_000)


def test_a_snapshot_brings_back_what_was_only_inferred_to_have_ended() -> None:
    story = Story()
    lender = story.lender("d0")
    lost = lender.lease("lost", "abc")
    lender.publish(lost)
    story.wait(LOST_MS)
    assert story.ends() == {"lost": EndReason.LENDER_LOST}
    lender.hello()
    expired = lender.lease("expired", "uvw", ttl_ms=3_000, on_deadline=OnDeadline.END)
    lender.snapshot(lost)
    lender.publish(expired)
    story.wait(3_000)
    assert story.ends()["expired"] is EndReason.EXPIRED
    lender.hello()
    renewed = with_deadline(expired, lender.now_ms + 1_000)
    results = lender.snapshot(lost, renewed)
    assert [x.status for x in results] == [PublishStatus.PUBLISHED] * 2
    assert {story.found("abc"), story.found("uvw")} == {"lost", "expired"}


def test_a_lender_that_returns_while_its_loss_is_worked_off_keeps_what_it_presents() -> None:
    story = Story()
    lender = story.lender("d0")
    leases = [lender.lease(f"l{i}", f"{i:04}", conversation=None) for i in range(2 * TICK_WORK)]
    lender.publish(*leases)
    story.now_ms += LOST_MS
    story.heard(story.table.tick(story.now_ms))
    lender.hello()
    assert {x.status for x in lender.snapshot(*leases)} == {PublishStatus.PUBLISHED}
    story.settle()
    assert len(story.table) == len(leases)


def test_a_snapshot_does_not_bring_back_what_was_asked_to_end() -> None:
    story = Story()
    lender = story.lender("d0")
    lease = lender.lease("a", "xyz")
    lender.publish(lease)
    story.table.disconnect(lender.session)
    story.end(EndScope.LEASE, "a")
    assert not story.last.ends
    lender.hello()
    (result,) = lender.snapshot(lease)
    assert (result.status, result.message) == (PublishStatus.ENDED, "released")


def test_clocks_apart_and_late_messages_do_not_matter() -> None:
    story = Story()
    for ahead_ms in (-600_000, 0, 600_000):
        lender = story.lender(f"d{ahead_ms}", clock_ms=1_000_000 + ahead_ms)
        lender.lend(f"l{ahead_ms}", f"x{ahead_ms}", ttl_ms=3_000)
        lender.heartbeat(late_ms=2_500)
        answer = story.resolve(lease=f"l{ahead_ms}")
        assert isinstance(answer, Hit)
        assert answer.remaining_ms == 3_000, "a late heartbeat must not set the lender's clock back"


def test_a_lenders_clock_that_is_slower_is_followed() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz", ttl_ms=60_000)
    for _ in range(HEARTBEAT_WINDOW + 1):
        story.now_ms += 1_000
        lender.clock_ms -= 10
        lender.heartbeat()
    answer = story.resolve(lease="a")
    assert isinstance(answer, Hit)
    assert abs(answer.remaining_ms - (60_000 - 990 * (HEARTBEAT_WINDOW + 1))) <= 10 * HEARTBEAT_WINDOW


def test_too_many_engines() -> None:
    story = Story(TableLimits(max_engines=1))
    story.lender("d0")
    with pytest.raises(LimitReached) as refused:
        story.lender("d1")
    assert refused.value.limit == "max_engines"


def _ask(story: Story, lease_id: str = "a", *, ttl_ms: int = 0, tenant: TenantId = TENANT) -> RenewalSettled | None:
    settled, changes = story.table.ask_renewal(tenant, LeaseId(lease_id), ttl_ms=ttl_ms, now_ms=story.now_ms)
    story.heard(changes)
    return settled


def test_renewals_are_joined_and_settled_together() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz")
    assert _ask(story, ttl_ms=5_000) is None
    assert story.last.renewals == (RenewPush(session=lender.session, lease_id=LeaseId("a"), ttl_ms=5_000),)
    assert _ask(story, ttl_ms=4_000) is None
    assert not story.last.renewals
    assert _ask(story, ttl_ms=6_000) is None
    assert [x.ttl_ms for x in story.last.renewals] == [6_000], "a longer ttl has to be asked for"
    lender.renewed("a", ttl_ms=6_000)
    assert story.last.settled == (
        RenewalSettled(lease_id=LeaseId("a"), status=RenewStatus.RENEWED, remaining_ms=6_000),
    )
    lender.renewed("a", ttl_ms=6_000)
    assert not story.last.settled


def test_a_renewal_is_refused_ended_or_given_up() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz")
    _ask(story)
    changes = story.table.refuse_renewal(lender.session, LeaseId("a"), RenewStatus.DISABLED, now_ms=story.now_ms)
    assert [x.status for x in changes.settled] == [RenewStatus.DISABLED]
    _ask(story)
    story.wait(TableLimits().renewal_wait_ms)
    assert [x.status for x in story.last.settled] == [None]
    _ask(story)
    lender.ended("a")
    assert [x.status for x in story.last.settled] == [RenewStatus.ENDED]
    assert _ask(story) == RenewalSettled(lease_id=LeaseId("a"), status=RenewStatus.ENDED)
    assert _ask(story, "b") == RenewalSettled(lease_id=LeaseId("b"), status=RenewStatus.UNKNOWN)


def test_a_foreign_tenants_lease_cannot_be_renewed_and_a_silent_lender_cannot_be_asked() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz")
    foreign = _ask(story, tenant=TenantId("other"))
    assert foreign == RenewalSettled(lease_id=LeaseId("a"), status=RenewStatus.UNKNOWN)
    story.table.disconnect(lender.session)
    with pytest.raises(LenderSilent):
        _ask(story)
