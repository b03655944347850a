"""The lease table against a model that is a plain dict and looks at every lease each time it is asked.

Hypothesis invents the commands. The model knows nothing of indexes, generations or bounded ticks; after each command
the table's own `check` must hold, and whatever is asked must be answered as the model answers it. Time moves in steps
that are settled at once: what holds between a due time and its tick is in tests/unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvlease.registry.table_limits import TableLimits
from kvlease.registry.values import (
    EndReason,
    EndScope,
    Hit,
    LeaseFilter,
    LeaseState,
    Miss,
    MissReason,
    OnDeadline,
    Publication,
    PublishStatus,
    TenantId,
    common_strides,
)

from tests.unit.table_story import Lender, Story, chain

LIMITS = TableLimits(max_branches=3, suspect_after_ms=3_000, session_ttl_ms=9_000)
IDS = st.sampled_from([f"l{i}" for i in range(8)])
TEXTS = st.text(alphabet="ab", min_size=1, max_size=4)
TENANTS = st.sampled_from([TenantId("t0"), TenantId("t0"), TenantId("t1")])
CONVERSATIONS = st.sampled_from(["c0", "c0", "c1", None])
ENGINES = st.sampled_from(["d0", "d1"])
TTLS = st.sampled_from([0, 500, 2_000, 20_000])
INFERRED = {EndReason.EXPIRED, EndReason.LENDER_LOST}


@dataclass
class Held:
    """A lease in the model; deadlines and uses are on the table's clock."""

    publication: Publication
    engine: str
    deadline_ms: int
    used_ms: int

    @property
    def text(self) -> bytes:
        return self.publication.record.digests


class TableMachine(RuleBasedStateMachine):
    """`held` and `ended` are the model; `story` holds the table."""

    @initialize(texts=st.lists(TEXTS, min_size=2, max_size=4))
    def start(self, texts: list[str]) -> None:
        self.story = Story(LIMITS)
        self.held: dict[str, Held] = {}
        self.ended: dict[str, tuple[TenantId, EndReason]] = {}
        self.lenders: dict[str, Lender] = {}
        self.heard_ms: dict[str, int] = {}
        self.incarnations = 0
        for engine in ("d0", "d1"):
            self.arrive(engine)
        for i, text in enumerate(texts):
            self.publish(f"d{i % 2}", f"l{i}", text, TenantId("t0"), f"c{i // 2}", 20_000, OnDeadline.LAPSE)

    # --- lenders

    @precondition(lambda self: len(self.lenders) < 2)
    @rule(engine=ENGINES)
    def arrive(self, engine: str) -> None:
        if engine not in self.lenders:
            self.incarnations += 1
            incarnation = self.incarnations.to_bytes(16, "big")
            clock_ms = 7_000 * self.incarnations
            self.lenders[engine] = self.story.lender(engine, incarnation=incarnation, clock_ms=clock_ms)
            self.heard_ms[engine] = self.story.now_ms

    @rule(engine=ENGINES, lost=st.sets(IDS), split=st.booleans())
    def reconnect(self, engine: str, lost: set[str], split: bool) -> None:
        """The lender lets some leases go while it is away, and presents the rest; also what it did not know ended."""
        lender = self.lenders.get(engine)
        if lender is None:
            return
        self.story.table.disconnect(lender.session)
        lender.hello()
        self.heard_ms[engine] = self.story.now_ms
        self.story.settle()
        mine = {i: x for i, x in self.held.items() if x.engine == engine}
        presented = [self._as_presented(lender, x) for i, x in mine.items() if i not in lost]
        if split:
            lender.snapshot(*presented[:1], last=False)
            presented = presented[1:]
        assert all(x.status is PublishStatus.PUBLISHED for x in lender.snapshot(*presented))
        for lease_id in lost & mine.keys():
            self._end(lease_id, EndReason.LENDER_LOST)
        self.story.settle()

    @rule(engine=ENGINES)
    def beat(self, engine: str) -> None:
        if engine in self.lenders:
            self.lenders[engine].heartbeat()
            self.heard_ms[engine] = self.story.now_ms

    @rule(engine=ENGINES)
    def leave(self, engine: str) -> None:
        if engine in self.lenders:
            lender = self.lenders.pop(engine)
            self.story.heard(self.story.table.goodbye(lender.session))
            self.story.settle()
            for lease_id in [i for i, x in self.held.items() if x.engine == engine]:
                self._end(lease_id, EndReason.DRAINED)

    # --- leases

    @rule(
        engine=ENGINES,
        lease_id=IDS,
        text=TEXTS,
        tenant=TENANTS,
        conversation=CONVERSATIONS,
        ttl_ms=TTLS,
        on_deadline=st.sampled_from(OnDeadline),
    )
    def publish(
        self,
        engine: str,
        lease_id: str,
        text: str,
        tenant: TenantId,
        conversation: str | None,
        ttl_ms: int,
        on_deadline: OnDeadline,
    ) -> None:
        lender = self.lenders.get(engine)
        if lender is None:
            return
        lease = lender.lease(
            lease_id, text, tenant=tenant, conversation=conversation, ttl_ms=ttl_ms, on_deadline=on_deadline
        )
        (result,) = lender.publish(lease)
        self.story.settle()
        known = self.held.get(lease_id)
        if known is not None:
            same = known.engine == engine and _content(known.publication) == _content(lease)
            assert result.status is (PublishStatus.PUBLISHED if same else PublishStatus.CONFLICT)
            return
        if lease_id in self.ended or (ttl_ms == 0 and on_deadline is OnDeadline.END):
            assert result.status is PublishStatus.ENDED
            return
        assert result.status is PublishStatus.PUBLISHED
        branches = self._branches(tenant, conversation)
        covered = [i for i in branches if lease.record.digests.startswith(self.held[i].text)]
        assert result.superseded == tuple(covered)
        for covered_id in covered:
            self._end(covered_id, EndReason.SUPERSEDED)
        crowd = [i for i in branches if i not in covered]
        while len(crowd) >= LIMITS.max_branches:
            oldest = min(crowd, key=lambda i: self.held[i].used_ms)
            crowd.remove(oldest)
            self._end(oldest, EndReason.PRESSURE)
        now_ms = self.story.now_ms
        self.held[lease_id] = Held(lease, engine, deadline_ms=now_ms + ttl_ms, used_ms=now_ms)

    @rule(engine=ENGINES, lease_id=IDS, reason=st.sampled_from([EndReason.PRESSURE, EndReason.REUSED]))
    def lender_ends(self, engine: str, lease_id: str, reason: EndReason) -> None:
        lender = self.lenders.get(engine)
        if lender is None:
            return
        lender.ended(lease_id, reason)
        known = self.held.get(lease_id)
        if known is None:
            self.ended.setdefault(lease_id, (TenantId(""), reason))
        elif known.engine == engine:
            self._end(lease_id, reason)

    @rule(engine=ENGINES, lease_id=IDS, ttl_ms=TTLS)
    def lender_renews(self, engine: str, lease_id: str, ttl_ms: int) -> None:
        lender, known = self.lenders.get(engine), self.held.get(lease_id)
        if lender is None:
            return
        lender.renewed(lease_id, ttl_ms=ttl_ms)
        self.story.settle()
        if known is not None and known.engine == engine:
            known.deadline_ms = self.story.now_ms + ttl_ms
            self._expire()

    @rule(tenant=TENANTS, scope=st.sampled_from(EndScope), aim=st.one_of(IDS, CONVERSATIONS, ENGINES))
    def end(self, tenant: TenantId, scope: EndScope, aim: str | None) -> None:
        if aim is None:
            return
        aimed = [i for i, x in self.held.items() if self._is_aimed_at(i, x, tenant, scope, aim)]
        assert self.story.end(scope, aim, tenant=tenant) == len(aimed)
        for lease_id in aimed:
            self._end(lease_id, EndReason.RELEASED)

    # --- time

    @rule(duration_ms=st.sampled_from([100, 500, 1_000, 2_500, 9_000]))
    def wait(self, duration_ms: int) -> None:
        self.story.wait(duration_ms)
        now_ms = self.story.now_ms
        for engine in [e for e in self.lenders if now_ms - self.heard_ms[e] >= LIMITS.session_ttl_ms]:
            del self.lenders[engine]
            for lease_id in [i for i, x in self.held.items() if x.engine == engine]:
                self._end(lease_id, EndReason.LENDER_LOST)
        self._expire()
        for text in ("a", "b", "ab", "ba"):  # what time changes shows in what is found
            self.resolve_by_prefix(TenantId("t0"), text)

    # --- questions

    @rule(tenant=TENANTS, text=TEXTS)
    def resolve_by_prefix(self, tenant: TenantId, text: str) -> None:
        answer = self.story.resolve(text, tenant=tenant)
        common = {
            i: n
            for i, x in self.held.items()
            if x.publication.tenant == tenant and (n := common_strides(x.text, chain(text)))
        }
        good = [(n, self._left_ms(i), i) for i, n in common.items() if not self._suspect(i)]
        if not good:
            reason = MissReason.SUSPECT if common else MissReason.UNKNOWN
            assert answer == Miss(reason=reason)
            return
        assert isinstance(answer, Hit)
        assert (answer.matched_strides, answer.remaining_ms) == max(good)[:2]
        self._used(answer)

    @rule(tenant=TENANTS, lease_id=IDS)
    def resolve_by_lease(self, tenant: TenantId, lease_id: str) -> None:
        answer = self.story.resolve(lease=lease_id, tenant=tenant)
        known = self.held.get(lease_id)
        if known is not None and known.publication.tenant == tenant:
            if self._suspect(lease_id):
                assert answer == Miss(reason=MissReason.SUSPECT)
            else:
                assert isinstance(answer, Hit)
                assert answer.lease_id == lease_id
                self._used(answer)
            return
        ended = self.ended.get(lease_id)
        if ended is not None and ended[0] == tenant:
            assert answer == Miss(reason=MissReason.ENDED, end_reason=ended[1])
        else:
            assert answer == Miss(reason=MissReason.UNKNOWN)

    @rule(tenant=TENANTS, conversation=CONVERSATIONS)
    def resolve_by_conversation(self, tenant: TenantId, conversation: str | None) -> None:
        if conversation is None:
            return
        answer = self.story.resolve(conversation=conversation, tenant=tenant)
        branches = self._branches(tenant, conversation)
        good = [(len(self.held[i].text), self._left_ms(i)) for i in branches if not self._suspect(i)]
        if not good:
            assert answer == Miss(reason=MissReason.SUSPECT if branches else MissReason.UNKNOWN)
            return
        assert isinstance(answer, Hit)
        assert (len(answer.record.digests), answer.remaining_ms) == max(good)
        self._used(answer)

    @invariant()
    def same_leases(self) -> None:
        self.story.table.check()
        views, after = self.story.table.list_leases(LeaseFilter(), limit=99, now_ms=self.story.now_ms)
        assert after is None
        listed = {x.lease_id: (x.tenant, x.engine_id, x.remaining_ms, x.state, x.suspect) for x in views}
        assert listed == {
            i: (x.publication.tenant, x.engine, self._left_ms(i), self._state(i), self._suspect(i))
            for i, x in self.held.items()
        }
        pinned = sum(tally.live_blocks for _, _, tally in self.story.table.tallies())
        assert pinned == sum(x.publication.block_count for i, x in self.held.items() if self._left_ms(i) > 0)

    # --- the model's own steps

    def _end(self, lease_id: str, reason: EndReason) -> None:
        self.ended.setdefault(lease_id, (self.held.pop(lease_id).publication.tenant, reason))

    def _expire(self) -> None:
        for lease_id in list(self.held):
            if self.held[lease_id].publication.on_deadline is OnDeadline.END and self._left_ms(lease_id) <= 0:
                self._end(lease_id, EndReason.EXPIRED)

    def _is_aimed_at(self, lease_id: str, held: Held, tenant: TenantId, scope: EndScope, aim: str) -> bool:
        mine = held.publication.tenant == tenant
        match scope:
            case EndScope.LEASE:
                return mine and lease_id == aim
            case EndScope.CONVERSATION:
                return mine and held.publication.conversation == aim
            case EndScope.ENGINE:
                return held.engine == aim
            case EndScope.TENANT:
                return mine

    def _state(self, lease_id: str) -> LeaseState:
        return LeaseState.LIVE if self._left_ms(lease_id) > 0 else LeaseState.LAPSED

    def _left_ms(self, lease_id: str) -> int:
        return self.held[lease_id].deadline_ms - self.story.now_ms

    def _suspect(self, lease_id: str) -> bool:
        return self.story.now_ms - self.heard_ms[self.held[lease_id].engine] >= LIMITS.suspect_after_ms

    def _branches(self, tenant: TenantId, conversation: str | None) -> list[str]:
        if conversation is None:
            return []
        return [
            i
            for i, x in self.held.items()
            if x.publication.tenant == tenant and x.publication.conversation == conversation
        ]

    def _used(self, answer: Hit) -> None:
        known = self.held[answer.lease_id]
        assert answer.record == known.publication.record
        assert answer.engine_id == known.engine
        assert answer.state is self._state(answer.lease_id)
        known.used_ms = self.story.now_ms

    def _as_presented(self, lender: Lender, held: Held) -> Publication:
        return replace(
            held.publication,
            deadline_ms=held.deadline_ms + lender.clock_ms,
            lapsed=held.deadline_ms <= self.story.now_ms,
        )


def _content(lease: Publication) -> Publication:
    return replace(lease, deadline_ms=0, lapsed=False)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
