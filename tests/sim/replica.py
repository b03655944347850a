"""A registry that is one of several on a store: the real table, fed from the store, and what the shell does around it.

The committer's order of duties, the following, the beats and the refusal to answer when it is not current are the
product's rules in virtual time; how current it is is reckoned by the product's own `Staleness`.
Invariant: nobody hears of a change that is not known to be in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvlease.registry.errors import RegistryUnavailable
from kvlease.registry.table_changes import Batch, Changes, StoreChange, StoredView

from tests.sim.breaks import Straight
from tests.sim.etcd import Etcd
from tests.sim.network import Network
from tests.sim.plan import Plan
from tests.sim.registry import RegistryParty
from tests.sim.store import StoreEnd
from tests.sim.store_watch import Cut

_RETRY_MS: Final = 10
"""Between two tries of a commit or a load."""


@dataclass(slots=True, kw_only=True)
class _Command:
    """Waits for the store; whoever asked is told once."""

    changes: Changes
    done: Callable[[bool], None] | None

    def told(self, *, kept: bool) -> None:
        done, self.done = self.done, None
        if done is not None:
            done(kept)


class ReplicaParty(RegistryParty):
    """What it knows is what the store holds, a little late."""

    def __init__(
        self,
        name: str,
        network: Network,
        plan: Plan,
        makings: Straight,
        etcd: Etcd,
        *,
        pace_ms: int,
        clock_offset_ms: int,
    ) -> None:
        super().__init__(name, network, plan, makings, clock_offset_ms=clock_offset_ms)
        self.cut: Final = Cut()
        self.etcd: Final = etcd
        self.loads = 0
        self.beyond_ms = 0
        """How much older than allowed what it answered was, at worst."""
        self._pace_ms: Final = pace_ms

    def start(self) -> None:
        """A cold start: everything is in the store."""
        self._waiting: list[_Command] = []
        self._batch: list[_Command] = []
        self._storing: list[StoreChange] = []
        self._committing = self._loading = self._load_wanted = self._told = False
        self._ticked = True
        self.store = StoreEnd(self.etcd, self.network, self, self.plan, self.cut, pace_ms=self._pace_ms)
        self.staleness = self.makings.staleness(self.plan.max_staleness_ms)
        super().start()
        self._load()
        self._beat()

    def crash(self) -> None:
        super().crash()
        self.store.close()

    def check_current(self) -> None:
        if not self.makings.may_answer(self.staleness, self.now_ms()):
            raise RegistryUnavailable("this replica has no contact with the store: ask another one")
        self._judge_age()

    # -- to the store ---------------------------------------------------------------------------------------------

    def carry_out(self, changes: Changes, done: Callable[[bool], None] | None = None) -> None:
        if not changes and not self._waiting and not self._batch:
            if done is not None:
                done(True)
            return
        command = self._queue(changes, done)
        if done is not None:
            self.network.world.after(self.plan.commit_wait_ms, self, lambda: command.told(kept=False))

    def _queue(self, changes: Changes, done: Callable[[bool], None] | None) -> _Command:
        command = _Command(changes=changes, done=done)
        self._waiting.append(command)
        self._write()
        return command

    def _write(self) -> None:
        """One commit at a time, of all that waits; the same again until it is known to be kept."""
        if self._committing or self._loading or self._load_wanted:
            return
        if not self._batch:
            if not self._waiting:
                return
            self._batch, self._waiting = self._waiting, []
            self._storing = [change for command in self._batch for change in command.changes.stored]
        self._committing = True
        if self._storing:
            self.store.commit(self._storing, self._written)
        else:
            self._written(True)

    def _written(self, kept: bool) -> None:
        self._committing = False
        if kept:
            batch, self._batch, self._storing = self._batch, [], []
            for command in batch:
                self.deliver(command.changes)
                command.told(kept=True)
        if self._load_wanted:
            self._load()
        elif kept:
            self._write()
        else:
            self.network.world.after(_RETRY_MS, self, self._write)

    # -- from the store -------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Begin anew with everything there is. No commit may be under way."""
        self._load_wanted = True
        if not self._committing:
            self._load_wanted, self._loading = False, True
            self.store.follow(self._loaded, self._take_in, self._load, self._not_loaded)

    def _loaded(self, view: StoredView, kept: int) -> None:
        self._loading = False
        self.loads += 1
        waiting = (change for command in self._waiting for change in command.changes.stored)
        pending = [*self._storing[kept:], *waiting]
        self.carry_out(self.table.replace(view, pending, now_ms=self.now_ms()))
        self._write()

    def _not_loaded(self) -> None:
        self._loading = False
        self._write()
        self.network.world.after(_RETRY_MS, self, self._load)

    def _take_in(self, batch: Batch) -> None:
        changes = self.table.apply(batch, now_ms=self.now_ms())
        if changes:
            self.carry_out(changes)
        if batch.beat_number is not None:
            self.staleness.came_back(batch.beat_number)
            self._tell()

    # -- time -----------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        now_ms = self.now_ms()
        self.store.beat(self.staleness.send(now_ms), self.table.beats(now_ms=now_ms))
        self.network.world.after(self.plan.beat_ms, self, self._beat)

    def _tick(self) -> None:
        self._tell()
        if self._ticked and self._told:
            self._ticked = False
            self._queue(self.table.tick(self.now_ms()), self._tick_done)
        self.network.world.after(20, self, self._tick)

    def _tick_done(self, kept: bool) -> None:
        self._ticked = True

    def _tell(self) -> None:
        current = self.makings.may_answer(self.staleness, self.now_ms())
        if current and not self._told:
            self.table.forgive(now_ms=self.now_ms())
        if self._told and not current:
            self.send_away(RegistryUnavailable("this replica has no contact with the store"))
        self._told = current

    def _judge_age(self) -> None:
        """It is about to answer: from when is the oldest revision that it has not taken in?"""
        watch, etcd = self.store.watch, self.etcd
        if watch is None:
            since_ms: int | None = 0
        elif watch.history != etcd.history:
            since_ms = etcd.history_since_ms
        else:
            missing = etcd.first_after(watch.revision)
            since_ms = None if missing is None else missing.at_ms
        if since_ms is not None:
            age_ms = self.network.world.now_ms - since_ms
            self.beyond_ms = max(self.beyond_ms, age_ms - self.plan.max_staleness_ms)
