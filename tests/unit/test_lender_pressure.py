"""The lease holder when memory is wanted: who goes first, and how much of it one tenant may hold.

What goes first is part of what users are promised, so the order is asserted, not only the sum.
"""

from __future__ import annotations

import pytest
from kvlease.connector.lender_effects import AnnounceLapsed
from kvlease.connector.lender_live import HEAD_START_MS, LiveLeases
from kvlease.connector.loan import Loan, OverQuota
from kvlease.registry.values import EndReason, LeaseId, LeaseState, OnDeadline, RenewStatus, TenantId

from tests.unit.lender_story import ends, holder, kinds, loan

OTHER = TenantId("other")


def test_too_many_blocks_end_the_live_lease_used_least_recently() -> None:
    lender = holder()
    for number, name in enumerate(("old", "middle", "young")):
        lender.lend(loan(name, conversation=None, first=10 * number), number)
    lender.renew(LeaseId("old"), 5_000, 50)
    effects = lender.lend(loan("new", "a", conversation=None, first=40), 200)
    assert ends(effects) == [("middle", EndReason.PRESSURE)]
    assert lender.live_blocks == 10
    lender.check()


def test_a_lease_that_was_read_has_a_head_start_and_no_more() -> None:
    lender = holder(max_blocks=100)
    for number, (name, now_ms) in enumerate((("read", 0), ("within", HEAD_START_MS), ("beyond", HEAD_START_MS + 20))):
        lender.lend(loan(name, "a", conversation=None, first=1 + 10 * number), now_ms)
        if name == "read":
            lender.was_read(LeaseId("read"), 10)
            lender.was_read(LeaseId("read"), 10)
            lender.was_read(LeaseId("unknown"), 10)
    order = [lender.relieve(1) for _ in range(3)]
    assert [ends(effects)[0][0] for effects in order] == ["within", "read", "beyond"]
    lender.check()


def test_reuse_is_remembered_along_the_conversation() -> None:
    lender = holder()
    lender.lend(loan("turn1", "a"), 0)
    lender.was_read(LeaseId("turn1"), 1)
    lender.lend(loan("turn2", "ab"), 2)
    lender.lend(loan("oneshot", "ab", conversation="d", first=20), 3)
    assert ends(lender.relieve(1)) == [("oneshot", EndReason.PRESSURE)]
    assert LeaseId("turn2") in lender


def test_a_lapsed_lease_that_was_read_is_worth_it_when_it_lives_again() -> None:
    lender = holder()
    lender.lend(loan("read", ttl_ms=1), 0)
    lender.tick(1)
    lender.was_read(LeaseId("read"), 2)
    lender.renew(LeaseId("read"), 0, 3)
    lender.lend(loan("unread", conversation=None, first=20), 4)
    assert ends(lender.relieve(1)) == [("unread", EndReason.PRESSURE)]


def test_too_many_leases_end_the_oldest_lapsed_one_first() -> None:
    lender = holder(max_blocks=1_000)
    for number in range(4):
        lender.lend(loan(f"l{number}", conversation=None, ttl_ms=100 - number, first=10 * number), 0)
    lender.tick(98)  # l3 and l2 lapse, in this order
    effects = lender.lend(loan("new", conversation=None, first=90), 98)
    assert ends(effects) == [("l3", EndReason.PRESSURE)]
    effects = lender.lend(loan("newer", conversation=None, first=80), 98)
    assert ends(effects) == [("l2", EndReason.PRESSURE)]
    effects = lender.lend(loan("newest", conversation=None, first=70), 98)
    assert ends(effects) == [("l0", EndReason.PRESSURE)], "none is lapsed: the cheapest loss"
    lender.check()


def test_pressure_takes_no_more_than_is_wanted_and_never_the_lapsed() -> None:
    lender = holder()
    for number, ttl_ms in enumerate((500, 300, 1)):
        lender.lend(loan(f"l{number}", "a", conversation=None, ttl_ms=ttl_ms, first=10 * number), number)
    lender.tick(3)  # l2 lapses: its blocks are free already
    assert ends(lender.relieve(1)) == [("l0", EndReason.PRESSURE)]
    assert ends(lender.relieve(100)) == [("l1", EndReason.PRESSURE)]
    assert lender.relieve(1) == []
    assert lender.relieve(0) == []
    assert LeaseId("l2") in lender
    lender.check()


# -- blocks that are to stay free


@pytest.mark.parametrize(("free", "gone"), [(10, []), (9, ["l0"]), (7, ["l0", "l1"]), (0, ["l0", "l1", "l2"])])
def test_below_the_watermark_the_cheapest_leases_lapse_until_enough_is_free(free: int, gone: list[str]) -> None:
    lender = holder(keep_free_blocks=10)
    for number in range(3):
        lender.lend(loan(f"l{number}", "a", conversation=None, first=10 * number), number)
    effects = lender.ease(free)
    assert [x.lease_id for x in effects if isinstance(x, AnnounceLapsed)] == gone
    assert lender.count(LeaseState.LAPSED) == len(gone)
    lender.check()


def test_leases_that_may_not_lapse_end_at_the_watermark() -> None:
    lender = holder(keep_free_blocks=1, on_deadline=OnDeadline.END)
    lender.lend(loan("a"), 0)
    assert kinds(lender.ease(0)) == ["BreakSeal", "Free", "AnnounceEnded"]


# -- blocks that leases share


def test_leases_of_one_beginning_hold_its_blocks_once() -> None:
    """Eight chats with one long system prompt are no more in the pool than the prompt and what each has of its own."""
    lender = holder(slots=8, max_blocks=24)
    for number in range(8):
        effects = lender.lend(forked(f"l{number}", own=10 + 2 * number), number)
        assert ends(effects) == []
        assert lender.live_blocks == 8 + 2 * (number + 1)
        lender.check()
    effects = lender.lend(forked("more", own=90), 9)
    assert ends(effects) == [("l0", EndReason.PRESSURE)], "no slot is left: one goes, though it gives little back"
    assert [lease for lease, _ in ends(lender.relieve(3))] == ["l1", "l2"], "ends until so many blocks are free"
    assert lender.live_blocks == 20
    assert [lease for lease, _ in ends(lender.end_all(EndReason.DRAINED))]
    assert lender.live_blocks == 0
    lender.check()


def test_room_is_made_for_what_is_new_only() -> None:
    lender = holder(slots=8)
    lender.lend(forked("a", own=10), 0)
    assert ends(lender.lend(forked("b", own=20), 1)) == []
    assert lender.live_blocks == 12
    assert ends(lender.lend(forked("c", own=30), 2)) == [("a", EndReason.PRESSURE)]
    assert ends(lender.lend(loan("other", "abcd", conversation=None, first=50), 3)) == [
        ("b", EndReason.PRESSURE),
        ("c", EndReason.PRESSURE),
    ], "ending b gives two blocks back, which is too little"
    assert ends(lender.lend(forked("d", own=40), 4)) == [("other", EndReason.PRESSURE)]
    lender.check()


def test_what_an_end_gives_back_may_be_what_the_loan_shares_with_it() -> None:
    lender = holder(slots=8)
    lender.lend(forked("a", own=10), 0)
    lender.lend(loan("b", "a", conversation=None, first=30), 1)
    effects = lender.lend(forked("c", own=40), 2)
    assert ends(effects) == [("a", EndReason.PRESSURE)]
    assert ends(lender.lend(loan("d", "abc", conversation=None, first=1), 3)) == []
    assert lender.live_blocks == 12
    effects = lender.lend(loan("e", "abcdef", conversation=None, first=1), 4)
    assert ends(effects) == [("b", EndReason.PRESSURE), ("c", EndReason.PRESSURE)]
    assert lender.live_blocks == 12
    lender.check()


def test_a_lapsed_lease_lives_again_beside_one_that_holds_most_of_its_blocks() -> None:
    lender = holder(slots=8)
    lender.lend(forked("a", own=10)._replace(ttl_ms=1), 0)
    lender.tick(1)
    lender.lend(forked("b", own=20), 2)
    assert kinds(lender.renew(LeaseId("a"), 0, 3)) == ["Pin", "AnnounceRenewed"]
    assert lender.live_blocks == 12
    lender.lend(forked("c", own=30)._replace(ttl_ms=1), 4)
    lender.tick(5)
    lender.renew(LeaseId("a"), 0, 6)
    lender.check()


def test_the_watermark_counts_what_becomes_free() -> None:
    lender = holder(slots=8, keep_free_blocks=2)
    for number in range(2):
        lender.lend(forked(f"l{number}", own=10 + 10 * number), number)
    assert len([x for x in lender.ease(0) if isinstance(x, AnnounceLapsed)]) == 1
    assert len([x for x in lender.ease(1) if isinstance(x, AnnounceLapsed)]) == 1, "the last one gives all of it back"
    lender.check()


def test_a_tenants_leases_share_their_blocks_with_one_another_only() -> None:
    lender = holder(slots=8, tenant_blocks=10)
    lender.lend(forked("theirs", own=10)._replace(tenant=OTHER), 0)
    lender.lend(forked("a", own=20), 1)
    assert lender.live_blocks == 12
    assert ends(lender.lend(forked("b", own=30), 2)) == [("a", EndReason.QUOTA)]
    lender.check()


def forked(name: str, *, own: int) -> Loan:
    """Eight blocks that all of these begin with, and two of its own."""
    return loan(name, "abcd" + name[-1], conversation=None)._replace(block_ids=((*range(1, 9), own, own + 1),))


# -- a share for each tenant


def test_a_tenant_over_its_share_loses_its_own_leases_only() -> None:
    lender = holder(tenant_blocks=8)
    lender.lend(loan("theirs", conversation=None, first=90)._replace(tenant=OTHER), 0)
    lender.lend(loan("a", conversation=None), 1)
    lender.lend(loan("b", conversation=None, first=10), 2)
    assert lender.live_blocks == 12
    effects = lender.lend(loan("c", conversation=None, first=20), 3)
    assert ends(effects) == [("a", EndReason.QUOTA)]
    assert LeaseId("theirs") in lender
    lender.check()


def test_a_turn_larger_than_its_tenants_share_is_refused_without_a_change() -> None:
    lender = holder(tenant_blocks=6, blocks_of_tenants={OTHER: 2})
    lender.lend(loan("a", conversation=None), 0)
    with pytest.raises(OverQuota):
        lender.lend(loan("b", "abcd", conversation=None, first=20), 1)
    with pytest.raises(OverQuota):
        lender.lend(loan("c", conversation=None, first=30)._replace(tenant=OTHER), 1)
    assert lender.lend(loan("d", "a", conversation=None, first=30)._replace(tenant=OTHER), 1)
    assert (len(lender), lender.live_blocks) == (2, 6)
    lender.check()


def test_a_renewal_does_not_pin_again_what_is_over_the_share() -> None:
    lender = holder(tenant_blocks=6)
    lender.lend(loan("a", conversation=None, ttl_ms=1), 0)
    lender.tick(1)
    lender.lend(loan("b", conversation=None, first=20), 2)
    (refused,) = lender.renew(LeaseId("a"), 0, 3)
    assert getattr(refused, "status", None) is RenewStatus.PRESSURE
    lender.check()


def test_a_share_larger_than_that_of_all_is_that_of_all() -> None:
    lender = holder(tenant_blocks=1_000)
    for number in range(4):
        lender.lend(loan(f"l{number}", conversation=None, first=10 * number), number)
    assert lender.live_blocks == 12
    lender.check()


# -- the order itself


def test_uses_without_end_do_not_grow_anything() -> None:
    live = LiveLeases()
    for number in range(3):
        live.add(LeaseId(f"l{number}"), OTHER, ((2 * number, 2 * number + 1),), reads=0, now_ms=0)
    for now_ms in range(10_000):
        live.used(LeaseId("l1"), reads=0, now_ms=now_ms)
    assert len(live._all.entries) < 100
    assert live.cheapest() == live.cheapest(OTHER) == "l0"
    assert live.cheapest(TenantId("nobody")) is None
    live.check()
