"""The registry party: the real lease table behind lines and datagrams, in virtual time, and a liar in front of it.

The table is the product's; this is the thinnest shell around it: a session's messages are applied in order, and each
is answered, in order, when what it brought about has been carried out. The liar stands where a forged or confused
registry would: it alters answers, never the table. Invariant: the table's own `check` holds after every command.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvlease.registry.errors import KvleaseError, NoSession, RegistryUnavailable
from kvlease.registry.lender_mirror import Ends, Publishes, Refusal, Renewals
from kvlease.registry.table_changes import Changes, SessionId
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

from tests.sim.breaks import Straight
from tests.sim.network import Network
from tests.sim.plan import Plan
from tests.sim.session import (
    Ack,
    EndAsked,
    Goodbye,
    Heartbeat,
    Hello,
    Numbered,
    Pushed,
    Registry,
    RenewAsked,
    Said,
    SessionLine,
    Snapshot,
    Welcome,
)

Answer = Callable[[Hit | Miss | None], None]

_MEMORY: Final = 64
"""Answers the liar remembers to mix up."""


@dataclass(slots=True, kw_only=True)
class _Answer:
    """To one message. `due` once what the message brought about has been carried out."""

    pushed: Pushed
    due: bool


class _Served:
    """One session's stream at this end, with the answers that it waits for, in order."""

    def __init__(self, line: SessionLine) -> None:
        self.line: Final = line
        self.session: SessionId | None = None
        self.answers: Final[deque[_Answer]] = deque()
        self.over = False


class RegistryParty(Registry):
    """One registry with a memory of its own, which a restart loses."""

    def __init__(self, name: str, network: Network, plan: Plan, makings: Straight, *, clock_offset_ms: int) -> None:
        super().__init__(name, clock_offset_ms=clock_offset_ms)
        self.network: Final = network
        self.plan: Final = plan
        self.makings: Final = makings
        self._limits = TableLimits(
            suspect_after_ms=plan.suspect_ms,
            session_ttl_ms=plan.session_ttl_ms,
            home_silent_ms=plan.home_silent_ms,
            renewal_wait_ms=50,
            max_branches=3,
        )
        self._seen: list[Hit] = []
        self.lies = 0
        self.table = makings.table(self._limits)
        self._served: dict[SessionId, _Served] = {}
        self._accepted: list[_Served] = []
        """Those whose hello is on its way as well."""

    def start(self) -> None:
        """A new life: an empty table."""
        self.table = self.makings.table(self._limits)
        self._served = {}
        self._accepted = []
        self._tick()

    def crash(self) -> None:
        """The process is gone: nothing is remembered, and every line breaks."""
        self.up = False
        for served in self._accepted:
            served.line.close()

    # -- lenders --------------------------------------------------------------------------------------------------

    def accept(self, line: SessionLine) -> None:
        served = _Served(line)
        self._accepted.append(served)
        line.on_up = lambda numbered: self._serve(served, numbered)
        line.on_server_closed = lambda: self._leave(served)

    def _serve(self, served: _Served, numbered: Numbered) -> None:
        if served.over:
            return
        seq, said = numbered
        try:
            pushed, changes = self._command(served, seq, said, self.now_ms())
        except KvleaseError as error:
            self._close(served, error)
            return
        answer = _Answer(pushed=pushed, due=changes is None)
        served.answers.append(answer)
        if changes is None:
            self._answer(served)
        else:
            self.carry_out(changes, lambda kept: self._carried_out(served, answer, kept=kept))

    def _carried_out(self, served: _Served, answer: _Answer, *, kept: bool) -> None:
        if served.over:
            return
        if not kept:
            self._close(served, RegistryUnavailable("the store does not answer"))
            return
        answer.due = True
        self._answer(served)

    def _answer(self, served: _Served) -> None:
        while served.answers and served.answers[0].due:
            served.line.down(served.answers.popleft().pushed)

    def _command(self, served: _Served, seq: int, said: Said, now_ms: int) -> tuple[Pushed, Changes | None]:
        """The answer, and what has to be carried out before it; None if nothing has."""
        table, session = self.table, served.session
        if isinstance(said, Hello):
            self.check_current()
            session, changes = table.hello(said.engine, now_lender_ms=said.now_lender_ms, now_ms=now_ms)
            served.session = session
            self._served[session] = served
            return Welcome(), changes
        if session is None:
            raise NoSession("a hello comes first")
        table.receive(session, seq)
        match said:
            case Snapshot(leases=leases):
                results, changes = table.snapshot(session, leases, last=True, now_ms=now_ms)
                return Ack(results=tuple(results)), changes
            case Publishes(items=leases):
                results, changes = table.publish(session, leases, now_ms=now_ms)
                return Ack(results=tuple(results)), changes
            case Heartbeat():
                table.heartbeat(
                    session,
                    now_lender_ms=said.now_lender_ms,
                    free_blocks=said.free_blocks,
                    total_blocks=said.total_blocks,
                    now_ms=now_ms,
                )
                return Ack(), None
            case Ends(items=ends):
                return Ack(), table.ended(session, ends, now_ms=now_ms)
            case Renewals(items=renewals):
                return Ack(), table.renewed(session, renewals, now_ms=now_ms)
            case Refusal(lease_id=lease_id, status=status):
                return Ack(), table.refuse_renewal(session, lease_id, status, now_ms=now_ms)
            case Goodbye():
                del self._served[session]
                return Ack(), table.goodbye(session)

    def _close(self, served: _Served, error: KvleaseError) -> None:
        served.line.close(error)
        self._leave(served)

    def _leave(self, served: _Served) -> None:
        served.over = True
        if served in self._accepted:
            self._accepted.remove(served)
        if served.session is not None and self._served.pop(served.session, None) is not None:
            self.table.disconnect(served.session)

    def send_away(self, error: KvleaseError) -> None:
        """Every session ends."""
        for served in list(self._served.values()):
            self._close(served, error)

    # -- callers --------------------------------------------------------------------------------------------------

    def check_current(self) -> None:
        """Raises RegistryUnavailable if what is here may not be answered."""

    def resolve(self, query: ResolveQuery, answer: Answer) -> None:
        """A query has arrived; `answer` carries the reply back, None for a refusal."""
        try:
            self.check_current()
        except KvleaseError:
            answer(None)
            return
        found = self.table.resolve(query, now_ms=self.now_ms())
        if isinstance(found, Hit):
            self._seen = [*self._seen[-_MEMORY:], found]
        answer(self._lie(query, found))

    def end(self, order: EndOrder, acknowledged: Callable[[Sequence[LeaseId]], None]) -> None:
        """`acknowledged` is told which leases it was, once they are over for good."""
        try:
            self.check_current()
        except KvleaseError:
            return
        _, _, changes = self.table.end(order, now_ms=self.now_ms())
        ended = [x.lease.lease_id for x in changes.events if x.lease.end_reason is order.reason]
        self.carry_out(changes, lambda kept: acknowledged(ended) if kept else None)

    def ask_renewal(self, tenant: TenantId, lease_id: LeaseId, ttl_ms: int) -> None:
        try:
            self.check_current()
            _, changes = self.table.ask_renewal(tenant, lease_id, ttl_ms=ttl_ms, now_ms=self.now_ms())
        except KvleaseError:
            return
        self.carry_out(changes)

    def known(self, engine_id: EngineId) -> list[LeaseId]:
        """The leases of an engine that can be found here."""
        wanted = LeaseFilter(engine_id=engine_id)
        views, _ = self.table.list_leases(wanted, limit=10_000, now_ms=self.now_ms())
        return [view.lease_id for view in views if not view.suspect]

    # -- inside ---------------------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        return self.network.world.now_ms + self.clock_offset_ms

    def carry_out(self, changes: Changes, done: Callable[[bool], None] | None = None) -> None:
        """`done` hears whether all of it has been carried out."""
        self.deliver(changes)
        if done is not None:
            done(True)

    def deliver(self, changes: Changes) -> None:
        """Tell the lenders."""
        if not changes:
            return
        for end in changes.ends:
            if (served := self._served.get(end.session)) is not None:
                served.line.down(EndAsked(lease_id=end.lease_id, reason=end.reason))
        for renewal in changes.renewals:
            if (served := self._served.get(renewal.session)) is not None:
                served.line.down(RenewAsked(lease_id=renewal.lease_id, ttl_ms=renewal.ttl_ms))
        for closed in changes.closed:
            if (served := self._served.get(closed.session)) is not None:
                self._close(served, closed.error)
        self.table.check()

    def _tick(self) -> None:
        self.carry_out(self.table.tick(self.now_ms()))
        self.network.world.after(20, self, self._tick)

    def _lie(self, query: ResolveQuery, found: Hit | Miss) -> Hit | Miss:
        """The answer, or with the plan's probability something that only looks like one."""
        world = self.network.world
        if not self._seen or not world.chance(self.network.faults.lie):
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
                return replace(base, engine_id=EngineId(f"lender{world.between(0, self.plan.lenders)}"))
            case 5:  # a flipped bit
                body = bytearray(base.record.body)
                body[world.between(0, len(body) - 1)] ^= 1 << world.between(0, 7)
                return replace(base, record=Record(digests=base.record.digests, body=bytes(body)))
            case _:  # an old answer
                return other
