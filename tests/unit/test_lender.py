"""The lease holder: the order of its effects, and what becomes of each lease.

The order is the contract (break before touch), so effects are compared as lists. Limits and renewals have their own
file; against a model pool the holder is driven by `tests/stateful/test_lender_machine.py`.
"""

from __future__ import annotations

import pytest
from kvlease.connector.lender import LAPSES_PER_TICK
from kvlease.connector.lender_effects import Announce, AnnounceLapsed, BreakSeal, Free, Pin, Unpin
from kvlease.connector.loan import Loan, LoanRefused
from kvlease.connector.record import decode
from kvlease.connector.seal import slot_offset
from kvlease.registry.values import EndReason, LeaseId, LeaseState, OnDeadline, TenantId

from tests.unit.lender_story import TTL_MS, chain, ends, holder, kinds, loan, seal

# -- lending


def test_a_loan_pins_then_seals_then_is_told() -> None:
    lender = holder()
    effects = lender.lend(loan("a"), 100)
    assert kinds(effects) == ["Pin", "WriteSeal", "Announce"]
    assert effects[0] == Pin(blocks=(1, 2, 3, 4))
    announced = effects[-1]
    assert isinstance(announced, Announce)
    publication = announced.draft.publication()
    assert (publication.deadline_ms, publication.block_count, publication.size_bytes) == (100 + TTL_MS, 4, 40)
    assert (lender.live_blocks, lender.count(LeaseState.LIVE), lender.count(LeaseState.LAPSED)) == (4, 1, 0)
    lender.check()


def test_the_record_names_each_ranks_seal() -> None:
    effects = holder().lend(loan("a"), 100)
    written, announced = seal(effects), effects[-1]
    assert isinstance(announced, Announce)
    content = decode(announced.draft.publication().record)
    assert [s.value for s in content.seals] == [written.value, written.value]
    assert [s.address for s in content.seals] == [base + slot_offset(written.slot) for base in (4_096, 8_192)]
    assert content.block_ids == ((1, 2, 3, 4),)
    assert content.tokens == 64


def test_a_loan_may_have_a_ttl_of_its_own() -> None:
    lender = holder()
    lender.lend(loan("a", ttl_ms=7), 100)
    assert lender.next_deadline_ms() == 107


@pytest.mark.parametrize(
    "bad",
    [
        loan("b", ""),
        Loan(
            lease_id=LeaseId("b"),
            tenant=TenantId("t"),
            conversation=None,
            chain=chain("a"),
            block_ids=((1, 2, 3),),
            engine_params=b"",
        ),
        Loan(
            lease_id=LeaseId("b"),
            tenant=TenantId("t"),
            conversation=None,
            chain=chain("a"),
            block_ids=(),
            engine_params=b"",
        ),
        loan("a", "abc"),
        loan("b", "abcdefg"),
    ],
    ids=["no stride", "too many blocks", "no group", "held already", "over the limit"],
)
def test_what_cannot_be_lent_is_refused_and_nothing_changes(bad: Loan) -> None:
    lender = holder()
    lender.lend(loan("a"), 100)
    with pytest.raises(LoanRefused):
        lender.lend(bad, 200)
    assert (len(lender), lender.live_blocks, lender.next_deadline_ms()) == (1, 4, 100 + TTL_MS)
    lender.check()


def test_a_slot_that_is_used_again_has_another_value() -> None:
    lender = holder(slots=1)
    seen: set[tuple[int, int]] = set()
    for number in range(20):
        effects = lender.lend(loan(f"l{number}", conversation=None), number)
        written = seal(effects)
        seen.add((written.slot, written.value))
        broken = [effect.slot for effect in effects if isinstance(effect, BreakSeal)]
        assert broken == ([0] if number else []), "the slot's last seal is broken before it is written"
        assert kinds(effects).index("WriteSeal") > max(
            (kinds(effects).index(k) for k in ("BreakSeal",) if broken), default=-1
        )
    assert len({value for _, value in seen}) == 20
    assert 0 not in {value for _, value in seen}


# -- supersede and branch


def test_a_loan_that_goes_on_from_earlier_ones_supersedes_them() -> None:
    lender = holder()
    lender.lend(loan("a", "a"), 100)
    lender.lend(loan("b", "x", first=20), 100)
    effects = lender.lend(loan("c", "ab"), 200)
    assert ends(effects) == [("a", EndReason.SUPERSEDED)]
    assert kinds(effects) == ["Pin", "BreakSeal", "Free", "WriteSeal", "Announce", "AnnounceEnded"], "no gap between"
    assert LeaseId("b") in lender, "a branch lives beside it"
    lender.check()


def test_the_same_tokens_again_supersede_too_and_fewer_do_not() -> None:
    lender = holder()
    lender.lend(loan("a", "ab"), 100)
    assert ends(lender.lend(loan("b", "ab"), 200)) == [("a", EndReason.SUPERSEDED)]
    assert ends(lender.lend(loan("c", "a"), 300)) == []


@pytest.mark.parametrize("conversation", ["other", None])
def test_another_conversation_supersedes_nothing(conversation: str | None) -> None:
    lender = holder()
    lender.lend(loan("a", "a", conversation=conversation), 100)
    assert ends(lender.lend(loan("b", "ab"), 200)) == []
    assert ends(lender.lend(loan("c", "a", conversation=None, first=30), 200)) == []


# -- ends


@pytest.mark.parametrize("reason", list(EndReason))
def test_an_end_breaks_the_seal_before_anything_is_given_back(reason: EndReason) -> None:
    lender = holder()
    written = seal(lender.lend(loan("a"), 100))
    effects = lender.end(LeaseId("a"), reason)
    assert kinds(effects) == ["BreakSeal", "Free", "AnnounceEnded"]
    assert effects[:2] == [BreakSeal(slot=written.slot), Free(blocks=(1, 2, 3, 4))]
    assert ends(effects) == [("a", reason)]
    assert lender.end(LeaseId("a"), reason) == []
    assert (len(lender), lender.live_blocks) == (0, 0)
    lender.check()


def test_an_end_of_a_lapsed_lease_gives_nothing_back_twice() -> None:
    lender = holder()
    lender.lend(loan("a"), 100)
    lender.tick(100 + TTL_MS)
    assert kinds(lender.end(LeaseId("a"), EndReason.RELEASED)) == ["BreakSeal", "AnnounceEnded"]
    lender.check()


def test_all_ends_at_once() -> None:
    lender = holder()
    for number in range(3):
        lender.lend(loan(f"l{number}", conversation=None, first=10 * number), number)
    lender.tick(TTL_MS)  # the first one lapses
    effects = lender.end_all(EndReason.WEIGHTS_CHANGED)
    assert kinds(effects).count("BreakSeal") == 3
    assert kinds(effects).count("Free") == 2
    assert len(lender) == 0
    lender.check()


# -- deadlines


def test_a_deadline_lapses_a_lease_which_stays_readable() -> None:
    lender = holder()
    lender.lend(loan("a"), 100)
    assert lender.tick(100 + TTL_MS - 1) == []
    assert lender.tick(100 + TTL_MS) == [
        Unpin(lease_id=LeaseId("a"), blocks=(1, 2, 3, 4)),
        AnnounceLapsed(lease_id=LeaseId("a")),
    ]
    assert lender.tick(100 + 9 * TTL_MS) == []
    assert (lender.count(LeaseState.LAPSED), lender.live_blocks, lender.next_deadline_ms()) == (1, 0, None)
    lender.check()


def test_a_deadline_ends_a_lease_where_that_is_the_term() -> None:
    lender = holder(on_deadline=OnDeadline.END)
    lender.lend(loan("a"), 100)
    effects = lender.tick(100 + TTL_MS)
    assert kinds(effects) == ["BreakSeal", "Free", "AnnounceEnded"]
    assert ends(effects) == [("a", EndReason.EXPIRED)]


def test_a_mass_expiry_is_spread_over_ticks() -> None:
    lender = holder(slots=100, max_blocks=1_000)
    for number in range(3 * LAPSES_PER_TICK - 1):
        lender.lend(loan(f"l{number}", conversation=None), 100)
    lapsed = [kinds(lender.tick(100 + TTL_MS)).count("Unpin") for _ in range(4)]
    assert lapsed == [LAPSES_PER_TICK, LAPSES_PER_TICK, LAPSES_PER_TICK - 1, 0]
    lender.check()


def test_a_long_lease_lapses_alone_in_its_step() -> None:
    lender = holder(max_blocks=1_000)
    for number in range(3):
        lender.lend(loan(f"l{number}", "ab", first=10 * number, conversation=None), 100)
    assert [kinds(lender.tick(100 + TTL_MS, most_blocks=5)).count("Unpin") for _ in range(3)] == [2, 1, 0]
    lender.check()


def test_everything_lapses_before_a_reset_of_the_engine() -> None:
    lender = holder()
    lender.lend(loan("a", "a"), 100)
    lender.lend(loan("b", "x", first=20), 100)
    assert kinds(lender.lapse_all()) == ["Unpin", "AnnounceLapsed"] * 2
    assert lender.live_blocks == 0
    assert lender.lapse_all() == []
    lender.check()


# -- reuse


def test_the_reuse_of_one_block_ends_every_lapsed_lease_that_lists_it() -> None:
    """Consecutive turns share blocks, and the engine calls back once for each block: every lease must be told."""
    lender = holder()
    first = seal(lender.lend(loan("a", "a", conversation=None), 100))
    second = seal(lender.lend(loan("b", "ab", conversation=None), 100))
    lender.lend(loan("c", "x", first=20, conversation=None), 100)
    lender.lapse_all()
    effects = lender.on_reuse(2)
    assert {effect.slot for effect in effects if isinstance(effect, BreakSeal)} == {first.slot, second.slot}
    assert sorted(ends(effects)) == [("a", EndReason.REUSED), ("b", EndReason.REUSED)]
    assert {"Free", "Pin", "Unpin"}.isdisjoint(kinds(effects)), "the pool must not be called from its own hand-out"
    assert lender.on_reuse(2) == []
    assert LeaseId("c") in lender
    lender.check()


def test_the_reuse_of_any_other_block_is_nobodys_business() -> None:
    lender = holder()
    lender.lend(loan("a"), 100)
    assert lender.on_reuse(1) == [], "live: the engine cannot hand it out, and nobody has asked to be told"
    lender.lapse_all()
    assert lender.on_reuse(99) == []
    lender.check()


def test_a_reuse_under_a_live_lease_breaks_it_and_the_next_tick_gives_back() -> None:
    """It cannot happen while the engine counts references; if it does, no reader may be left with a whole seal."""
    lender = holder()
    lender.lend(loan("a"), 100)
    lender.lapse_all()
    lender.renew(LeaseId("a"), 0, 200)
    assert kinds(lender.on_reuse(1)) == ["BreakSeal", "AnnounceEnded"]
    assert lender.tick(300) == [Free(blocks=(1, 2, 3, 4))]
    assert lender.tick(300) == []
    lender.check()
