"""The lease holder's renewals: deadlines move ahead only, on request or, in an elastic lender, unasked.

What goes when memory is wanted has its own file, `test_lender_pressure.py`.
"""

from __future__ import annotations

import pytest
from kvlease.connector.lender_effects import Announce, AnnounceLapsed, AnnounceRenewed, RefuseRenewal
from kvlease.registry.values import EndReason, LeaseId, LeaseState, OnDeadline, RenewStatus

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
    assert announced.draft.deadline_ms == lender.next_deadline_ms() == 800
    unlimited = holder(max_lifetime_ms=0)
    unlimited.lend(loan("a", ttl_ms=10**9), 100)
    assert unlimited.next_deadline_ms() == 100 + 10**9


def test_one_renewed_lease_and_the_others_end_at_their_own_time() -> None:
    lender = holder(slots=101, max_blocks=1_000)
    for number in range(101):
        lender.lend(loan(f"l{number}", conversation=None), 100)
    lender.renew(LeaseId("l50"), 9_000, 500)
    lapsed = [
        effect.lease_id
        for effect in lender.tick(1_100, limit=1_000, most_blocks=10_000)
        if isinstance(effect, AnnounceLapsed)
    ]
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


# -- promised by another thread, since an idle engine takes no step


def test_a_promise_changes_nothing_until_it_is_kept() -> None:
    lender, lease = holder(), LeaseId("a")
    lender.lend(loan("a"), 100)
    assert lender.promise(lease, 5_000, 200) == 5_200
    assert lender.promise(lease, 1, 200) == 1_100, "never back"
    assert lender.next_deadline_ms() == 1_100
    assert lender.keep_promise(lease, 5_200, 9_999) == [], "it was told when it was promised"
    assert lender.next_deadline_ms() == 5_200
    assert lender.keep_promise(lease, 1_100, 9_999) == []
    assert lender.next_deadline_ms() == 5_200
    lender.check()


def test_what_moves_blocks_or_may_be_refused_is_not_promised() -> None:
    lender, lease = holder(max_lifetime_ms=2_000), LeaseId("a")
    lender.lend(loan("a"), 0)
    assert lender.promise(lease, 2_001, 0) is None, "past its longest lifetime"
    assert lender.promise(lease, 2_000, 0) == 2_000
    lender.tick(1_000)
    assert lender.promise(lease, 0, 1_000) is None, "lapsed"
    assert lender.promise(LeaseId("gone"), 0, 0) is RenewStatus.ENDED
    fixed = holder(renewable=False)
    fixed.lend(loan("a"), 0)
    assert fixed.promise(lease, 0, 0) is RenewStatus.DISABLED


def test_a_promise_outlives_the_lapse_and_not_the_end_of_its_lease() -> None:
    lender, lease = holder(), LeaseId("a")
    lender.lend(loan("a"), 0)
    promised = lender.promise(lease, 0, 999)
    assert promised == 1_999
    lender.tick(1_000)  # on its way when the lease lapsed
    assert kinds(lender.keep_promise(lease, promised, 1_001)) == ["Pin", "AnnounceRenewed"]
    assert lender.next_deadline_ms() == 1_999
    lender.lapse_all()
    assert lender.keep_promise(lease, promised, 1_999) == [], "too late to pin again"
    lender.end(lease, EndReason.RELEASED)
    assert lender.keep_promise(lease, 9_999, 2_000) == []
    lender.check()


# -- elastic: the lender renews by itself


def elastic(**changes: object) -> dict[str, object]:
    return {"self_renewing": True, "renewable": False, "keep_free_blocks": 4, "max_lifetime_ms": 2_500, **changes}


def test_a_lease_renews_itself_before_its_deadline_while_blocks_are_free() -> None:
    lender = holder(**elastic())
    lender.lend(loan("a"), 0)
    assert lender.tick(749, free_blocks=99) == []
    (renewed,) = lender.tick(750, free_blocks=5)
    assert isinstance(renewed, AnnounceRenewed)
    assert renewed.deadline_ms == 1_750
    lender.check()


def test_it_is_renewed_up_to_its_longest_lifetime_and_then_meets_its_deadline() -> None:
    lender = holder(**elastic())
    lender.lend(loan("a"), 0)
    deadlines = []
    for now_ms in range(0, 2_500, 50):
        deadlines += [x.deadline_ms for x in lender.tick(now_ms, free_blocks=99) if isinstance(x, AnnounceRenewed)]
        lender.check()
    assert deadlines == [1_750, 2_500]
    assert kinds(lender.tick(2_500, free_blocks=99)) == ["Unpin", "AnnounceLapsed"]


def test_no_lease_renews_itself_while_blocks_are_few() -> None:
    lender = holder(**elastic())
    lender.lend(loan("a"), 0)
    assert lender.tick(750, free_blocks=4) == []
    assert lender.tick(999, free_blocks=4) == []
    lender.check()
    assert kinds(lender.tick(1_000, free_blocks=4)) == ["Unpin", "AnnounceLapsed"]


def test_blocks_that_are_free_again_at_the_deadline_save_the_lease() -> None:
    lender = holder(**elastic())
    lender.lend(loan("a"), 0)
    assert lender.tick(750, free_blocks=0) == []
    assert kinds(lender.tick(1_000, free_blocks=9)) == ["AnnounceRenewed"]


def test_a_turn_with_a_ttl_of_its_own_is_not_renewed_unasked() -> None:
    lender = holder(**elastic())
    lender.lend(loan("a", ttl_ms=600), 0)
    assert lender.tick(599, free_blocks=99) == []
    assert kinds(lender.tick(600, free_blocks=99)) == ["Unpin", "AnnounceLapsed"]


@pytest.mark.parametrize("on_deadline", list(OnDeadline))
def test_a_lease_at_its_limit_does_not_keep_those_behind_it_from_renewing(on_deadline: OnDeadline) -> None:
    lender = holder(**elastic(max_lifetime_ms=1_000, on_deadline=on_deadline))
    lender.lend(loan("old"), 0)
    lender.lend(loan("young", conversation=None, first=20), 1)
    assert lender.tick(750, free_blocks=99) == [], "neither may live longer than its ttl"
    longer = holder(**elastic(max_lifetime_ms=1_100, on_deadline=on_deadline))
    longer.lend(loan("old"), 0)
    longer.lend(loan("young", conversation=None, first=20), 300)
    assert [x.lease_id for x in longer.tick(750, free_blocks=99) if isinstance(x, AnnounceRenewed)] == ["old"]
    effects = longer.tick(1_100, free_blocks=99)
    assert [x.lease_id for x in effects if isinstance(x, AnnounceRenewed)] == ["young"]
    assert LeaseId("young") in longer
    assert longer.live_blocks == 4
    assert ends(effects) == ([("old", EndReason.EXPIRED)] if on_deadline is OnDeadline.END else [])
    longer.check()
