"""The registry party: the real lease table behind lines and datagrams, in virtual time, and a liar in front of it.

The table is the product's; this is the thinnest shell around it. The liar stands where a forged or confused registry
would: it alters answers, never the table. Invariant: the table's own `check` holds after every command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvlease.registry.errors import KvleaseError, NoSession
from kvlease.registry.lender_mirror import Ends, Publishes, Refusal, Renewals
from kvlease.registry.table import LeaseTable
from kvlease.registry.table_changes import NOTHING, Changes, SessionId
from kvlease.registry.table_limits import TableLimits
from kvlease.registry.values import (
    DIGEST_BYTES,
    EndOrder,
    EngineId,
    Hit,
    LeaseFilter,
    LeaseId,
    Miss,
    Record,
    ResolveQuery,
    TenantId,
)

from tests.sim.network import Network
from tests.sim.plan import Plan
from tests.sim.session import (
    EndAsked,
    Goodbye,
    Heartbeat,
    Hello,
    Numbered,
    Registry,
    RenewAsked,
    Results,
    Said,
    SessionLine,
    Snapshot,
)

Answer = Callable[[Hit | Miss], None]

_MEMORY: Final = 64
"""Answers the liar remembers to mix up."""


class RegistryParty(Registry):
    """One replica with a memory of its own, which a restart loses."""

    def __init__(self, name: str, network: Network, plan: Plan, *, clock_offset_ms: int) -> None:
        super().__init__(name, clock_offset_ms=clock_offset_ms)
        self._network = network
        self._plan = plan
        self._limits = TableLimits(
            suspect_after_ms=plan.suspect_ms,
            session_ttl_ms=plan.session_ttl_ms,
            renewal_wait_ms=50,
            max_branches=3,
        )
        self._seen: list[Hit] = []
        self.lies = 0
        self.table = LeaseTable(self._limits)
        self._lines: dict[SessionId, SessionLine] = {}

    def start(self) -> None:
        """A new life: an empty table."""
        self.table = LeaseTable(self._limits)
        self._lines = {}
        self._tick()

    def crash(self) -> None:
        """The process is gone: nothing is remembered, and every line breaks."""
        self.up = False
        for line in self._lines.values():
            line.close()

    # -- lenders --------------------------------------------------------------------------------------------------

    def accept(self, line: SessionLine) -> None:
        session: list[SessionId] = []
        line.on_up = lambda numbered: self._said(line, session, numbered)
        line.on_server_closed = lambda: self._gone(session)

    def _said(self, line: SessionLine, known: list[SessionId], numbered: Numbered) -> None:
        seq, said = numbered
        now_ms, table = self._now_ms(), self.table
        try:
            if isinstance(said, Hello):
                session, changes = table.hello(said.engine, now_lender_ms=said.now_lender_ms, now_ms=now_ms)
                known.append(session)
                self._lines[session] = line
                self._carry_out(changes)
                return
            session = known[0]
            table.receive(session, seq)
            self._carry_out(self._command(line, session, said, now_ms))
        except KvleaseError:
            line.close()

    def _command(self, line: SessionLine, session: SessionId, said: Said, now_ms: int) -> Changes:
        table = self.table
        match said:
            case Snapshot(leases=leases):
                results, changes = table.snapshot(session, leases, last=True, now_ms=now_ms)
                line.down(Results(results=tuple(results)))
                return changes
            case Publishes(items=leases):
                results, changes = table.publish(session, leases, now_ms=now_ms)
                line.down(Results(results=tuple(results)))
                return changes
            case Heartbeat():
                table.heartbeat(
                    session,
                    now_lender_ms=said.now_lender_ms,
                    free_blocks=said.free_blocks,
                    total_blocks=said.total_blocks,
                    now_ms=now_ms,
                )
                return NOTHING
            case Ends(items=ends):
                return table.ended(session, ends, now_ms=now_ms)
            case Renewals(items=renewals):
                return table.renewed(session, renewals, now_ms=now_ms)
            case Refusal(lease_id=lease_id, status=status):
                return table.refuse_renewal(session, lease_id, status, now_ms=now_ms)
            case Goodbye():
                del self._lines[session]
                return table.goodbye(session)
            case Hello():
                raise NoSession("a hello comes once")

    def _gone(self, known: list[SessionId]) -> None:
        if known and self._lines.pop(known[0], None) is not None:
            self.table.disconnect(known[0])

    # -- callers --------------------------------------------------------------------------------------------------

    def resolve(self, query: ResolveQuery, answer: Answer) -> None:
        """A query has arrived; `answer` carries the reply back."""
        found = self.table.resolve(query, now_ms=self._now_ms())
        if isinstance(found, Hit):
            self._seen = [*self._seen[-_MEMORY:], found]
        answer(self._lie(query, found))

    def end(self, order: EndOrder) -> None:
        _, _, changes = self.table.end(order, now_ms=self._now_ms())
        self._carry_out(changes)

    def ask_renewal(self, tenant: TenantId, lease_id: LeaseId, ttl_ms: int) -> None:
        try:
            _, changes = self.table.ask_renewal(tenant, lease_id, ttl_ms=ttl_ms, now_ms=self._now_ms())
        except KvleaseError:
            return
        self._carry_out(changes)

    def known(self, engine_id: EngineId) -> list[LeaseId]:
        """The leases of an engine that can be found here."""
        wanted = LeaseFilter(engine_id=engine_id)
        views, _ = self.table.list_leases(wanted, limit=10_000, now_ms=self._now_ms())
        return [view.lease_id for view in views]

    # -- inside ---------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return self._network.world.now_ms + self.clock_offset_ms

    def _tick(self) -> None:
        self._carry_out(self.table.tick(self._now_ms()))
        self._network.world.after(20, self, self._tick)

    def _carry_out(self, changes: Changes) -> None:
        if not changes:
            return
        for end in changes.ends:
            if (line := self._lines.get(end.session)) is not None:
                line.down(EndAsked(lease_id=end.lease_id, reason=end.reason))
        for renewal in changes.renewals:
            if (line := self._lines.get(renewal.session)) is not None:
                line.down(RenewAsked(lease_id=renewal.lease_id, ttl_ms=renewal.ttl_ms))
        for closed in changes.closed:
            if (line := self._lines.pop(closed.session, None)) is not None:
                line.close()
        self.table.check()

    def _lie(self, query: ResolveQuery, found: Hit | Miss) -> Hit | Miss:
        """The answer, or with the plan's probability something that only looks like one."""
        world = self._network.world
        if not self._seen or not world.chance(self._network.faults.lie):
            return found
        self.lies += 1
        other = world.rng.choice(self._seen)
        base = found if isinstance(found, Hit) else world.rng.choice(self._seen)
        asked = len(query.digests) // DIGEST_BYTES
        match world.between(0, 6):
            case 0:  # one lease's digests with another's blocks
                return replace(base, record=Record(digests=base.record.digests, body=other.record.body))
            case 1:  # what was asked for, whatever the blocks hold
                strides = min(asked, len(other.record.digests) // DIGEST_BYTES)
                return replace(
                    other,
                    record=Record(digests=query.digests[: len(other.record.digests)], body=other.record.body),
                    matched_strides=strides,
                )
            case 2:  # a whole record, of something else
                return replace(other, matched_strides=len(other.record.digests) // DIGEST_BYTES)
            case 3:  # a match that is none
                return replace(base, matched_strides=asked + 3)
            case 4:  # another lender
                return replace(base, engine_id=EngineId(f"lender{world.between(0, self._plan.lenders)}"))
            case 5:  # a flipped bit
                body = bytearray(base.record.body)
                body[world.between(0, len(body) - 1)] ^= 1 << world.between(0, 7)
                return replace(base, record=Record(digests=base.record.digests, body=bytes(body)))
            case _:  # an old answer
                return other
