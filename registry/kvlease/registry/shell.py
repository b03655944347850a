"""The registry as one asyncio object: the table, its clock, its store, and everyone who waits for it.

No gRPC and no metrics here. Reads are plain calls. Writes change the table at once, with no `await` between check and
change, and return when the change has been carried out (`committer.py` has the order of duties).
Opened and closed by `async with`; its tasks are committer and ticker. Shutdown order: watches, ticker, committer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, NoReturn, Self

from kvlease.registry.clock import Clock
from kvlease.registry.committer import MAX_TOGETHER, Committer
from kvlease.registry.errors import LenderSilent, RegistryUnavailable
from kvlease.registry.outbox import Outbox
from kvlease.registry.replica import MAX_STALENESS_MS, Replica
from kvlease.registry.service import LeasePage
from kvlease.registry.store import Store
from kvlease.registry.table import LeaseTable
from kvlease.registry.table_changes import Changes, RenewalSettled, SessionId
from kvlease.registry.table_leases import Tally
from kvlease.registry.table_search import Found
from kvlease.registry.values import (
    Alias,
    ConversationId,
    EndOrder,
    EndReason,
    Engine,
    EngineId,
    EngineStatus,
    Incarnation,
    LeaseFilter,
    LeaseId,
    Located,
    Miss,
    Publication,
    PublishResult,
    RenewResult,
    RenewStatus,
    ResolveQuery,
    TenantId,
)
from kvlease.registry.watch import EventLog, Watch

TICK_S: Final = 0.1
"""Between two looks at the clock. Reads do not depend on it; watchers and lenders hear of an expiry this late."""
TICK_PAUSE_S: Final = 0.001
"""Between two ticks while much is due, so that others get their turn."""
RENEWAL_SLACK_S: Final = 1.0
"""On top of the table's own wait for a lender, in case the ticker is late."""


class RegistryShell:
    """A `RegistryService` over one table."""

    def __init__(
        self,
        table: LeaseTable,
        store: Store,
        clock: Clock,
        *,
        max_watchers: int,
        keep_events: int,
        max_staleness_ms: int = MAX_STALENESS_MS,
        on_touch: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`on_touch` hears when a shared store answers this registry as it should, and when not."""
        self._table: Final = table
        self._clock: Final = clock
        self._committer: Final = Committer(store, self._deliver)
        self._replica: Final = Replica(
            table,
            store,
            clock,
            self._committer,
            max_staleness_ms=max_staleness_ms,
            on_current=self._current,
            on_touch=self._touch,
        )
        self._shared: Final = store.shared
        self._on_touch: Final = on_touch
        self._events: Final = EventLog(table.revision, keep=keep_events, max_watchers=max_watchers)
        self._outboxes: dict[SessionId, Outbox] = {}
        self._renewing: dict[LeaseId, set[asyncio.Future[RenewalSettled]]] = {}
        self._tasks: Final = asyncio.TaskGroup()
        self._running: list[asyncio.Task[NoReturn]] = []
        self._going_away = False
        self._left = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._running = [
            self._tasks.create_task(self._committer.run(), name="kvlease committer"),
            self._tasks.create_task(self._tick(), name="kvlease ticker"),
        ]
        if self._shared:
            self._running.append(self._tasks.create_task(self._replica.follow(), name="kvlease replica"))
            self._running.append(self._tasks.create_task(self._replica.beat(), name="kvlease beat"))
            self._running.append(self._tasks.create_task(self._replica.look(), name="kvlease staleness"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._events.close()
        for task in reversed(self._running):
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    @property
    def sessions(self) -> int:
        return len(self._outboxes)

    @property
    def watchers(self) -> int:
        return self._events.watchers

    @property
    def staleness_ms(self) -> int | None:
        """At most so old is what is answered here; None: nothing is, because the store has not been read yet."""
        return self._replica.staleness_ms

    @property
    def suspects(self) -> int:
        """Lenders that are silent now."""
        return sum(1 for x in self._table.list_engines(now_ms=self._clock.now_ms()) if x.suspect)

    def tallies(self) -> list[tuple[EngineId, TenantId, Tally]]:
        """How much each engine lends to each tenant."""
        return self._table.tallies()

    def owner(self, lease_id: LeaseId) -> TenantId | None:
        """Whose lease this is, for the log; None if it is not held."""
        return self._table.owner(lease_id)

    def go_away(self) -> None:
        """Take no more sessions, tell lenders to connect elsewhere, end watches. Everything else goes on."""
        self._going_away = True
        for outbox in self._outboxes.values():
            outbox.go_elsewhere()
        self._events.close()

    async def all_left(self, *, wait_s: float) -> bool:
        """Wait until no lender has a session any more; whether that was so within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while self._outboxes:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True

    # --- reads

    def resolve(self, queries: Sequence[ResolveQuery]) -> list[Found | Miss]:
        """For each prompt the best lease, or why there is none. Use them up before the next `await`.

        Together, because what a batch shares is most of a resolve's cost. Raises InvalidRequest; RegistryUnavailable,
        as all reads do, if this replica is not current.
        """
        self._replica.check()
        return self._table.find(queries, now_ms=self._clock.now_ms())

    def locate(self, tenant: TenantId, conversation: ConversationId | None, aliases: Sequence[Alias]) -> Located:
        """Where a conversation's KV is."""
        self._replica.check()
        return self._table.locate(tenant, conversation, aliases, now_ms=self._clock.now_ms())

    def list_leases(self, wanted: LeaseFilter, *, after: LeaseId | None, limit: int) -> LeasePage:
        """Leases in order of their ids; a page may be short and not the last."""
        self._replica.check()
        # The log's revision: what is in the table and not yet in the log will come as events.
        revision = self._events.revision
        leases, more = self._table.list_leases(wanted, after=after, limit=limit, now_ms=self._clock.now_ms())
        return LeasePage(leases=leases, revision=revision, after=more)

    def list_engines(self) -> Sequence[EngineStatus]:
        """Every engine that has not departed, by id."""
        self._replica.check()
        return self._table.list_engines(now_ms=self._clock.now_ms())

    def watch(self, wanted: LeaseFilter, from_revision: int) -> Watch:
        """Events after `from_revision` (0: from now on). Raises Compacted, LimitReached, RegistryUnavailable."""
        self._replica.check()
        if self._going_away:
            raise RegistryUnavailable("this registry is going away")
        return self._events.watch(wanted, from_revision, current=lambda: self._replica.current)

    # --- callers

    async def publish(
        self, engine_id: EngineId, incarnation: Incarnation, publications: Sequence[Publication]
    ) -> list[PublishResult]:
        """For a lender that publishes by a call of its own. Raises NoSession."""
        return await self.publish_in(self._table.session_of(engine_id, incarnation), publications)

    async def renew(self, tenant: TenantId, lease_id: LeaseId, ttl_ms: int) -> RenewResult:
        """Pass the wish on to the lender and wait for its answer. Raises LenderSilent."""
        self._check_writable()
        settled, changes = self._table.ask_renewal(tenant, lease_id, ttl_ms=ttl_ms, now_ms=self._clock.now_ms())
        if settled is None:
            settled = await self._settlement(lease_id, changes)
        if settled.status is None:
            raise LenderSilent("the lender did not answer in time")
        return RenewResult(status=settled.status, remaining_ms=settled.remaining_ms)

    async def end(self, order: EndOrder) -> int:
        """End all leases that the order names; how many. In steps, so that others are served in between.

        When this returns, all of it is stored: changes are stored in order, and the last ones were waited for.
        """
        self._check_writable()
        ended, waiting, more = 0, 0, True
        while more:
            count, more, changes = self._table.end(order, now_ms=self._clock.now_ms())
            ended, waiting = ended + count, waiting + count
            if more and waiting < MAX_TOGETHER:
                self._committer.enqueue(changes)
                await asyncio.sleep(0)
            else:
                await self._committer.carry_out(changes)
                waiting = 0
        return ended

    async def name_conversation(
        self, tenant: TenantId, conversation: ConversationId, aliases: Sequence[Alias], ttl_ms: int
    ) -> None:
        """Further names for a conversation. Raises InvalidRequest, LimitReached."""
        self._check_writable()
        now_ms = self._clock.now_ms()
        changes = self._table.name_conversation(tenant, conversation, aliases, ttl_ms=ttl_ms, now_ms=now_ms)
        await self._committer.carry_out(changes)

    # --- sessions

    async def open_session(self, engine: Engine, now_lender_ms: int) -> Outbox:
        """Raises EngineIdInUse, InvalidRequest, LimitReached, RegistryUnavailable."""
        self._check_writable()
        if self._going_away:
            raise RegistryUnavailable("this registry is going away")
        session, changes = self._table.hello(engine, now_lender_ms=now_lender_ms, now_ms=self._clock.now_ms())
        outbox = self._outboxes[session] = Outbox(session)
        try:
            await self._committer.carry_out(changes)
        except BaseException:
            self.close_session(session)
            raise
        return outbox

    def close_session(self, session: SessionId) -> None:
        """The stream is gone. Idempotent."""
        self._outboxes.pop(session, None)
        self._table.disconnect(session)
        self._left.set()

    def receive(self, session: SessionId, seq: int) -> None:
        """Account for a numbered message. Raises SessionGap, SessionReplaced."""
        self._table.receive(session, seq)

    def heartbeat(self, session: SessionId, *, now_lender_ms: int, free_blocks: int, total_blocks: int) -> None:
        """The lender is alive."""
        self._table.heartbeat(
            session,
            now_lender_ms=now_lender_ms,
            free_blocks=free_blocks,
            total_blocks=total_blocks,
            now_ms=self._clock.now_ms(),
        )

    async def snapshot(
        self, session: SessionId, publications: Sequence[Publication], *, last: bool
    ) -> list[PublishResult]:
        """Leases the lender still holds; with `last`, it holds no others. Raises Overloaded."""
        self._committer.check_room()
        results, changes = self._table.snapshot(session, publications, last=last, now_ms=self._clock.now_ms())
        await self._committer.carry_out(changes)
        return results

    async def publish_in(self, session: SessionId, publications: Sequence[Publication]) -> list[PublishResult]:
        """Make leases resolvable; one result each, in order. Raises Overloaded."""
        self._committer.check_room()
        results, changes = self._table.publish(session, publications, now_ms=self._clock.now_ms())
        await self._committer.carry_out(changes)
        return results

    async def ended(self, session: SessionId, leases: Sequence[tuple[LeaseId, EndReason]]) -> None:
        """The lender ended these."""
        await self._committer.carry_out(self._table.ended(session, leases, now_ms=self._clock.now_ms()))

    async def renewed(self, session: SessionId, leases: Sequence[tuple[LeaseId, int]]) -> None:
        """The lender moved these deadlines."""
        await self._committer.carry_out(self._table.renewed(session, leases, now_ms=self._clock.now_ms()))

    async def refuse_renewal(self, session: SessionId, lease_id: LeaseId, status: RenewStatus) -> None:
        """The lender declines a renewal."""
        changes = self._table.refuse_renewal(session, lease_id, status, now_ms=self._clock.now_ms())
        await self._committer.carry_out(changes)

    async def goodbye(self, session: SessionId) -> None:
        """The lender leaves in good order."""
        await self._committer.carry_out(self._table.goodbye(session))

    # --- inside

    def _check_writable(self) -> None:
        """Raises RegistryUnavailable, Overloaded."""
        self._replica.check()
        self._committer.check_room()

    def _current(self, current: bool) -> None:
        """A registry that has lost the store sends its lenders away: another one may have it."""
        if current:
            self._table.forgive(now_ms=self._clock.now_ms())
        else:
            self._events.cut()
            for outbox in self._outboxes.values():
                outbox.close(RegistryUnavailable("this replica has no contact with the store: connect to another one"))

    def _touch(self, in_touch: bool) -> None:
        """What is written here may wait for long; lenders go elsewhere if another replica fares better."""
        if not in_touch:
            for outbox in self._outboxes.values():
                outbox.go_elsewhere()
        self._on_touch(in_touch)

    async def _settlement(self, lease_id: LeaseId, changes: Changes) -> RenewalSettled:
        settled: asyncio.Future[RenewalSettled] = asyncio.get_running_loop().create_future()
        self._renewing.setdefault(lease_id, set()).add(settled)
        try:
            await self._committer.carry_out(changes)
            async with asyncio.timeout(self._table.limits.renewal_wait_ms / 1000 + RENEWAL_SLACK_S):
                return await settled
        except TimeoutError:
            return RenewalSettled(lease_id=lease_id, status=None)
        finally:
            waiting = self._renewing.get(lease_id)
            if waiting is not None:
                waiting.discard(settled)
                if not waiting:
                    del self._renewing[lease_id]

    def _deliver(self, changes: Changes) -> None:
        self._events.append(changes.events)
        for end in changes.ends:
            if (outbox := self._outboxes.get(end.session)) is not None:
                outbox.end(end.lease_id, end.reason)
        for renewal in changes.renewals:
            if (outbox := self._outboxes.get(renewal.session)) is not None:
                outbox.renew(renewal.lease_id, renewal.ttl_ms)
        for closed in changes.closed:
            if (outbox := self._outboxes.get(closed.session)) is not None:
                outbox.close(closed.error)
        for settled in changes.settled:
            for waiting in self._renewing.get(settled.lease_id, ()):
                if not waiting.done():
                    waiting.set_result(settled)

    async def _tick(self) -> NoReturn:
        while True:
            now_ms = self._clock.now_ms()
            wake_ms = self._table.next_wake_ms()
            # Whoever is cut off does not conclude from silence: its lenders may well be with another replica.
            if wake_ms is None or wake_ms > now_ms or not self._replica.current:
                await asyncio.sleep(TICK_S)
                continue
            await asyncio.shield(self._committer.enqueue(self._table.tick(now_ms)))
            await asyncio.sleep(TICK_PAUSE_S)
