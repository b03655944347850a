"""One lease's life in the table: published, repeated, superseded, branched, renewed, lapsed, expired, ended.

Each test says one rule of registry.proto or DESIGN.md, section 5. Sessions and searches have files of their own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvlease.registry.table_limits import TICK_WORK, TableLimits
from kvlease.registry.values import (
    ConversationId,
    EndReason,
    EndScope,
    Hit,
    LeaseEventType,
    LeaseState,
    Miss,
    MissReason,
    OnDeadline,
    PublishStatus,
    Record,
    TenantId,
)

from tests.unit.table_story import STRIDE, TENANT, TTL_MS, Story, chain

OTHER = TenantId("other")


def test_published_is_resolved_byte_for_byte() -> None:
    story = Story()
    lender = story.lender("d0")
    lease = lender.lease("a", "xyz")
    (result,) = lender.publish(lease)
    assert result.status is PublishStatus.PUBLISHED
    answer = story.resolve("xyzw")
    assert isinstance(answer, Hit)
    assert answer.record == lease.record
    assert (answer.matched_strides, answer.state, answer.remaining_ms) == (3, LeaseState.LIVE, TTL_MS)
    assert [e.type for e in story.events] == [LeaseEventType.PUBLISHED]


def test_the_same_lease_again_changes_nothing() -> None:
    story = Story()
    lender = story.lender("d0")
    lease = lender.lease("a", "xyz")
    lender.publish(lease)
    lender.renewed("a", ttl_ms=TTL_MS + 1_000)
    revision = story.table.revision
    (again,) = lender.publish(lease)
    assert again.status is PublishStatus.PUBLISHED
    assert not story.last
    assert story.table.revision == revision
    answer = story.resolve(lease="a")
    assert isinstance(answer, Hit)
    assert answer.remaining_ms == TTL_MS + 1_000, "a repeated publish must not move the deadline back"


def test_another_lease_under_the_same_id_is_a_conflict() -> None:
    story = Story()
    lender, other = story.lender("d0"), story.lender("d1")
    lease = lender.lease("a", "xyz")
    lender.publish(lease)
    changed = replace(lease, record=Record(digests=lease.record.digests, body=b"changed"))
    assert [x.status for x in lender.publish(changed)] == [PublishStatus.CONFLICT]
    assert [x.status for x in other.publish(lease)] == [PublishStatus.CONFLICT]
    answer = story.resolve(lease="a")
    assert isinstance(answer, Hit)
    assert (answer.record, answer.engine_id) == (lease.record, "d0")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("lease_id", {"lease_id": "a b"}),
        ("tenant", {"tenant": ""}),
        ("stride_tokens", {"stride_tokens": 0}),
        ("block_count", {"block_count": -1}),
        ("fingerprint_hash", {"fingerprint_hash": b"f"}),
        ("record.digests", {"record": Record(digests=b"d" * 15, body=b"")}),
        ("record.digests", {"record": Record(digests=b"", body=b"")}),
        ("record", {"record": Record(digests=b"d" * 16, body=b"b" * (256 * 1024))}),
    ],
)
def test_an_invalid_lease_is_refused_and_the_others_are_taken(field: str, change: dict[str, object]) -> None:
    story = Story()
    lender = story.lender("d0")
    good = lender.lease("a", "xyz")
    bad = replace(lender.lease("b", "uvw"), **change)  # type: ignore[arg-type]
    results = lender.publish(bad, good)
    assert [x.status for x in results] == [PublishStatus.INVALID, PublishStatus.PUBLISHED]
    assert field in results[0].message
    assert len(story.table) == 1


def test_a_longer_lease_of_the_conversation_supersedes() -> None:
    story = Story()
    lender, other = story.lender("d0"), story.lender("d1")
    lender.lend("a", "xy")
    result = other.lend("b", "xyz")
    assert result.superseded == ("a",)
    assert story.ends() == {"a": EndReason.SUPERSEDED}
    assert [(x.session, x.lease_id) for x in story.last.ends] == [(lender.session, "a")], "its lender must be told"
    assert story.found("xyz") == "b"
    assert story.resolve(lease="a") == Miss(reason=MissReason.ENDED, end_reason=EndReason.SUPERSEDED)


def test_what_does_not_cover_does_not_supersede() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz")
    assert lender.lend("branch", "xyw").superseded == ()
    assert lender.lend("shorter", "x").superseded == ()
    assert lender.lend("elsewhere", "xyzz", conversation="chat2").superseded == ()
    assert lender.lend("nowhere", "xyzz", conversation=None).superseded == ()
    foreign = replace(lender.lease("foreign", "xyzz"), tenant=OTHER)
    assert [x.superseded for x in lender.publish(foreign)] == [()]
    relaid = replace(lender.lease("relaid", "xyzz"), fingerprint_hash=b"g" * 16)
    assert [x.superseded for x in lender.publish(relaid)] == [()]
    assert not story.ends()


def test_the_branch_not_used_for_longest_makes_room() -> None:
    story = Story(TableLimits(max_branches=3))
    lender = story.lender("d0")
    for i, text in enumerate("abc"):
        lender.lend(f"l{i}", text)
        story.wait(10)
    assert story.found("a") == "l0", "resolving uses a branch"
    story.wait(10)
    lender.lend("l3", "d")
    assert story.ends() == {"l1": EndReason.PRESSURE}
    assert [x.lease_id for x in story.last.ends] == ["l1"]


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (TableLimits(max_leases_per_engine=1), "max_leases_per_engine"),
        (TableLimits(max_leases_per_tenant=1), "max_leases_per_tenant"),
        (TableLimits(max_blocks_per_tenant=3), "max_blocks_per_tenant"),
    ],
)
def test_a_limit_refuses_by_name_and_counts_what_is_superseded_as_gone(limits: TableLimits, name: str) -> None:
    story = Story(limits)
    lender = story.lender("d0")
    lender.lend("a", "x", conversation="one")
    refused = lender.lend("b", "y", conversation="two")
    assert (refused.status, refused.message) == (PublishStatus.QUOTA, name)
    assert not story.last
    assert lender.lend("c", "xy", conversation="one").superseded == ("a",)
    lender.ended("c")
    assert lender.lend("b", "y", conversation="two").status is PublishStatus.PUBLISHED, "a refusal is not for good"


def test_a_tenant_too_many_is_refused() -> None:
    story = Story(TableLimits(max_tenants=1))
    lender = story.lender("d0")
    lender.lend("a", "x")
    (refused,) = lender.publish(replace(lender.lease("b", "y"), tenant=OTHER))
    assert (refused.status, refused.message) == (PublishStatus.QUOTA, "max_tenants")


def test_at_the_deadline_a_lease_lapses_and_stays_readable() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz", ttl_ms=3_000)
    story.now_ms += 2_999
    answer = story.resolve("xyz")
    assert isinstance(answer, Hit)
    assert (answer.state, answer.remaining_ms) == (LeaseState.LIVE, 1)
    story.now_ms += 2
    answer = story.resolve("xyz")
    assert isinstance(answer, Hit)
    assert (answer.state, answer.remaining_ms) == (LeaseState.LAPSED, -1), "before any tick"
    story.settle()
    assert [e.type for e in story.events] == [LeaseEventType.PUBLISHED, LeaseEventType.LAPSED]
    assert story.found("xyz") == "a"


def test_a_lease_that_is_to_end_at_its_deadline_is_not_resolved_after_it() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.publish(lender.lease("a", "xyz", ttl_ms=3_000, on_deadline=OnDeadline.END))
    story.now_ms += 3_000
    assert story.resolve(lease="a") == Miss(reason=MissReason.ENDED, end_reason=EndReason.EXPIRED), "before any tick"
    assert story.found("xyz") is None
    story.settle()
    assert story.ends() == {"a": EndReason.EXPIRED}
    assert len(story.table) == 0


def test_an_expired_lease_is_not_taken_in() -> None:
    story = Story()
    lender = story.lender("d0")
    (result,) = lender.publish(lender.lease("a", "xyz", ttl_ms=0, on_deadline=OnDeadline.END))
    assert result.status is PublishStatus.ENDED
    assert len(story.table) == 0


def test_a_renewal_moves_the_deadline_and_pins_again() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xyz", ttl_ms=3_000)
    story.wait(4_000)
    ((_, _, tally),) = story.table.tallies()
    assert (tally.live, tally.lapsed, tally.live_blocks, tally.lapsed_blocks) == (0, 1, 0, 2)
    lender.renewed("a", ttl_ms=5_000)
    ((_, _, tally),) = story.table.tallies()
    assert (tally.live, tally.lapsed, tally.live_blocks) == (1, 0, 2)
    answer = story.resolve(lease="a")
    assert isinstance(answer, Hit)
    assert (answer.state, answer.remaining_ms) == (LeaseState.LIVE, 5_000)
    story.wait(5_000)
    kinds = [e.type for e in story.events]
    assert kinds[1:] == [LeaseEventType.LAPSED, LeaseEventType.RENEWED, LeaseEventType.LAPSED]


def test_what_the_lender_ended_is_gone_and_a_late_publish_is_told() -> None:
    story = Story()
    lender = story.lender("d0")
    lease = lender.lease("a", "xyz")
    lender.publish(lease)
    lender.ended("a", EndReason.REUSED)
    assert not story.last.ends, "the lender knows"
    lender.ended("a", EndReason.DRAINED)
    assert story.resolve(lease="a") == Miss(reason=MissReason.ENDED, end_reason=EndReason.REUSED)
    (late,) = lender.publish(lease)
    assert (late.status, late.message) == (PublishStatus.ENDED, "reused")
    lender.ended("b")
    assert lender.lend("b", "uvw").status is PublishStatus.ENDED, "its end arrived first"


def test_a_lender_cannot_end_another_lenders_lease() -> None:
    story = Story()
    lender, other = story.lender("d0"), story.lender("d1")
    lender.lend("a", "xyz")
    other.ended("a")
    other.renewed("a", ttl_ms=1)
    assert story.found("xyz") == "a"


@pytest.mark.parametrize(
    ("scope", "target", "gone"),
    [
        (EndScope.LEASE, "a", {"a"}),
        (EndScope.LEASE, "nothing", set()),
        (EndScope.CONVERSATION, "chat", {"a", "b"}),
        (EndScope.ENGINE, "d0", {"a", "c", "x"}),
        (EndScope.TENANT, "", {"a", "b", "c"}),
    ],
)
def test_end_by_lease_conversation_engine_and_tenant(scope: EndScope, target: str, gone: set[str]) -> None:
    story = Story()
    first, second = story.lender("d0"), story.lender("d1")
    first.lend("a", "abc")
    second.lend("b", "abd")
    first.lend("c", "acd", conversation="chat2")
    first.publish(replace(first.lease("x", "abc"), tenant=OTHER))
    assert story.end(scope, target, reason=EndReason.QUOTA) == len(gone)
    assert story.ends() == dict.fromkeys(gone, EndReason.QUOTA)
    holders = {"a": first, "b": second, "c": first, "x": first}
    assert {(x.session, x.lease_id) for x in story.last.ends} == {(holders[i].session, i) for i in gone}
    assert story.end(scope, target) == 0, "idempotent"
    assert {x for x in "abc" if story.found(lease=x)} == set("abc") - gone


def test_a_foreign_tenants_lease_cannot_be_ended() -> None:
    story = Story()
    story.lender("d0").lend("a", "xyz")
    assert story.end(EndScope.LEASE, "a", tenant=OTHER) == 0
    assert story.end(EndScope.CONVERSATION, "chat", tenant=OTHER) == 0
    assert story.end(EndScope.TENANT, tenant=OTHER) == 0
    assert story.found("xyz") == "a"


def test_many_leases_are_ended_and_expired_in_bounded_steps() -> None:
    story = Story()
    lender = story.lender("d0")
    many = 3 * TICK_WORK
    lender.publish(*(lender.lease(f"l{i}", f"{i:04}", conversation=None, ttl_ms=3_000) for i in range(many)))
    story.now_ms += 5_000
    while (wake_ms := story.table.next_wake_ms()) is not None and wake_ms <= story.now_ms:
        assert len(story.heard(story.table.tick(story.now_ms)).events) <= TICK_WORK
    assert sum(e.type is LeaseEventType.LAPSED for e in story.events) == many
    assert story.end(EndScope.ENGINE, "d0") == many


def test_ends_are_remembered_up_to_a_limit() -> None:
    story = Story(TableLimits(max_remembered_ends=2))
    lender = story.lender("d0")
    for name in "abc":
        lender.lend(name, name)
        lender.ended(name)
    assert story.resolve(lease="a") == Miss(reason=MissReason.UNKNOWN)
    assert story.resolve(lease="c") == Miss(reason=MissReason.ENDED, end_reason=EndReason.PRESSURE)


def test_events_have_contiguous_revisions_and_carry_the_lease() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "xy")
    lender.lend("b", "xyz")
    lender.ended("b")
    assert [e.revision for e in story.events] == [1, 2, 3, 4]
    published = story.events[0].lease
    assert (published.tenant, published.conversation) == (TENANT, ConversationId("chat"))
    assert (published.tokens, published.blocks) == (len(chain("xy")) // 16 * STRIDE, 2)
