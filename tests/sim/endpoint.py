"""Which of several registries one client is with: one at a time, until it is gone or the connection breaks.

As a client does that was given several addresses. The registries know nothing of each other; what moves is the client.
Invariant: with one registry it never moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from tests.sim.world import Party

R = TypeVar("R", bound=Party)


class Endpoint(Generic[R]):
    def __init__(self, registries: Sequence[R], *, first: int = 0) -> None:
        """`first`: where it begins, counted round and round."""
        self._registries: Final = registries
        self._at = first % len(registries)
        self._life = self._registry.life
        self.moves = 0
        """Times that it is with another registry than before."""

    @property
    def _registry(self) -> R:
        return self._registries[self._at]

    def registry(self) -> R:
        """The registry to talk to now: another one if the last was restarted, and one that is up if any is."""
        if self._registry.life != self._life:
            self.move()
        for _ in self._registries:
            if self._registry.up:
                break
            self.move()
        return self._registry

    def move(self) -> None:
        """The connection broke: on to the next."""
        self._at = (self._at + 1) % len(self._registries)
        self._life = self._registry.life
        self.moves += len(self._registries) > 1
