"""Which engines there are, which session is whose, and whose leases are being withdrawn.

Pure. Opens, replaces, fences and closes sessions; what a session's messages do to leases is in `table.py`.
Rule for one engine id at two places: an incarnation keeps the id, and another one is refused, while its session is
open and it is heard. Once its session has closed (a crash closes it at once), or it has been silent in it for
`suspect_after_ms`, a new one fences it. Two sessions of *one* incarnation: the newest wins, by the lender's clock,
since a hello may be held up on its way.
Invariant: a session number belongs to at most one engine, and is never used again.
"""

from __future__ import annotations

from typing import Final

from kvlease.registry.engines import EngineState, validate_engine
from kvlease.registry.errors import EngineIdInUse, KvleaseError, LimitReached, NoSession, SessionGap, SessionReplaced
from kvlease.registry.table_changes import Draft, EngineGone, EnginePut, SessionClosed, SessionId
from kvlease.registry.table_limits import TableLimits
from kvlease.registry.values import EndReason, Engine, EngineId, Incarnation


class Roster:
    """Engines by id, sessions by number."""

    def __init__(self, limits: TableLimits) -> None:
        self._limits = limits
        self.engines: Final[dict[EngineId, EngineState]] = {}
        self.sweeps: Final[dict[int, EngineState]] = {}
        """Engines, also departed ones, with withdrawn leases still to be ended; by identity."""
        self._sessions: dict[SessionId, EngineState] = {}
        self._last_session = 0

    def open(self, draft: Draft, engine: Engine, *, now_lender_ms: int, now_ms: int) -> tuple[SessionId, EngineState]:
        """A new session. Raises InvalidRequest, EngineIdInUse, LimitReached, SessionReplaced."""
        validate_engine(engine)
        state = self.engines.get(engine.engine_id)
        if state is not None and state.engine.incarnation != engine.incarnation:
            connected = state.is_connected(now_ms, self._limits.home_silent_ms)
            if connected and not state.is_suspect(now_ms, self._limits.suspect_after_ms):
                wait_ms = self._limits.suspect_after_ms - state.silent_ms(now_ms)
                if state.elsewhere:
                    wait_ms = min(wait_ms, self._limits.home_silent_ms)
                raise EngineIdInUse("another incarnation of this engine id is connected", retry_after_ms=wait_ms)
            fenced = SessionReplaced("fenced by a new incarnation of the same engine id")
            self.depart(draft, state, EndReason.LENDER_LOST, fenced)
            state.elsewhere = False  # to clear it out of the store is up to whoever fences it
            state = None
        if state is None:
            if len(self.engines) >= self._limits.max_engines:
                raise LimitReached("too many engines", limit="max_engines")
            state = self.engines[engine.engine_id] = EngineState(engine)
        else:
            if state.session is not None and now_lender_ms < state.hello_ms:
                raise SessionReplaced("a newer session of the same incarnation is open")  # this hello was held up
            self._close(draft, state, SessionReplaced("a newer session of the same incarnation"))
        self._last_session += 1
        session = SessionId(self._last_session)
        self._sessions[session] = state
        state.begin(engine, session, now_lender_ms)
        state.elsewhere = False
        state.awaited_ms = now_lender_ms
        draft.stored.append(EnginePut(engine=engine, now_lender_ms=now_lender_ms))
        return session, state

    def follow(self, put: EnginePut, now_ms: int, *, heard: bool) -> EngineState:
        """An engine whose home is another replica. Not `heard`: suspect, until its home says how it is."""
        state = self.engines[put.engine.engine_id] = EngineState(put.engine)
        state.elsewhere = True
        state.hello_ms = put.now_lender_ms
        state.clock.hear(put.now_lender_ms, now_ms)
        state.heard_ms = now_ms if heard else now_ms - self._limits.suspect_after_ms
        state.home_heard_ms = now_ms if heard else None
        state.suspect_told = not heard
        return state

    def yield_home(self, draft: Draft, state: EngineState, put: EnginePut, now_ms: int, *, heard: bool) -> None:
        """The engine's session is at another replica now; its leases here become a copy."""
        self._close(draft, state, SessionReplaced("the lender has a newer session at another replica"))
        state.engine = put.engine
        state.hello_ms = put.now_lender_ms
        state.elsewhere = True
        state.presenting = False
        state.valid_from = 0  # what its last session here withdrew is in the store until its home takes it out
        state.clock.hear(put.now_lender_ms, now_ms)
        if heard:
            state.home_heard_ms = now_ms
            state.heard_ms = max(state.heard_ms, now_ms)

    def state(self, session: SessionId) -> EngineState:
        """The engine of an open session. Raises SessionReplaced if it was closed or replaced."""
        state = self._sessions.get(session)
        if state is None:
            raise SessionReplaced("this session is over")
        return state

    def receive(self, session: SessionId, seq: int) -> None:
        """Account for the next numbered message. Raises SessionGap, SessionReplaced."""
        state = self.state(session)
        if seq != state.expected_seq:
            raise SessionGap(f"message {state.expected_seq} expected, {seq} received")
        state.expected_seq += 1

    def session_of(self, engine_id: EngineId, incarnation: Incarnation) -> SessionId:
        """The open session of a lender. Raises NoSession."""
        state = self.engines.get(engine_id)
        if state is None or state.engine.incarnation != incarnation or state.session is None:
            raise NoSession("the lender has no session here")
        return state.session

    def disconnect(self, session: SessionId) -> None:
        """The stream is gone; the engine stays until it has been silent for too long. Idempotent."""
        state = self._sessions.pop(session, None)
        if state is not None:
            state.session = None

    def withdraw(self, state: EngineState, reason: EndReason, *, keep_current: bool) -> None:
        """Make leases of this engine void at once; ticks will end them."""
        state.withdraw(reason, keep_current=keep_current)
        if state.withdrawn(1):
            self.sweeps[id(state)] = state

    def depart(self, draft: Draft, state: EngineState, reason: EndReason, error: KvleaseError | None) -> None:
        """Forget the incarnation and void its leases. `error` closes its session; None if it closes it itself."""
        if error is not None:
            self._close(draft, state, error)
        elif state.session is not None:
            self.disconnect(state.session)
        state.departed = True
        del self.engines[state.engine.engine_id]
        self.withdraw(state, reason, keep_current=False)
        draft.stored.append(EngineGone(engine_id=state.engine.engine_id, incarnation=state.engine.incarnation))

    def forgive(self, now_ms: int) -> None:
        """Nobody has been silent for longer than it takes to be suspect."""
        for state in self.engines.values():
            state.heard_ms = max(state.heard_ms, now_ms - self._limits.suspect_after_ms)

    def check(self) -> None:
        """Raises AssertionError."""
        for engine_id, state in self.engines.items():
            assert state.engine.engine_id == engine_id, f"id of {engine_id}"
            assert not state.departed, f"{engine_id} has departed"
            assert state.session is None or self._sessions.get(state.session) is state, f"session of {engine_id}"
        for session, state in self._sessions.items():
            assert state.session == session, f"session {session}"
            assert self.engines.get(state.engine.engine_id) is state, f"engine of session {session}"
        for state in {**self.sweeps, **{id(x): x for x in self.engines.values()}}.values():
            state.check()
            assert not state.withdrawn(1) or id(state) in self.sweeps, f"withdrawn leases of {state.engine.engine_id}"

    def _close(self, draft: Draft, state: EngineState, error: KvleaseError) -> None:
        if state.session is not None:
            draft.closed.append(SessionClosed(session=state.session, error=error))
            self.disconnect(state.session)
