"""Several lease tables on one ordered store, with lenders that move between them: when all is quiet, they agree.

Hypothesis decides who does what and when anything is written, delivered, expired or loaded anew. The judge is the
lenders: after everything has been delivered, each replica must have exactly the leases that connected lenders hold,
the store too, and an end that was acknowledged must never be undone. How a table answers is tested elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kvlease.registry.errors import EngineIdInUse, LenderSilent
from kvlease.registry.table_changes import (
    Batch,
    Changes,
    SessionId,
)
from kvlease.registry.table_ledger import INFERRED
from kvlease.registry.table_limits import TableLimits
from kvlease.registry.values import (
    ConversationId,
    EndOrder,
    EndReason,
    EndScope,
    Engine,
    EngineId,
    Incarnation,
    LeaseFilter,
    LeaseId,
    OnDeadline,
    Publication,
    PublishStatus,
    Record,
    RenewStatus,
)

from tests.stateful.replica_store import Entry, Replica, Store
from tests.unit.table_story import FINGERPRINT, STRIDE, TENANT, chain

REPLICAS = 3
LENDERS = 3
LIMITS = TableLimits(max_branches=4, suspect_after_ms=3_000, session_ttl_ms=60_000)
TTL_MS = 480_000
WHICH_REPLICA = st.integers(0, REPLICAS - 1)
WHICH_LENDER = st.integers(0, LENDERS - 1)
CONVERSATIONS = st.sampled_from(["c0", "c1", None])
TEXTS = st.text(alphabet="ab", min_size=1, max_size=3)
ALL = LeaseFilter()
NO_SESSION = SessionId(0)


@dataclass
class Lender:
    engine: Engine
    clock_ms: int
    held: dict[LeaseId, Publication] = field(default_factory=dict)
    ended: set[LeaseId] = field(default_factory=set)
    at: int | None = None
    session: SessionId = NO_SESSION


class ReplicaMachine(RuleBasedStateMachine):
    """`now_ms` is every replica's clock: that they differ is tested in the simulation."""

    @initialize()
    def start(self) -> None:
        self.now_ms = 1_000
        self.store = Store()
        self.replicas = [Replica(i, self.store, LIMITS) for i in range(REPLICAS)]
        self.runs = 0
        self.made = 0
        self.acknowledged: set[LeaseId] = set()
        self.unstored: set[LeaseId] = set()
        self.ending: list[tuple[Replica, LeaseId, int]] = []
        self.lenders = [self.new_lender(i) for i in range(LENDERS)]
        for i in range(LENDERS):
            self.hello(i, i % REPLICAS)

    def new_lender(self, number: int) -> Lender:
        self.runs += 1
        engine = Engine(
            engine_id=EngineId(f"d{number}"),
            incarnation=Incarnation(self.runs.to_bytes(16, "big")),
            fingerprint=FINGERPRINT,
        )
        return Lender(engine=engine, clock_ms=1_000_000 * self.runs)

    # --- lenders

    @rule(number=WHICH_LENDER, at=WHICH_REPLICA)
    def hello(self, number: int, at: int) -> None:
        """The lender connects, wherever it was before, and presents what it holds."""
        lender, replica = self.lenders[number], self.replicas[at]
        now_lender_ms = self.now_ms + lender.clock_ms
        try:
            session, changes = replica.table.hello(lender.engine, now_lender_ms=now_lender_ms, now_ms=self.now_ms)
        except EngineIdInUse:
            return
        if lender.at is not None and (lender.at, lender.session) != (at, session):
            self.replicas[lender.at].table.disconnect(lender.session)
        lender.at, lender.session = at, session
        self.done(replica, changes)
        results, changes = replica.table.snapshot(session, list(lender.held.values()), last=True, now_ms=self.now_ms)
        for result in results:
            if result.status is not PublishStatus.PUBLISHED:
                lender.held.pop(result.lease_id, None)
        self.done(replica, changes)

    @rule(number=WHICH_LENDER)
    def lose_line(self, number: int) -> None:
        lender = self.lenders[number]
        if lender.at is not None:
            self.replicas[lender.at].table.disconnect(lender.session)
            lender.at = None

    @rule(number=WHICH_LENDER, at=WHICH_REPLICA)
    def restart(self, number: int, at: int) -> None:
        """A crash: the kernel closes the line at once; the new incarnation holds nothing."""
        self.lose_line(number)
        self.lenders[number] = self.new_lender(number)
        self.hello(number, at)

    @rule(number=WHICH_LENDER, text=TEXTS, conversation=CONVERSATIONS)
    def publish(self, number: int, text: str, conversation: str | None) -> None:
        lender = self.lenders[number]
        if lender.at is None:
            return
        self.made += 1
        lease = Publication(
            lease_id=LeaseId(f"l{self.made}"),
            tenant=TENANT,
            conversation=ConversationId(conversation) if conversation else None,
            stride_tokens=STRIDE,
            block_count=1,
            size_bytes=10,
            deadline_ms=self.now_ms + lender.clock_ms + TTL_MS,
            on_deadline=OnDeadline.LAPSE,
            fingerprint_hash=FINGERPRINT.hash,
            record=Record(digests=chain(text), body=b"body"),
        )
        replica = self.replicas[lender.at]
        lender.held[lease.lease_id] = lease
        results, changes = replica.table.publish(lender.session, [lease], now_ms=self.now_ms)
        if results[0].status is not PublishStatus.PUBLISHED:
            lender.held.pop(lease.lease_id, None)
        self.done(replica, changes)

    @rule(number=WHICH_LENDER, which=st.integers(0, 9))
    def let_go(self, number: int, which: int) -> None:
        """The lender ends one of its leases, whether or not it is connected."""
        lender = self.lenders[number]
        if lender.held:
            lease_id = sorted(lender.held)[which % len(lender.held)]
            self.lender_ends(lender, lease_id, EndReason.PRESSURE)

    @rule(number=WHICH_LENDER, which=st.integers(0, 9))
    def renew(self, number: int, which: int) -> None:
        lender = self.lenders[number]
        if not lender.held:
            return
        lease_id = sorted(lender.held)[which % len(lender.held)]
        deadline_ms = self.now_ms + lender.clock_ms + TTL_MS
        lender.held[lease_id] = replace(lender.held[lease_id], deadline_ms=deadline_ms)
        if lender.at is not None:
            replica = self.replicas[lender.at]
            self.done(replica, replica.table.renewed(lender.session, [(lease_id, deadline_ms)], now_ms=self.now_ms))

    # --- callers

    @rule(at=WHICH_REPLICA, which=st.integers(0, 9))
    def end(self, at: int, which: int) -> None:
        replica = self.replicas[at]
        leases, _ = replica.table.list_leases(ALL, limit=100, now_ms=self.now_ms)
        if leases:
            lease = leases[which % len(leases)]
            order = EndOrder(
                tenant=lease.tenant, scope=EndScope.LEASE, target=lease.lease_id, reason=EndReason.RELEASED
            )
            ended, _, changes = replica.table.end(order, now_ms=self.now_ms)
            assert ended == 1
            self.ending.append((replica, lease.lease_id, len(replica.queue) + len(changes.stored)))
            self.done(replica, changes)

    @rule(at=WHICH_REPLICA, which=st.integers(0, 9))
    def ask_renewal(self, at: int, which: int) -> None:
        replica = self.replicas[at]
        leases, _ = replica.table.list_leases(ALL, limit=100, now_ms=self.now_ms)
        if leases:
            lease = leases[which % len(leases)]
            try:
                _, changes = replica.table.ask_renewal(TENANT, lease.lease_id, ttl_ms=TTL_MS, now_ms=self.now_ms)
            except LenderSilent:
                return
            self.done(replica, changes)

    # --- store and time

    @rule(at=WHICH_REPLICA, count=st.integers(1, 6))
    def write(self, at: int, count: int) -> None:
        replica = self.replicas[at]
        changes = tuple(replica.queue.popleft() for _ in range(min(count, len(replica.queue))))
        if changes:
            self.store.commit(at, changes)
        left: list[tuple[Replica, LeaseId, int]] = []
        for who, lease_id, position in self.ending:
            place = position - len(changes) if who is replica else position
            if place <= 0:
                self.acknowledged.add(lease_id)
            else:
                left.append((who, lease_id, place))
        self.ending = left

    @rule(at=WHICH_REPLICA, count=st.integers(1, 6))
    def deliver(self, at: int, count: int) -> None:
        replica = self.replicas[at]
        for _ in range(count):
            if replica.behind():
                entry = self.store.log[replica.seen]
                replica.seen += 1
                batch = replace(entry.batch, own=entry.writer == at)
                self.done(replica, replica.table.apply(batch, now_ms=self.now_ms))

    @rule(at=WHICH_REPLICA)
    def load(self, at: int) -> None:
        """The store's history was compacted before this replica had read it."""
        replica = self.replicas[at]
        replica.seen = len(self.store.log)
        view = self.store.view(at)
        self.done(replica, replica.table.replace(view, list(replica.queue), now_ms=self.now_ms))

    @rule(number=WHICH_LENDER, text=TEXTS, at=WHICH_REPLICA, which=st.integers(0, 9))
    def end_and_kill_all(self, number: int, text: str, at: int, which: int) -> None:
        """Every replica dies in the instant in which one has stored an end, which nobody hears of."""
        replica, home = self.replicas[at], self.lenders[number].at
        if home is not None:  # that there be something to end
            self.publish(number, text, None)
            self.write(home, len(self.replicas[home].queue))
        self.deliver(at, len(self.store.log))
        leases, _ = replica.table.list_leases(ALL, limit=100, now_ms=self.now_ms)
        if leases:
            lease = leases[which % len(leases)]
            order = EndOrder(tenant=TENANT, scope=EndScope.LEASE, target=lease.lease_id, reason=EndReason.RELEASED)
            _, _, changes = replica.table.end(order, now_ms=self.now_ms)
            replica.queue.extend(changes.stored)
            self.write(at, len(replica.queue))
            self.acknowledged.add(lease.lease_id)
        self.kill_all()

    @rule()
    def kill_all(self) -> None:
        """Every replica dies, with what it had yet to write; new ones know what is in the store and nothing else."""
        for lender in self.lenders:
            lender.at = None
        self.replicas = [Replica(i, self.store, LIMITS) for i in range(REPLICAS)]
        self.ending = []
        self.acknowledged -= self.unstored  # known to replicas only, since the store lost its history
        for at in range(REPLICAS):
            self.load(at)

    @rule(number=WHICH_LENDER)
    def expire(self, number: int) -> None:
        self.store.expire(EngineId(f"d{number}"))

    @rule()
    def save(self) -> None:
        self.store.save()

    @precondition(lambda self: self.store.log)
    @rule()
    def lose_history(self) -> None:
        """The store goes back to a snapshot, an empty one if none was taken: every replica has to load."""
        self.store.restore()
        self.unstored = self.acknowledged - set(self.store.owed)
        for at in range(REPLICAS):
            self.load(at)

    @rule(at=WHICH_REPLICA)
    def beat(self, at: int) -> None:
        self.store.log.append(Entry(at, Batch(beats=self.replicas[at].table.beats(now_ms=self.now_ms))))

    @rule(step_ms=st.sampled_from([10, 700]))
    def wait(self, step_ms: int) -> None:
        """Lenders that are connected are heard; so none is lost in this test."""
        self.now_ms += step_ms
        for lender in self.lenders:
            if lender.at is not None:
                self.replicas[lender.at].table.heartbeat(
                    lender.session,
                    now_lender_ms=self.now_ms + lender.clock_ms,
                    free_blocks=1,
                    total_blocks=2,
                    now_ms=self.now_ms,
                )
        for replica in self.replicas:
            self.settle(replica)

    def settle(self, replica: Replica) -> None:
        while (wake_ms := replica.table.next_wake_ms()) is not None and wake_ms <= self.now_ms:
            self.done(replica, replica.table.tick(self.now_ms))

    # --- what comes of it

    def done(self, replica: Replica, changes: Changes) -> None:
        """Queue what is to be written; pass on to the lenders what is for them."""
        replica.table.check()
        replica.queue.extend(changes.stored)
        for closed in changes.closed:
            for lender in self.lenders:
                if (lender.at, lender.session) == (replica.number, closed.session):
                    lender.at = None
        for push in changes.ends:
            assert push.reason not in INFERRED, "a lender was told that it is lost"
            for lender in self.lenders:
                if (lender.at, lender.session) == (replica.number, push.session):
                    self.lender_ends(lender, push.lease_id, push.reason)
        for renewal in changes.renewals:
            for lender in self.lenders:
                if (lender.at, lender.session) == (replica.number, renewal.session):
                    answer = replica.table.refuse_renewal(
                        lender.session, renewal.lease_id, RenewStatus.DISABLED, now_ms=self.now_ms
                    )
                    self.done(replica, answer)

    def lender_ends(self, lender: Lender, lease_id: LeaseId, reason: EndReason) -> None:
        lender.held.pop(lease_id, None)
        lender.ended.add(lease_id)
        if lender.at is not None:
            replica = self.replicas[lender.at]
            self.done(replica, replica.table.ended(lender.session, [(lease_id, reason)], now_ms=self.now_ms))

    def teardown(self) -> None:
        if not hasattr(self, "lenders"):
            return
        for _ in range(4):  # as long as somebody finds his session replaced, he comes back
            self.rest()
            self.now_ms += 5_000  # homes that are gone are known to be
            self.wait(0)
            for i, lender in enumerate(self.lenders):
                if lender.at is None:
                    self.hello(i, i % REPLICAS)
        self.rest()
        self.judge()
        self.store.expire_dead({x.engine.incarnation for x in self.lenders})
        self.rest()
        self.judge()
        held = {lease_id for x in self.lenders for lease_id in x.held}
        assert set(self.store.leases) == held, "the store"
        lenders = {x.engine.engine_id: x.engine.incarnation for x in self.lenders}
        owed = [k for k, x in self.store.owed.items() if lenders[x.engine_id] == x.incarnation]
        assert not owed, "ends that their lenders have confirmed"
        assert {k: put.engine.incarnation for k, (_, put) in self.store.engines.items()} == lenders
        for lender in self.lenders:
            for lease_id, publication in lender.held.items():
                assert self.store.leases[lease_id].publication.deadline_ms == publication.deadline_ms

    def judge(self) -> None:
        """Every replica has just what the lenders hold."""
        held = {lease_id for x in self.lenders for lease_id in x.held}
        assert all(x.at is not None for x in self.lenders)
        for replica in self.replicas:
            leases, _ = replica.table.list_leases(ALL, limit=10_000, now_ms=self.now_ms)
            assert {x.lease_id for x in leases} == held, f"replica {replica.number}"
            assert not held & self.acknowledged, "an end was undone"

    def rest(self) -> None:
        """Everything is written and delivered, until nothing is left to do."""
        for _ in range(100):
            self.wait(1)
            for at in range(REPLICAS):
                self.write(at, 1_000)
            for at in range(REPLICAS):
                self.beat(at)
            for at in range(REPLICAS):
                self.deliver(at, 10_000)
            if not any(x.queue or x.behind() for x in self.replicas):
                return
        raise AssertionError("the replicas do not come to rest")


TestReplicas = ReplicaMachine.TestCase
TestReplicas.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
