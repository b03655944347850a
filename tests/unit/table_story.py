"""A lease table with a clock that tests turn by hand, and lenders with clocks of their own: what table tests tell.

No expectations here. Every command is followed by the table's own `check`, so each test also tests the indexes.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from kvlease.registry.table import LeaseTable
from kvlease.registry.table_changes import Changes, EndOwed, SessionId
from kvlease.registry.table_limits import TableLimits
from kvlease.registry.values import (
    DIGEST_BYTES,
    ConversationId,
    EndOrder,
    EndReason,
    EndScope,
    Engine,
    EngineId,
    Fingerprint,
    Hit,
    Incarnation,
    LeaseEvent,
    LeaseId,
    Miss,
    OnDeadline,
    Publication,
    PublishResult,
    Record,
    ResolveQuery,
    TenantId,
)

TTL_MS = 480_000
STRIDE = 64
TENANT = TenantId("acme")
FINGERPRINT = Fingerprint(hash=b"f" * 16, fields=(("kv_dtype", "fp16"),))


def chain(text: str) -> bytes:
    """A digest chain with one stride a letter: texts with a common prefix have chains with a common prefix."""
    return b"".join(blake2b(text[: i + 1].encode(), digest_size=DIGEST_BYTES).digest() for i in range(len(text)))


class Story:
    """One table. `now_ms` is its clock; events are kept as they come."""

    def __init__(self, limits: TableLimits | None = None) -> None:
        self.table = LeaseTable(limits)
        self.now_ms = 1_000
        self.events: list[LeaseEvent] = []
        self.last = Changes()

    def heard(self, changes: Changes) -> Changes:
        self.table.check()
        self.events.extend(changes.events)
        self.last = changes
        return changes

    def lender(self, engine_id: str, *, incarnation: bytes = b"i", clock_ms: int = 5_000_000) -> Lender:
        """A lender with an open session and nothing held; its clock is `clock_ms` ahead of the table's."""
        lender = Lender(self, engine_id, incarnation, clock_ms)
        lender.hello()
        lender.snapshot()
        return lender

    def wait(self, duration_ms: int) -> None:
        """Time passes, and everything that is due is done."""
        self.now_ms += duration_ms
        self.settle()

    def settle(self) -> int:
        """Tick until nothing is due; how many ticks it took."""
        ticks = 0
        while (wake_ms := self.table.next_wake_ms()) is not None and wake_ms <= self.now_ms:
            self.heard(self.table.tick(self.now_ms))
            ticks += 1
            assert ticks < 10_000, "the table never comes to rest"
        return ticks

    def resolve(
        self,
        text: str = "",
        *,
        tenant: TenantId = TENANT,
        lease: str | None = None,
        conversation: str | None = None,
        fingerprint: bytes = b"",
    ) -> Hit | Miss:
        query = ResolveQuery(
            tenant=tenant,
            lease_id=LeaseId(lease) if lease else None,
            conversation=ConversationId(conversation) if conversation else None,
            digests=chain(text),
            stride_tokens=STRIDE,
            fingerprint_hash=fingerprint,
        )
        answer = self.table.resolve(query, now_ms=self.now_ms)
        self.table.check()
        return answer

    def found(self, text: str = "", *, lease: str | None = None, conversation: str | None = None) -> str | None:
        """The id of the lease that is answered, None for a miss."""
        answer = self.resolve(text, lease=lease, conversation=conversation)
        return answer.lease_id if isinstance(answer, Hit) else None

    def end(
        self,
        scope: EndScope,
        target: str = "",
        *,
        tenant: TenantId = TENANT,
        reason: EndReason = EndReason.RELEASED,
    ) -> int:
        order = EndOrder(tenant=tenant, scope=scope, target=target, reason=reason)
        ended, more = 0, True
        while more:
            count, more, changes = self.table.end(order, now_ms=self.now_ms)
            self.heard(changes)
            ended += count
        return ended

    def ends(self) -> dict[str, EndReason]:
        """Why each ended lease ended, from the events."""
        return {e.lease.lease_id: e.lease.end_reason for e in self.events if e.lease.end_reason is not None}


class Lender:
    """A lender as the table sees it."""

    def __init__(self, story: Story, engine_id: str, incarnation: bytes, clock_ms: int) -> None:
        self.story = story
        self.engine = Engine(
            engine_id=EngineId(engine_id),
            incarnation=Incarnation(incarnation.ljust(16, b".")),
            api_url=f"http://{engine_id}",
            fingerprint=FINGERPRINT,
        )
        self.clock_ms = clock_ms
        self.session = SessionId(0)

    @property
    def now_ms(self) -> int:
        return self.story.now_ms + self.clock_ms

    def hello(self) -> None:
        self.session, changes = self.story.table.hello(self.engine, now_lender_ms=self.now_ms, now_ms=self.story.now_ms)
        self.story.heard(changes)

    def heartbeat(self, *, late_ms: int = 0) -> None:
        self.story.table.heartbeat(
            self.session,
            now_lender_ms=self.now_ms - late_ms,
            free_blocks=7,
            total_blocks=9,
            now_ms=self.story.now_ms,
        )
        self.story.settle()

    def snapshot(self, *leases: Publication, last: bool = True) -> list[PublishResult]:
        results, changes = self.story.table.snapshot(self.session, leases, last=last, now_ms=self.story.now_ms)
        self.story.heard(changes)
        return results

    def lease(
        self,
        lease_id: str,
        text: str,
        *,
        conversation: str | None = "chat",
        tenant: TenantId = TENANT,
        ttl_ms: int = TTL_MS,
        on_deadline: OnDeadline = OnDeadline.LAPSE,
        blocks: int = 2,
    ) -> Publication:
        return Publication(
            lease_id=LeaseId(lease_id),
            tenant=tenant,
            conversation=ConversationId(conversation) if conversation is not None else None,
            stride_tokens=STRIDE,
            block_count=blocks,
            size_bytes=1_000,
            deadline_ms=self.now_ms + ttl_ms,
            on_deadline=on_deadline,
            fingerprint_hash=FINGERPRINT.hash,
            record=Record(digests=chain(text), body=lease_id.encode()),
        )

    def publish(self, *leases: Publication) -> list[PublishResult]:
        results, changes = self.story.table.publish(self.session, leases, now_ms=self.story.now_ms)
        self.story.heard(changes)
        return results

    def lend(
        self, lease_id: str, text: str, *, conversation: str | None = "chat", ttl_ms: int = TTL_MS
    ) -> PublishResult:
        """Publish one lease with the usual terms."""
        (result,) = self.publish(self.lease(lease_id, text, conversation=conversation, ttl_ms=ttl_ms))
        return result

    def ended(self, lease_id: str, reason: EndReason = EndReason.PRESSURE) -> None:
        changes = self.story.table.ended(self.session, [(LeaseId(lease_id), reason)], now_ms=self.story.now_ms)
        self.story.heard(changes)

    def renewed(self, lease_id: str, *, ttl_ms: int = TTL_MS) -> None:
        deadline_ms = self.now_ms + ttl_ms
        changes = self.story.table.renewed(self.session, [(LeaseId(lease_id), deadline_ms)], now_ms=self.story.now_ms)
        self.story.heard(changes)


def with_deadline(lease: Publication, deadline_ms: int) -> Publication:
    return replace(lease, deadline_ms=deadline_ms)


def owed_to(lender: Lender, lease_id: str, *, ttl_ms: int = TableLimits().owed_end_ttl_ms) -> EndOwed:
    """An end that somebody asked for and that this lender has yet to confirm."""
    engine = lender.engine
    return EndOwed(
        lease_id=LeaseId(lease_id),
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        reason=EndReason.RELEASED,
        ttl_ms=ttl_ms,
    )
