"""A client's copy of the leases, rule by rule: what it refuses, when it counts as current, what it answers.

That it follows the registry's table through any history is tested in tests/stateful/test_lease_copy_machine.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from kvlease.registry.errors import Compacted, LimitReached
from kvlease.registry.lease_copy import LeaseCopy
from kvlease.registry.values import (
    ConversationId,
    EngineId,
    Incarnation,
    LeaseEvent,
    LeaseEvents,
    LeaseEventType,
    LeaseId,
    LeaseState,
    LeaseView,
    MissReason,
    TenantId,
)

TENANT, CHAT = TenantId("acme"), ConversationId("chat")


def lease(lease_id: str, *, tokens: int = 64, remaining_ms: int = 1_000, suspect: bool = False) -> LeaseView:
    return LeaseView(
        lease_id=LeaseId(lease_id),
        tenant=TENANT,
        conversation=CHAT,
        engine_id=EngineId("d0"),
        incarnation=Incarnation(b"i" * 16),
        tokens=tokens,
        stride_tokens=64,
        blocks=1,
        size_bytes=1,
        state=LeaseState.LIVE,
        remaining_ms=remaining_ms,
        suspect=suspect,
        api_url="http://d0",
    )


def event(revision: int, view: LeaseView, kind: LeaseEventType = LeaseEventType.PUBLISHED) -> LeaseEvent:
    state = LeaseState.ENDED if kind is LeaseEventType.ENDED else view.state
    return LeaseEvent(revision=revision, type=kind, lease=replace(view, state=state))


def news(revision: int, *events: LeaseEvent, newest: int | None = None) -> LeaseEvents:
    return LeaseEvents(revision=revision, events=events, newest=revision if newest is None else newest)


def listed(copy: LeaseCopy, leases: Sequence[LeaseView], *, revision: int = 10, now_ms: int = 0) -> LeaseCopy:
    gathered = copy.blank()
    for view in leases:
        gathered.put(view, now_ms=now_ms)
    copy.replace(gathered, revision=revision, asked_ms=now_ms)
    return copy


def names(copy: LeaseCopy) -> list[str]:
    copy.check()
    return sorted(view.lease_id for view in copy.leases(now_ms=0))


def test_before_the_first_list_nothing_is_known() -> None:
    copy = LeaseCopy()
    assert (copy.revision, copy.staleness_ms(5), len(copy)) == (None, None, 0)
    with pytest.raises(Compacted):
        copy.apply(news(3), now_ms=0)
    with pytest.raises(Compacted):
        copy.resume(news(0), now_ms=0)


@pytest.mark.parametrize("revision", [9, 11])
def test_a_watch_that_starts_elsewhere_is_refused(revision: int) -> None:
    copy = listed(LeaseCopy(), [lease("a")])
    with pytest.raises(Compacted):
        copy.resume(news(revision, event(revision, lease("b"))), now_ms=0)
    assert (copy.revision, names(copy)) == (10, ["a"])
    copy.resume(news(10), now_ms=0)


def test_another_history_is_refused() -> None:
    copy = listed(LeaseCopy(), [lease("a")])
    copy.apply(news(12, event(12, lease("b"))), now_ms=0)
    with pytest.raises(Compacted):
        copy.apply(news(11, event(11, lease("c"))), now_ms=0)
    assert (copy.revision, names(copy)) == (12, ["a", "b"])


def test_a_repeated_event_is_left_out() -> None:
    copy = listed(LeaseCopy(), [lease("a")])
    end = event(11, lease("a"), LeaseEventType.ENDED)
    again = event(10, lease("a"))
    copy.apply(news(11, again, end), now_ms=0)
    copy.apply(news(12, again, end, event(12, lease("b"))), now_ms=0)
    assert (names(copy), copy.events) == (["b"], 2)


def test_staleness_is_the_time_since_the_copy_was_all_there_is() -> None:
    copy = listed(LeaseCopy(), [], now_ms=100)
    assert copy.staleness_ms(150) == 50
    copy.apply(news(11, event(11, lease("a")), newest=13), now_ms=200)
    assert copy.staleness_ms(200) == 100, "two events are still on their way"
    copy.apply(news(13, newest=13), now_ms=230)
    assert (copy.staleness_ms(230), copy.staleness_ms(1_230)) == (0, 1_000)
    copy.apply(LeaseEvents(revision=13), now_ms=2_000)
    assert copy.staleness_ms(2_000) == 0, "a registry that does not say counts as read to its end"


def test_more_than_the_limit_is_refused_and_less_fits_again() -> None:
    copy = listed(LeaseCopy(limit=2), [lease("a"), lease("b")])
    with pytest.raises(LimitReached):
        copy.apply(news(11, event(11, lease("c"))), now_ms=0)
    assert (copy.revision, names(copy)) == (10, ["a", "b"]), "refused without a trace"
    copy.apply(news(12, event(11, lease("a"), LeaseEventType.ENDED), event(12, lease("c"))), now_ms=0)
    assert names(copy) == ["b", "c"]
    copy.apply(news(13, event(13, lease("b", tokens=128), LeaseEventType.RENEWED)), now_ms=0)
    assert names(copy) == ["b", "c"], "what is there does not count twice"


def test_the_longest_lease_is_located_then_the_one_with_the_longest_time_left() -> None:
    copy = listed(LeaseCopy(), [lease("a"), lease("b", tokens=128), lease("c", tokens=128, remaining_ms=2_000)])
    located = copy.locate(TENANT, CHAT, now_ms=300)
    assert located.lease == replace(lease("c", tokens=128), remaining_ms=1_700)
    assert (located.conversation, located.api_url) == (CHAT, "http://d0")
    assert copy.locate(TenantId("other"), CHAT, now_ms=0).reason is MissReason.UNKNOWN


def test_a_silent_lender_is_not_answered() -> None:
    copy = listed(LeaseCopy(), [lease("a"), lease("b", tokens=128)])
    copy.apply(news(11, event(11, lease("b", tokens=128, suspect=True), LeaseEventType.SUSPECT)), now_ms=0)
    assert located_id(copy) == "a"
    copy.apply(news(12, event(12, lease("a", suspect=True), LeaseEventType.SUSPECT)), now_ms=0)
    assert copy.locate(TENANT, CHAT, now_ms=0).reason is MissReason.SUSPECT
    copy.apply(news(13, event(13, lease("b", tokens=128), LeaseEventType.RESTORED)), now_ms=0)
    assert located_id(copy) == "b"


def test_a_lease_past_its_deadline_counts_as_lapsed_until_news_comes() -> None:
    copy = listed(LeaseCopy(), [lease("a", remaining_ms=1_000)])
    states = [copy.locate(TENANT, CHAT, now_ms=at).lease for at in (999, 1_000)]
    assert [view.state for view in states if view is not None] == [LeaseState.LIVE, LeaseState.LAPSED]
    copy.apply(news(11, event(11, lease("a", remaining_ms=500), LeaseEventType.RENEWED)), now_ms=1_200)
    renewed = copy.locate(TENANT, CHAT, now_ms=1_300).lease
    assert renewed is not None
    assert (renewed.state, renewed.remaining_ms) == (LeaseState.LIVE, 400)


def located_id(copy: LeaseCopy) -> str | None:
    found = copy.locate(TENANT, CHAT, now_ms=0).lease
    return found.lease_id if found is not None else None
