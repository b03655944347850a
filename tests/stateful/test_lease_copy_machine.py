"""A client's copy of the leases against the table itself: lists, watches, gaps and repeats in any order.

The table's events reach the copy through a line that a rule may cut, repeat or hold back. After a list, or once all
that was held back has come, the copy must say what the table says. The model is the table: it has tests of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvlease.registry.lease_copy import LeaseCopy
from kvlease.registry.values import (
    ConversationId,
    EndReason,
    EndScope,
    LeaseEvent,
    LeaseEvents,
    LeaseFilter,
    LeaseView,
    Located,
    OnDeadline,
)

from tests.unit.table_story import TENANT, Lender, Story

WANTED = LeaseFilter(tenant=TENANT)
CONVERSATIONS = ("a", "b")
TEXTS = st.text("xy", min_size=1, max_size=4)
SILENT_MS = 10_000
LOST_MS = 60_000
LONG_MS = 480_000
MANY = 1_000


def same(located: Located) -> tuple[object, ...]:
    """What must be equal however late the news was; which of two equally long leases is answered may differ."""
    if located.lease is None:
        return (located.reason,)
    return located.conversation, located.lease.tokens, located.lease.state


class CopyMachine(RuleBasedStateMachine):
    """A table, two lenders, a copy."""

    @initialize()
    def start(self) -> None:
        self.story = Story()
        self.lenders = [self.story.lender(name) for name in ("d0", "d1")]
        self.copy = LeaseCopy()
        self.number = 0

    # --- what happens to the table

    @rule(
        which=st.integers(0, 1),
        text=TEXTS,
        conversation=st.sampled_from(CONVERSATIONS),
        ttl_ms=st.sampled_from((500, LONG_MS)),
        on_deadline=st.sampled_from(OnDeadline),
    )
    def lend(self, which: int, text: str, conversation: str, ttl_ms: int, on_deadline: OnDeadline) -> None:
        self.number += 1
        lender = self._lender(which)
        lender.publish(
            lender.lease(f"l{self.number}", text, conversation=conversation, ttl_ms=ttl_ms, on_deadline=on_deadline)
        )

    @precondition(lambda self: self.number)
    @rule(data=st.data(), which=st.integers(0, 1))
    def renew(self, data: st.DataObject, which: int) -> None:
        self._lender(which).renewed(f"l{data.draw(st.integers(1, self.number))}")

    @precondition(lambda self: self.number)
    @rule(data=st.data(), which=st.integers(0, 1))
    def end(self, data: st.DataObject, which: int) -> None:
        self._lender(which).ended(f"l{data.draw(st.integers(1, self.number))}", EndReason.REUSED)

    @rule(conversation=st.sampled_from(CONVERSATIONS))
    def release(self, conversation: str) -> None:
        self.story.end(EndScope.CONVERSATION, conversation)

    @rule(duration_ms=st.sampled_from((10, 700, SILENT_MS, LOST_MS)), alive=st.sets(st.integers(0, 1)))
    def time_passes(self, duration_ms: int, alive: set[int]) -> None:
        self.story.wait(duration_ms)
        for which in alive:
            self._lender(which).heartbeat()

    # --- what reaches the copy

    @rule()
    def list_again(self) -> None:
        """Whatever was on the way is void; what ended unseen must be gone."""
        now_ms = self.story.now_ms
        views, rest = self.story.table.list_leases(WANTED, limit=MANY, now_ms=now_ms)
        assert rest is None
        leases = self.copy.blank()
        for view in views:
            leases.put(view, now_ms=now_ms)
        self.copy.replace(leases, revision=self.story.table.revision, asked_ms=now_ms)
        self.agree()
        for name in CONVERSATIONS:
            told = self.copy.locate(TENANT, ConversationId(name), now_ms=now_ms)
            best = self.story.table.locate(TENANT, ConversationId(name), (), now_ms=now_ms).lease
            if best is None:
                assert told.lease is None
            else:
                assert told.lease in views, "a lease is copied in full"
                assert (told.lease.tokens, told.lease.remaining_ms) == (best.tokens, best.remaining_ms)
                assert told.api_url == told.lease.api_url == f"http://{told.lease.engine_id}"

    @precondition(lambda self: self.copy.revision is not None)
    @rule(count=st.integers(0, 3), again=st.integers(0, 2))
    def deliver(self, count: int, again: int) -> None:
        """The next `count` events, after `again` that were delivered before."""
        revision = self.copy.revision
        assert revision is not None
        new = [event for event in self.story.events if event.revision > revision]
        old = [event for event in self.story.events if event.revision <= revision][-again:] if again else []
        before = self.copy.events
        self._hand_over([*old, *new[:count]])
        assert self.copy.events - before == len(new[:count]), "an event was applied twice, or not at all"

    @precondition(lambda self: self.copy.revision is not None)
    @rule()
    def catch_up(self) -> None:
        revision = self.copy.revision
        assert revision is not None
        self._hand_over([event for event in self.story.events if event.revision > revision])
        assert self.copy.staleness_ms(self.story.now_ms) == 0
        self.agree()

    @invariant()
    def whole(self) -> None:
        self.copy.check()

    def agree(self) -> None:
        """The table at rest and the copy, lease by lease and answer by answer."""
        now_ms = self.story.now_ms
        views, _ = self.story.table.list_leases(WANTED, limit=MANY, now_ms=now_ms)
        assert ids(self.copy.leases(now_ms=now_ms)) == ids(views)
        for name in CONVERSATIONS:
            conversation = ConversationId(name)
            told = self.copy.locate(TENANT, conversation, now_ms=now_ms)
            assert same(told) == same(self.story.table.locate(TENANT, conversation, (), now_ms=now_ms))

    def _hand_over(self, events: Sequence[LeaseEvent]) -> None:
        revision = max([self.copy.revision or 0, *(event.revision for event in events)])
        news = LeaseEvents(revision=revision, events=tuple(events), newest=self.story.table.revision)
        self.copy.apply(news, now_ms=self.story.now_ms)

    def _lender(self, which: int) -> Lender:
        """With a session; one that was lost comes back with nothing."""
        lender = self.lenders[which]
        if all(status.engine != lender.engine for status in self.story.table.list_engines(now_ms=self.story.now_ms)):
            self.number += 1
            engine_id = lender.engine.engine_id
            lender = self.lenders[which] = self.story.lender(engine_id, incarnation=b"%d" % self.number)
        return lender


def ids(leases: Sequence[LeaseView]) -> list[str]:
    return sorted(lease.lease_id for lease in leases)


CopyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeaseCopy = CopyMachine.TestCase
