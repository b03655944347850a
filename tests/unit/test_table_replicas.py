"""What a replica makes of what others wrote, rule by rule; that all of them together converge is in tests/stateful.

Two stories side by side, with the batches between them passed on by hand.
"""

from __future__ import annotations

from kvlease.registry.errors import SessionReplaced
from kvlease.registry.table_changes import (
    Batch,
    Changes,
    EngineGone,
    EnginePut,
    LeaseGone,
    LeasePut,
    RenewalAsked,
    RenewalRefused,
    StoredEngine,
    StoredView,
)
from kvlease.registry.table_limits import TableLimits
from kvlease.registry.values import EndReason, EndScope, LeaseId, Miss, MissReason, RenewStatus

from tests.unit.table_story import TENANT, TTL_MS, Lender, Story, with_deadline

FIRST = LeaseId("first")


def put_of(lender: Lender) -> EnginePut:
    return EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms)


def take(story: Story, *changes: object, own: bool = False, expired: bool = False) -> Changes:
    """Deliver a batch."""
    batch = Batch(changes=tuple(changes), own=own, expired=expired)  # type: ignore[arg-type]
    return story.heard(story.table.apply(batch, now_ms=story.now_ms))


def pair() -> tuple[Story, Lender, Story]:
    """A home with a lender that lends `first`, and another replica that knows of it."""
    home = Story()
    lender = home.lender("d-1")
    lender.lend(FIRST, "abc")
    lease = home.last.stored
    other = Story()
    take(home, put_of(lender), own=True)
    take(other, put_of(lender), *lease)
    other.table.apply(Batch(beats=home.table.beats(now_ms=home.now_ms)), now_ms=other.now_ms)
    return home, lender, other


def test_a_copy_answers_as_its_home() -> None:
    home, _, other = pair()
    assert home.resolve("abc") == other.resolve("abc")


def test_a_copy_writes_nothing_of_its_own_accord() -> None:
    _, _, other = pair()
    stored = []
    for _ in range(4):
        other.wait(TTL_MS)
        stored += [*other.last.stored]
    assert not stored
    answer = other.resolve("abc")
    assert isinstance(answer, Miss)
    assert answer.reason is MissReason.SUSPECT


def test_an_end_at_a_copy_is_carried_out_and_written_again_by_its_home() -> None:
    home, _, other = pair()
    other.end(EndScope.LEASE, FIRST)
    gone = LeaseGone(lease_id=FIRST, reason=EndReason.RELEASED)
    assert other.last.stored[-1] == gone
    done = take(home, *other.last.stored)
    assert [push.lease_id for push in done.ends] == [FIRST]
    assert done.stored == (gone,)


def test_keys_that_expire_are_written_again_by_their_home() -> None:
    home, lender, other = pair()
    gone = EngineGone(engine_id=lender.engine.engine_id, incarnation=lender.engine.incarnation)
    lost = LeaseGone(lease_id=FIRST, reason=EndReason.LENDER_LOST)
    done = take(home, gone, lost, expired=True)
    assert not done.ends
    assert home.found("abc") == FIRST
    assert {type(x) for x in done.stored} == {EnginePut, LeasePut}
    assert not take(other, gone, lost, expired=True).stored
    other.settle()
    assert other.found("abc") is None


def test_a_late_write_of_an_old_home_is_corrected() -> None:
    home, lender, _ = pair()
    now = lender.lease(FIRST, "abc")
    lender.renewed(FIRST, ttl_ms=2 * TTL_MS)
    renewed = home.last.stored
    engine = lender.engine
    late = LeasePut(engine_id=engine.engine_id, incarnation=engine.incarnation, publication=now)
    assert take(home, late).stored == renewed
    unknown = LeasePut(
        engine_id=engine.engine_id, incarnation=engine.incarnation, publication=lender.lease("never", "xyz")
    )
    assert take(home, unknown).stored == (LeaseGone(lease_id=LeaseId("never"), reason=EndReason.LENDER_LOST),)
    assert not take(home, *renewed).stored, "what is right is not written again"


def test_an_end_is_for_good_also_where_the_store_forgot_it() -> None:
    home, lender, other = pair()
    other.end(EndScope.LEASE, FIRST)
    engine = lender.engine
    again = LeasePut(engine_id=engine.engine_id, incarnation=engine.incarnation, publication=lender.lease(FIRST, "abc"))
    assert take(other, again).stored == (LeaseGone(lease_id=FIRST, reason=EndReason.RELEASED),)
    assert other.found("abc") is None
    assert home.found("abc") == FIRST


def test_the_newest_session_is_the_home_by_the_stores_order() -> None:
    home, lender, other = pair()
    elsewhere = Lender(other, "d-1", b"i", lender.clock_ms)
    elsewhere.hello()
    early = take(other, put_of(lender))
    assert not early.closed, "what came before our own hello is older than it"
    take(other, put_of(elsewhere), own=True)
    assert [x.session for x in take(home, put_of(elsewhere)).closed] == [lender.session]
    assert [x.session for x in take(other, put_of(lender)).closed] == [elsewhere.session], "and now it is newer"


def test_a_new_incarnation_elsewhere_fences_the_old_one_here() -> None:
    home, lender, other = pair()
    other.wait(TableLimits().home_silent_ms)
    restarted = Lender(other, "d-1", b"j", 77)
    restarted.hello()
    done = take(home, *other.last.stored)
    assert [x.session for x in done.closed] == [lender.session]
    assert not done.stored
    home.settle()
    assert home.found("abc") is None
    assert home.table.list_engines(now_ms=home.now_ms)[0].engine.incarnation == restarted.engine.incarnation


def test_a_renewal_goes_to_the_home_and_back() -> None:
    home, lender, other = pair()
    settled, asked = other.table.ask_renewal(TENANT, FIRST, ttl_ms=9_000_000, now_ms=other.now_ms)
    assert settled is None
    assert asked.stored == (RenewalAsked(lease_id=FIRST, ttl_ms=9_000_000),)
    pushed = take(home, *asked.stored)
    assert [x.session for x in pushed.renewals] == [lender.session]
    lender.renewed(FIRST, ttl_ms=9_000_000)
    answer = take(other, *home.last.stored)
    assert [(x.status, x.remaining_ms) for x in answer.settled] == [(RenewStatus.RENEWED, 9_000_000)]

    _, asked = other.table.ask_renewal(TENANT, FIRST, ttl_ms=99_000_000, now_ms=other.now_ms)
    take(home, *asked.stored)
    refused = home.table.refuse_renewal(lender.session, FIRST, RenewStatus.AT_LIMIT, now_ms=home.now_ms)
    assert refused.stored == (RenewalRefused(lease_id=FIRST, status=RenewStatus.AT_LIMIT, remaining_ms=9_000_000),)
    answer = take(other, *refused.stored)
    assert [x.status for x in answer.settled] == [RenewStatus.AT_LIMIT]


def test_a_cold_replica_is_silent_until_the_home_has_spoken() -> None:
    home, lender, _ = pair()
    lease = lender.lease(FIRST, "abc")
    engine = lender.engine
    view = StoredView(
        engines=(StoredEngine(put=put_of(lender), own=False),),
        leases=(LeasePut(engine_id=engine.engine_id, incarnation=engine.incarnation, publication=lease),),
    )
    cold = Story()
    assert not cold.heard(cold.table.replace(view, (), now_ms=cold.now_ms)).stored
    answer = cold.resolve("abc")
    assert isinstance(answer, Miss)
    assert answer.reason is MissReason.SUSPECT
    cold.table.apply(Batch(beats=home.table.beats(now_ms=home.now_ms)), now_ms=cold.now_ms)
    assert cold.found("abc") == FIRST


def test_after_a_time_without_a_store_nobody_is_lost_at_once() -> None:
    home, lender, _ = pair()
    home.now_ms += 10 * home.table.limits.session_ttl_ms
    home.table.forgive(now_ms=home.now_ms)
    home.settle()
    assert not home.ends()
    lender.hello()
    lender.snapshot(lender.lease(FIRST, "abc"))
    assert home.found("abc") == FIRST
    home.table.disconnect(lender.session)
    home.wait(home.table.limits.session_ttl_ms)
    assert home.ends() == {FIRST: EndReason.LENDER_LOST}


def test_a_load_makes_the_store_right_about_our_own() -> None:
    home, lender, _ = pair()
    engine = lender.engine
    stale = with_deadline(lender.lease(FIRST, "abc"), 1)
    junk = lender.lease("junk", "xyz")
    view = StoredView(
        engines=(StoredEngine(put=put_of(lender), own=True),),
        leases=tuple(
            LeasePut(engine_id=engine.engine_id, incarnation=engine.incarnation, publication=x) for x in (stale, junk)
        ),
    )
    done = home.heard(home.table.replace(view, (), now_ms=home.now_ms))
    assert {(type(x), getattr(x, "lease_id", None)) for x in done.stored} == {
        (LeasePut, None),
        (LeaseGone, LeaseId("junk")),
    }
    everything = home.heard(home.table.replace(StoredView(), (), now_ms=home.now_ms))
    assert [type(x) for x in everything.stored] == [EnginePut, LeasePut]


def test_a_hello_that_was_held_up_elsewhere_takes_no_session_away() -> None:
    """The lender gave up a replica that hung, and came here; what that one writes then is overtaken, and told so."""
    home, lender, _ = pair()
    held_up = EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms - 1)
    done = take(home, held_up)
    assert not done.closed
    assert done.stored == (put_of(lender),)
    other = Story()
    take(other, held_up, own=True)
    take(other, *done.stored)
    assert not other.table.beats(now_ms=other.now_ms)


def test_a_later_hello_elsewhere_does_take_it_away() -> None:
    home, lender, _ = pair()
    done = take(home, EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms + 1))
    assert [type(x.error) for x in done.closed] == [SessionReplaced]
    assert not done.stored


def test_a_home_says_again_when_it_had_its_hello_not_when_it_says_so() -> None:
    """Or its word would seem later than that of the replica to which the lender has gone since."""
    home, lender, _ = pair()
    first = put_of(lender)
    home.wait(5_000)
    gone = EngineGone(engine_id=lender.engine.engine_id, incarnation=lender.engine.incarnation)
    assert take(home, gone, expired=True).stored[0] == first


def test_two_hellos_that_the_store_made_one_of_are_both_confirmed() -> None:
    """Or a home would wait for ever for the other, and take nobody else's word about its engine."""
    home, lender, _ = pair()
    lender.hello()
    lender.hello()
    lender.snapshot()
    take(home, put_of(lender), own=True)
    done = take(home, EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms + 1))
    assert [type(x.error) for x in done.closed] == [SessionReplaced]


def test_what_was_withdrawn_when_the_home_moved_is_the_new_homes_business() -> None:
    """Ended here and not in the store, it would come back from there, and nobody would clear it away any more."""
    home, lender, _ = pair()
    lender.hello()
    lender.snapshot()
    take(home, put_of(lender), own=True)
    elsewhere = EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms + 1)
    take(home, elsewhere)
    home.settle()
    assert home.found("abc") == FIRST
    home.wait(2)
    lender.hello()
    lender.snapshot()
    home.settle()
    gone = LeaseGone(lease_id=FIRST, reason=EndReason.LENDER_LOST)
    assert gone in home.last.stored


def test_what_expired_together_with_its_engine_is_written_again_once() -> None:
    home, lender, _ = pair()
    gone = EngineGone(engine_id=lender.engine.engine_id, incarnation=lender.engine.incarnation)
    lost = LeaseGone(lease_id=FIRST, reason=EndReason.LENDER_LOST)
    stored = take(home, gone, lost, expired=True).stored
    assert [type(x) for x in stored] == [EnginePut, LeasePut]
    stored = take(home, lost, expired=True).stored
    assert [type(x) for x in stored] == [LeasePut]


def test_a_lease_whose_engine_was_not_beside_it_in_the_store_is_written_again_after_its_engine() -> None:
    """Whoever loaded then has passed it over, and would know of it only by hearing of it again."""
    home, lender, other = pair()
    lease = LeasePut(
        engine_id=lender.engine.engine_id,
        incarnation=lender.engine.incarnation,
        publication=lender.lease(FIRST, "abc"),
    )
    without_engine = StoredView(leases=(lease,))
    other.heard(other.table.replace(without_engine, (), now_ms=other.now_ms))
    assert other.found("abc") is None
    done = home.heard(home.table.replace(without_engine, (), now_ms=home.now_ms))
    assert [type(x) for x in done.stored] == [EnginePut, LeasePut]
    take(other, *done.stored)
    other.table.apply(Batch(beats=home.table.beats(now_ms=home.now_ms)), now_ms=other.now_ms)
    assert other.found("abc") == FIRST


def test_what_we_took_out_of_the_store_does_not_stay_a_copy_because_its_engine_came_here_meanwhile() -> None:
    """Its lender said hello here and left before it had presented anything: no other home would take it out."""
    home, lender, _ = pair()
    lender.hello()
    take(home, put_of(lender), own=True)
    gone = LeaseGone(lease_id=FIRST, reason=EndReason.LENDER_LOST)
    assert not take(home, gone, own=True).stored
    take(home, EnginePut(engine=lender.engine, now_lender_ms=lender.now_ms + 1))
    assert home.found("abc") is None
    assert home.ends() == {FIRST: EndReason.LENDER_LOST}


def test_what_we_took_out_of_the_store_is_written_again_if_its_engine_has_presented_it_here_meanwhile() -> None:
    home, lender, _ = pair()
    lender.hello()
    lender.snapshot(lender.lease(FIRST, "abc"))
    gone = LeaseGone(lease_id=FIRST, reason=EndReason.LENDER_LOST)
    assert [type(x) for x in take(home, gone, own=True).stored] == [LeasePut]
    assert home.found("abc") == FIRST
