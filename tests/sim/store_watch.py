"""How what is written in the store comes to one replica: revisions, late and in order, and cuts between the two.

What a revision means is the product's reader's business. Invariant: nothing is left out in silence; a watch that cannot
go on is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from tests.sim.etcd import Entry
from tests.sim.network import Network
from tests.sim.world import Action, Party


class Cut:
    """Until when each direction between one replica and the store is cut."""

    def __init__(self) -> None:
        self.to_store_ms = 0
        self.from_store_ms = 0


class Watch:
    """Revisions on their way to one replica: in order, each late by its own time, and stopped while there is a cut."""

    def __init__(self, network: Network, party: Party, cut: Cut, pace_ms: int, revision: int, history: int) -> None:
        self.revision = revision
        """Everything up to here has been taken in."""
        self.history: Final = history
        self._network: Final = network
        self._party: Final = party
        self._cut: Final = cut
        self._pace_ms: Final = pace_ms
        self._due_ms = 0
        self._coming: deque[tuple[int, Entry]] = deque()
        self._pumping = False
        self._over = False
        self._life: Final = party.life
        self._took: Callable[[Entry], None] | None = None
        self._on_over: Action = _nothing

    def open(self, took: Callable[[Entry], None], over: Action) -> None:
        self._took, self._on_over = took, over
        self._pump_soon()

    def offer(self, entry: Entry) -> None:
        world = self._network.world
        self._due_ms = max(self._due_ms, world.now_ms + self._delay())
        self._coming.append((self._due_ms, entry))
        self._pump_soon()

    def compacted(self) -> None:
        if self._coming:
            self._over = True

    def restored(self) -> None:
        self._over = True
        self._pump_soon()

    def _delay(self) -> int:
        world, faults = self._network.world, self._network.faults
        if world.chance(faults.store_slow / 4):
            return world.between(1, 4 * faults.long_ms)
        return world.between(1, self._pace_ms)

    def _pump_soon(self) -> None:
        if self._pumping or self._took is None or not (self._coming or self._over):
            return
        if self._party.life != self._life:
            return
        self._pumping = True
        world = self._network.world
        due_ms = max(self._cut.from_store_ms, self._coming[0][0] if self._coming and not self._over else world.now_ms)
        world.after(max(0, due_ms - world.now_ms), self._party, self._pump)

    def _pump(self) -> None:
        self._pumping = False
        now_ms = self._network.world.now_ms
        if self._took is None or self._cut.from_store_ms > now_ms:
            self._pump_soon()
            return
        if self._over:
            self._took = None
            self._on_over()
            return
        while self._coming and self._coming[0][0] <= now_ms and self._took is not None:
            _, entry = self._coming.popleft()
            self._took(entry)
            self.revision = entry.revision
        self._pump_soon()


def _nothing() -> None:
    return
