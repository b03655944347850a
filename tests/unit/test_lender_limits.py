"""The lease holder's renewals and limits: deadlines move ahead only, and memory that is wanted is given.

What goes first under pressure is part of what users are promised, so the order is asserted, not only the sum.
"""

from __future__ import annotations

from kvlease.connector.lender_effects import Announce, AnnounceLapsed, AnnounceRenewed, RefuseRenewal
from kvlease.registry.values import EndReason, LeaseId, LeaseState, RenewStatus

from tests.unit.lender_story import TTL_MS, ends, holder, kinds, loan

# -- renewal


def test_a_renewal_moves_a_deadline_ahead_and_never_back() -> None:
    lender = holder()
    lender.lend(loan("a"), 100)
    assert lender.next_deadline_ms() == 1_100
    (renewed,) = lender.renew(LeaseId("a"), 5_000, 200)
    assert isinstance(renewed, AnnounceRenewed)
    assert renewed.deadline_ms == lender.next_deadline_ms() == 5_200
    lender.renew(LeaseId("a"), 1, 300)
    assert lender.next_deadline_ms() == 5_200
    assert lender.tick(1_100) == []
    assert kinds(lender.tick(5_200)) == ["Unpin", "AnnounceLapsed"]
    lender.check()


def test_a_renewal_without_a_ttl_gives_the_lenders_own() -> None:
    lender = holder()
    lender.lend(loan("a", ttl_ms=1), 100)
    lender.renew(LeaseId("a"), 0, 100)
    assert lender.next_deadline_ms() == 100 + TTL_MS


def test_a_lapsed_lease_is_pinned_again_by_a_renewal() -> None:
    lender = holder()
    lender.lend(loan("a"), 100)
    lender.tick(1_100)
    effects = lender.renew(LeaseId("a"), 0, 1_200)
    assert kinds(effects) == ["Pin", "AnnounceRenewed"]
    assert (lender.live_blocks, lender.count(LeaseState.LAPSED)) == (4, 0)
    lender.check()
    assert kinds(lender.tick(2_200)) == ["Unpin", "AnnounceLapsed"]
    assert kinds(lender.on_reuse(1)) == ["BreakSeal", "AnnounceEnded"]


def test_a_renewal_that_cannot_be_is_refused_with_its_reason_and_changes_nothing() -> None:
    lender = holder()
    gone, lease = LeaseId("gone"), LeaseId("a")
    assert lender.renew(gone, 0, 1) == [RefuseRenewal(lease_id=gone, status=RenewStatus.ENDED)]
    lender.lend(loan("a", "ab", ttl_ms=1), 100)
    lender.tick(101)
    lender.lend(loan("b", "xyzxyz", first=20), 101)
    assert lender.renew(lease, 0, 102) == [RefuseRenewal(lease_id=lease, status=RenewStatus.PRESSURE)]
    assert (lender.count(LeaseState.LAPSED), lender.live_blocks) == (1, 12)
    lender.check()
    fixed = holder(renewable=False)
    fixed.lend(loan("a"), 100)
    assert fixed.renew(lease, 0, 200) == [RefuseRenewal(lease_id=lease, status=RenewStatus.DISABLED)]
    assert fixed.next_deadline_ms() == 1_100


def test_a_renewal_past_the_longest_lifetime_moves_the_deadline_to_it_and_is_refused() -> None:
    lender, lease = holder(max_lifetime_ms=2_500), LeaseId("a")
    lender.lend(loan("a"), 100)
    assert kinds(lender.renew(lease, 1_000, 1_000)) == ["AnnounceRenewed"], "2 000 is within the lifetime"
    refusal, renewed = lender.renew(lease, 1_000, 1_900)
    assert refusal == RefuseRenewal(lease_id=lease, status=RenewStatus.AT_LIMIT)
    assert isinstance(renewed, AnnounceRenewed)
    assert renewed.deadline_ms == lender.next_deadline_ms() == 2_600
    assert lender.renew(lease, 0, 2_000) == [refusal], "there is nothing left to give"
    assert lender.renew(lease, 600, 2_000) != [refusal], "just up to the limit is no more than was promised"
    lender.check()
    assert kinds(lender.tick(2_600)) == ["Unpin", "AnnounceLapsed"]
    assert lender.renew(lease, 1, 2_600) == [refusal], "it is over and is not pinned again"
    assert (lender.live_blocks, lender.count(LeaseState.LAPSED)) == (0, 1)
    lender.check()


def test_a_lapsed_lease_is_pinned_again_up_to_its_longest_lifetime_only() -> None:
    lender, lease = holder(max_lifetime_ms=1_500), LeaseId("a")
    refusal = RefuseRenewal(lease_id=lease, status=RenewStatus.AT_LIMIT)
    lender.lend(loan("a"), 100)
    lender.tick(1_100)
    assert lender.renew(lease, 0, 1_600) == [refusal]
    assert (lender.live_blocks, lender.next_deadline_ms()) == (0, None), "not pinned with a deadline that has passed"
    assert kinds(lender.renew(lease, 0, 1_599)) == ["RefuseRenewal", "Pin", "AnnounceRenewed"]
    assert (lender.live_blocks, lender.next_deadline_ms()) == (4, 1_600)
    lender.lapse_all()
    assert kinds(lender.renew(lease, 0, 1_599)) == ["RefuseRenewal", "Pin", "AnnounceRenewed"], "its time is not over"
    lender.check()


def test_a_ttl_longer_than_the_longest_lifetime_is_cut_to_it() -> None:
    lender = holder(max_lifetime_ms=700)
    effects = lender.lend(loan("a", ttl_ms=701), 100)
    announced = effects[-1]
    assert isinstance(announced, Announce)
    assert announced.publication.deadline_ms == lender.next_deadline_ms() == 800
    unlimited = holder(max_lifetime_ms=0)
    unlimited.lend(loan("a", ttl_ms=10**9), 100)
    assert unlimited.next_deadline_ms() == 100 + 10**9


def test_one_renewed_lease_and_the_others_end_at_their_own_time() -> None:
    lender = holder(slots=101, max_blocks=1_000)
    for number in range(101):
        lender.lend(loan(f"l{number}", conversation=None), 100)
    lender.renew(LeaseId("l50"), 9_000, 500)
    lapsed = [effect.lease_id for effect in lender.tick(1_100, limit=1_000) if isinstance(effect, AnnounceLapsed)]
    assert len(lapsed) == 100
    assert "l50" not in lapsed
    assert lender.next_deadline_ms() == 9_500


def test_renewing_without_end_does_not_grow_anything() -> None:
    lender = holder()
    lender.lend(loan("a"), 100)
    for now_ms in range(100, 1_100):
        lender.renew(LeaseId("a"), 1, now_ms)
        lender.renew(LeaseId("a"), 5_000, now_ms)
        lender.check()  # which knows how many deadlines there may be
    assert lender.next_deadline_ms() == 6_099


# -- limits and pressure


def test_too_many_blocks_end_the_live_lease_nearest_its_deadline() -> None:
    lender = holder()
    lender.lend(loan("late", conversation=None, ttl_ms=900, first=10), 100)
    lender.lend(loan("soon", conversation=None, ttl_ms=300, first=20), 100)
    lender.lend(loan("last", conversation=None, ttl_ms=999, first=30), 100)
    effects = lender.lend(loan("new", "a", conversation=None, first=40), 200)
    assert ends(effects) == [("soon", EndReason.PRESSURE)]
    assert lender.live_blocks == 10
    lender.check()


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
    assert ends(effects) == [("l1", EndReason.PRESSURE)], "none is lapsed: the one nearest its deadline"
    lender.check()


def test_pressure_takes_no_more_than_is_wanted_and_never_the_lapsed() -> None:
    lender = holder()
    for number, ttl_ms in enumerate((500, 300, 1)):
        lender.lend(loan(f"l{number}", "a", conversation=None, ttl_ms=ttl_ms, first=10 * number), 0)
    lender.tick(1)  # l2 lapses: its blocks are free already
    assert ends(lender.relieve(1)) == [("l1", EndReason.PRESSURE)]
    assert ends(lender.relieve(100)) == [("l0", EndReason.PRESSURE)]
    assert lender.relieve(1) == []
    assert lender.relieve(0) == []
    assert LeaseId("l2") in lender
    lender.check()
