"""What the passing of time does to the table: lapses, expiries, silent lenders, lost ones, renewals given up.

Pure: `now_ms` comes in. Work is bounded: a tick touches at most TICK_WORK leases and says through `next_wake_ms` that
there is more, so that a hundred thousand leases may expire at once while resolves go on. Correctness does not wait
for ticks: reads look at clocks themselves (`Ledger.end_due`).
"""

from __future__ import annotations

from kvlease.registry.aliases import Aliases
from kvlease.registry.engines import EngineState
from kvlease.registry.errors import NoSession
from kvlease.registry.table_changes import Changes, Draft
from kvlease.registry.table_ledger import Ledger
from kvlease.registry.table_limits import ALIAS_SWEEP_MS, TICK_WORK
from kvlease.registry.table_roster import Roster
from kvlease.registry.values import EndReason, LeaseEventType


class TableTime:
    """The timers of the table."""

    def __init__(self, ledger: Ledger, roster: Roster, aliases: Aliases) -> None:
        self._ledger = ledger
        self._roster = roster
        self._aliases = aliases
        self._limits = ledger.limits
        self._next_alias_sweep_ms = 0
        self._ticked_ms = 0

    def next_wake_ms(self) -> int | None:
        """When there will be something to do, on our clock. Not later than the last tick means at once; None: never."""
        if self._roster.sweeps or self._ledger.owed.to_tell:
            return self._ticked_ms
        wakes: list[int] = []
        for state in self._roster.engines.values():
            if state.announce:
                return self._ticked_ms
            if not state.suspect_told:
                wakes.append(state.heard_ms + self._limits.suspect_after_ms)
            elif not state.elsewhere:
                wakes.append(state.heard_ms + self._limits.session_ttl_ms)
            if state.deadlines:
                wakes.append(state.clock.ours_ms(state.deadlines[0][0]))
        give_up_ms = self._ledger.renewals.next_give_up_ms()
        if give_up_ms is not None:
            wakes.append(give_up_ms)
        if len(self._aliases):
            wakes.append(self._next_alias_sweep_ms)
        return min(wakes, default=None)

    def tick(self, now_ms: int) -> Changes:
        """Do what is due, in order: silence, renewals, confirmed ends, withdrawn leases, deadlines, aliases."""
        self._ticked_ms = now_ms
        draft = Draft()
        self._look_for_silence(draft, now_ms)
        self._ledger.renewals.give_up(draft, now_ms)
        draft.stored.extend(self._ledger.owed.take_heard(TICK_WORK))
        work = self._sweep(draft, TICK_WORK, now_ms)
        for state in self._roster.engines.values():
            if work > 0:
                work = self._announce(draft, state, work, now_ms)
            if work > 0:
                work = self._pass_deadlines(draft, state, work, now_ms)
        if len(self._aliases) and self._next_alias_sweep_ms <= now_ms:
            full = self._aliases.expire(now_ms, TICK_WORK) == TICK_WORK
            self._next_alias_sweep_ms = now_ms if full else now_ms + ALIAS_SWEEP_MS
        return draft.done()

    def _look_for_silence(self, draft: Draft, now_ms: int) -> None:
        lost: list[EngineState] = []
        for state in self._roster.engines.values():
            silent_ms = state.silent_ms(now_ms)
            if silent_ms >= self._limits.session_ttl_ms and not state.elsewhere:  # a copy goes with the original
                lost.append(state)
            elif silent_ms >= self._limits.suspect_after_ms and not state.suspect_told:
                state.tell_suspect(suspect=True)
        for state in lost:
            self._roster.depart(draft, state, EndReason.LENDER_LOST, NoSession("no heartbeat within the session ttl"))

    def _sweep(self, draft: Draft, work: int, now_ms: int) -> int:
        for key, state in list(self._roster.sweeps.items()):
            gone = state.withdrawn(work)
            for lease in gone:
                self._ledger.end(draft, lease, state.void_reason, now_ms, push=False, store=not state.elsewhere)
            work -= len(gone)
            if work <= 0:
                break
            del self._roster.sweeps[key]
        return work

    def _announce(self, draft: Draft, state: EngineState, work: int, now_ms: int) -> int:
        kind = LeaseEventType.SUSPECT if state.suspect_told else LeaseEventType.RESTORED
        while state.announce and work > 0:
            lease = state.leases.get(state.announce.popleft())
            work -= 1
            if lease is not None and lease.generation >= state.valid_from:
                self._ledger.note(draft, kind, lease, now_ms)
        return work

    def _pass_deadlines(self, draft: Draft, state: EngineState, work: int, now_ms: int) -> int:
        present_ms = state.clock.present_ms(now_ms)
        while work > 0 and state.deadlines and state.deadlines[0][0] <= present_ms:
            lease = state.leases[state.deadlines[0][1]]
            reason = self._ledger.end_due(lease, now_ms)
            if reason is not None:
                self._ledger.end(draft, lease, reason, now_ms, push=False, store=not state.elsewhere)
            else:
                self._ledger.lapse(draft, lease, now_ms)
            work -= 1
        return work
