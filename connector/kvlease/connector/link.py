"""The connector's thread: everything that waits (registry, probes, telemetry) happens here, nothing of the engine does.

One daemon thread with one event loop per scheduler process. The engine's thread puts work in without ever blocking and
takes answers out of deques; it is never called from here.

Invariant: a call from the engine's thread costs one append and at most one ring of the bell, whatever the network
does, and never gives the interpreter lock away; nothing is kept for requests beyond the named limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvlease.connector import request_params
from kvlease.connector.bell import Bell
from kvlease.connector.borrower import ComputeReason, Match, Question
from kvlease.connector.journal import Journal, Note
from kvlease.connector.probe import LenderProbe
from kvlease.connector.settings import ConnectorSettings
from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import Clock
from kvlease.registry.errors import DeadlineExceeded, KvleaseError
from kvlease.registry.lender_session import LenderSession
from kvlease.registry.values import (
    EndReason,
    Engine,
    Hit,
    LeaseId,
    Miss,
    PublishResult,
    PublishStatus,
    RenewStatus,
)

MAX_RESOLVES_IN_FLIGHT: Final = 4_096
"""Beyond it requests compute at once (reason `overloaded`)."""
TOLD_LIMIT_S: Final = 1.0
"""How long an engine that terminates may wait until the registry has heard that its leases are over."""
CLOSE_LIMIT_S: Final = 2.0
"""How long closing may take: the goodbye and the last spans."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a resolve: the lease it found and whether its lender could be reached, or why there is none."""

    request_id: str
    found: Match | ComputeReason
    reachable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOrder:
    """The registry wants this lease ended, or did not accept it."""

    lease_id: LeaseId
    reason: EndReason


Renewal = Callable[[LeaseId, int], RenewStatus | int | None]
"""A lease and the ttl asked for: its deadline from now on, why there is none, or None if the engine has to decide."""
_REFUSED: Final = {
    PublishStatus.CONFLICT: EndReason.RELEASED,
    PublishStatus.ENDED: EndReason.RELEASED,
    PublishStatus.QUOTA: EndReason.QUOTA,
    PublishStatus.INVALID: EndReason.RELEASED,
}


def judged(question: Question, answer: Hit | Miss) -> Match | ComputeReason:
    """What an answer is good for: a record must also say how its lender is read from."""
    found = question.judge(answer)
    if isinstance(found, Match) and not request_params.names_lender(found.content):
        return ComputeReason.RECORD_INVALID
    return found


class Link:
    """The thread and its queues. `start` returns at once; everything works, with misses, while the registry is away."""

    def __init__(self, settings: ConnectorSettings, clock: Clock, journal: Journal, probe: LenderProbe) -> None:
        self._settings = settings
        self._clock = clock
        self._journal = journal
        self._probe = probe
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="kvlease-link", daemon=True)
        self._bell = Bell(self._wake)
        self._client: RegistryClient | None = None
        self._session: LenderSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._asked = 0
        """Resolves handed over; counted by the engine's thread alone."""
        self._answered = 0
        """Of them, those that are over; counted by this thread alone."""
        self._engine: Engine | None = None
        self._early: list[Callable[[LenderSession], None]] = []
        """What is to be told in a session that is still to be opened."""
        self._work: deque[Callable[[], object]] = deque()
        self._woken = False
        self._ended = False
        """This thread is no more: nothing is kept for it."""
        self.break_seal: Callable[[LeaseId], bool] | None = None
        """Breaks a lease's seal from this thread, if the lease is held; set by the lender."""
        self.break_all: Callable[[], None] | None = None
        """Breaks every seal, from any thread; set by the lender."""
        self.renew: Renewal | None = None
        """Answers a renewal from this thread, as far as that can be done without the engine's; set by the lender."""
        self.answers: deque[Answer] = deque()
        """Taken by the engine's thread."""
        self.orders: deque[EndOrder] = deque()
        """Taken by the engine's thread."""
        self.renewals: dict[LeaseId, tuple[int, int | None]] = {}
        """By lease, the last ttl asked for and the deadline promised, None if nothing is; taken by the engine's thread.
        One each: an idle engine takes none, however often its leases are renewed."""

    @property
    def client(self) -> RegistryClient | None:
        """For what may be read from any thread: which replica is in use."""
        return self._client

    # -- called from the engine's thread ---------------------------------------------------------------------------

    def start(self) -> None:
        self._bell.open()
        self._thread.start()

    def lend_as(self, engine: Engine) -> None:
        """Opens the lender's session, once the engine knows all that it says about itself.

        Called again, it says what has changed: by then no lease of the earlier session is held.
        """
        self.call(self._lend_as, engine)

    def resolve(self, request_id: str, question: Question) -> None:
        """Asks the registry; the judged answer will be among `answers`."""
        refusal = None
        if self._ended:
            refusal = ComputeReason.REGISTRY_UNAVAILABLE
        elif self._asked - self._answered >= MAX_RESOLVES_IN_FLIGHT:
            refusal = ComputeReason.OVERLOADED
        if refusal is not None:
            self.answers.append(Answer(request_id=request_id, found=refusal))
            return
        self._asked += 1
        self.call(self._spawn_resolve, request_id, question)

    @property
    def traced(self) -> bool:
        """Whether anybody wants spans: if not, no note need be made."""
        return self._journal.traced

    def end_all(self) -> None:
        """The engine terminates, and may never take a step again. Called from any thread but this link's.

        Seals are broken here and now, and the ends told by this link; the engine gives blocks back if it still can.
        Returns when the registry has heard of it or cannot be told, within TOLD_LIMIT_S.
        """
        if self.break_all is not None:
            self.break_all()
        if self._ended:
            return
        told = threading.Event()
        self.call(self._spawn_ends, told)
        told.wait(TOLD_LIMIT_S)

    def note(self, note: Note) -> None:
        """Something worth a span; made into one here, so that the engine's thread does not pay for it."""
        if self.traced:
            self.call(self._journal.record, note)

    def close(self) -> None:
        """Says goodbye and stops the thread, within CLOSE_LIMIT_S."""
        if self._thread.is_alive():
            self.call(self._stop.set)
            self._thread.join(CLOSE_LIMIT_S)
        self._bell.close()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Runs it in this thread, after all that was called before: one append, and a ring if nobody has rung yet."""
        if self._ended:
            return
        self._work.append(partial(function, *args))
        if not self._woken:
            self._woken = True
            self._bell.ring()

    def _wake(self) -> None:
        """Called by the bell's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the engine is going away
            self._loop.call_soon_threadsafe(self._do_work)

    def _do_work(self) -> None:
        # Cleared before the queue is emptied: what is appended after the last look wakes the loop again.
        self._woken = False
        while self._work:
            try:
                self._work.popleft()()
            except Exception:  # one piece of work must not take the others with it
                log.exception("kvlease: a message to the registry or a span was lost")

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
        except Exception:  # the thread's outermost frame
            log.exception("kvlease: the connector's thread ended; the engine goes on, computing every prefill")
        finally:
            self._ended = True
            self._work.clear()
            self._loop.close()

    async def _run(self) -> None:
        settings = self._settings
        async with RegistryClient(settings.registry, credentials=settings.credentials) as client, self._probe:
            self._client = client
            self._open_session()
            await self._stop.wait()
            if self._session is not None:
                with contextlib.suppress(KvleaseError, TimeoutError):
                    async with asyncio.timeout(CLOSE_LIMIT_S / 2):
                        await self._session.goodbye()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._journal.close)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lend_as(self, engine: Engine) -> None:
        self._engine = engine
        before, self._session = self._session, None
        self._open_session(before)

    def _open_session(self, before: LenderSession | None = None) -> None:
        """Once there are both a client and an engine that lends; after the goodbye of the session `before`."""
        if self._client is not None and self._engine is not None and self._session is None:
            self._session = LenderSession(self._client, self._engine, clock=self._clock, listener=self)
            self._spawn(self._keep_session(self._session, before))
            self._work.extendleft(partial(self.with_session, action) for action in reversed(self._early))
            self._early.clear()
            self._do_work()

    async def _keep_session(self, session: LenderSession, before: LenderSession | None) -> None:
        if before is not None:
            with contextlib.suppress(KvleaseError):
                await before.goodbye()
        try:
            await session.run()
        except KvleaseError as error:
            log.error("kvlease: this engine lends no more: %s", error)

    def with_session(self, action: Callable[[LenderSession], None]) -> None:
        """In this thread: tells the registry something, if this engine lends; what it lends before there is a session
        is told once there is one."""
        if self._session is not None:
            action(self._session)
        elif self._engine is not None:
            self._early.append(action)

    def _spawn_ends(self, told: threading.Event) -> None:
        self._spawn(self._end_all(told))

    async def _end_all(self, told: threading.Event) -> None:
        try:
            if self._session is not None:
                self._session.ended_all(EndReason.DRAINED)
                await self._session.heard(TOLD_LIMIT_S)
        finally:
            told.set()

    def _spawn_resolve(self, request_id: str, question: Question) -> None:
        self._spawn(self._resolve(request_id, question))

    async def _resolve(self, request_id: str, question: Question) -> None:
        try:
            found = await self._ask(question)
            reachable = isinstance(found, Match) and await self._probe.reachable(found.content)
            self.answers.append(Answer(request_id=request_id, found=found, reachable=reachable))
        finally:
            self._answered += 1

    async def _ask(self, question: Question) -> Match | ComputeReason:
        if self._client is None:
            return ComputeReason.REGISTRY_UNAVAILABLE
        try:
            answer = await self._client.resolve(question.query(), timeout_ms=self._settings.resolve_wait_ms)
        except DeadlineExceeded:
            return ComputeReason.RESOLVE_TIMEOUT
        except KvleaseError:
            return ComputeReason.REGISTRY_UNAVAILABLE
        return judged(question, answer)

    # -- what the session reports ----------------------------------------------------------------------------------

    def on_end(self, lease_id: LeaseId, reason: EndReason) -> None:
        """An idle engine takes no step: the seal breaks and the end is told here; blocks follow in its next one."""
        if self.break_seal is not None and self.break_seal(lease_id):
            self.with_session(lambda session: session.ended(lease_id, reason))
        self.orders.append(EndOrder(lease_id=lease_id, reason=reason))

    def on_renew(self, lease_id: LeaseId, ttl_ms: int) -> None:
        """An idle engine takes no step: what needs no block moved is promised and told here, and kept in its next one.

        If the engine ends the lease meanwhile, it says so after this: the registry believes the last word.
        """
        promised = self.renew(lease_id, ttl_ms) if self.renew is not None else None
        if isinstance(promised, RenewStatus):
            status = promised
            self.with_session(lambda session: session.refuse_renewal(lease_id, status))
            return
        if promised is not None:
            deadline_ms = promised
            self.with_session(lambda session: session.renewed(lease_id, deadline_ms))
        self.renewals[lease_id] = (ttl_ms, promised)

    def on_result(self, result: PublishResult) -> None:
        reason = _REFUSED.get(result.status)
        if reason is not None:
            log.warning("kvlease: lease %s was not accepted (%s): %s", result.lease_id, result.status, result.message)
            self.orders.append(EndOrder(lease_id=result.lease_id, reason=reason))

    def on_refused(self, reason: str, message: str) -> None:
        log.warning("kvlease: the registry refuses this lender (%s): %s", reason, message)

    def on_connected(self) -> None:
        log.info("kvlease: session with the registry at %s is open", self._client.address if self._client else "")

    def on_disconnected(self) -> None:
        log.warning("kvlease: session with the registry at %s is lost; reconnecting", self._settings.registry)
