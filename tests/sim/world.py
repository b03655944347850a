"""Virtual time: the event queue, the one PRNG of a seed, and parties that pause and crash.

Nothing here knows of leases. An event belongs to a party or to the hardware: a paused party's events wait until it
goes on and then find it with stale knowledge, a crashed party's own events are gone, hardware never stops.
Invariant: events run in the order of (time, order of scheduling), so a seed is repeated exactly.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Final

Action = Callable[[], None]


class Party:
    """Somebody who can be paused at any instant, and whose clock is its own."""

    def __init__(self, name: str, *, clock_offset_ms: int = 0) -> None:
        self.name: Final = name
        self.clock_offset_ms: Final = clock_offset_ms
        self.life = 0
        """Number of starts; an event scheduled in an earlier life is dropped."""
        self.up = True
        self.paused_until_ms = 0
        self.paused_ms = 0
        """Time spent paused so far: allowed for where the judge measures bounds."""


class World:
    """The queue of one seed."""

    def __init__(self, rng: random.Random) -> None:
        self.rng: Final = rng
        self.now_ms = 0
        self.steps = 0
        self._order = 0
        self._queue: list[tuple[int, int, Party | None, int | None, Action]] = []

    def after(self, delay_ms: int, party: Party, action: Action) -> None:
        """The party's own doing, later: dropped if it has crashed meanwhile."""
        self._push(self.now_ms + delay_ms, party, party.life, action)

    def deliver(self, delay_ms: int, party: Party, action: Action) -> None:
        """Something that reaches whoever then answers at the party's address, a later incarnation included."""
        self._push(self.now_ms + delay_ms, party, None, action)

    def hardware(self, delay_ms: int, action: Action) -> None:
        """Something that happens whatever the parties do: bytes land, a connection dies."""
        self._push(self.now_ms + delay_ms, None, None, action)

    def pause(self, party: Party, length_ms: int) -> None:
        until = self.now_ms + length_ms
        party.paused_ms += max(0, until - max(party.paused_until_ms, self.now_ms))
        party.paused_until_ms = max(party.paused_until_ms, until)

    def run(self, until_ms: int) -> None:
        """Runs what is due up to `until_ms`, and leaves the clock there."""
        queue = self._queue
        while queue and queue[0][0] <= until_ms:
            at_ms, order, party, life, action = heapq.heappop(queue)
            self.now_ms = at_ms
            if party is not None:
                if party.paused_until_ms > at_ms:
                    heapq.heappush(queue, (party.paused_until_ms, order, party, life, action))
                    continue
                if not party.up or (life is not None and life != party.life):
                    continue
            self.steps += 1
            action()
        self.now_ms = until_ms

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def between(self, low: int, high: int) -> int:
        return low + int(self.rng.random() * (high - low + 1))

    def _push(self, at_ms: int, party: Party | None, life: int | None, action: Action) -> None:
        self._order += 1
        heapq.heappush(self._queue, (at_ms, self._order, party, life, action))
