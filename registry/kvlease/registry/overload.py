"""When a registry has more to do than it can, and what it then leaves out: resolves first, then other reads.

Pure. The signal is how late the event loop comes round (milliseconds), measured by the server and told to `observe`:
it grows with everything that is queued, whatever it is, and needs no idea of what a call costs.
Invariant: publishes, heartbeats, renewals and ends are never shed; without them leases would go stale for everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from kvlease.registry.identity import Rpc

SWAMPED_FACTOR: Final = 4
"""At so many times the limit, locates and lists are shed too."""
RAISE_AFTER: Final = 3
"""Late rounds in a row: one alone can be a pause of the host."""
LOWER_AFTER: Final = 10
"""Calm rounds in a row, each below half the limit: or shedding would go on and off as fast as it works."""


class Load(IntEnum):
    """In order of severity."""

    CALM = 0
    BUSY = 1
    SWAMPED = 2


SHED_FROM: Final[Mapping[Rpc, Load]] = MappingProxyType(
    {
        Rpc.RESOLVE: Load.BUSY,  # a miss costs one prefill
        Rpc.RESOLVE_STREAM: Load.BUSY,
        Rpc.LOCATE: Load.SWAMPED,  # so does this, and each saves a resolve
        Rpc.LIST_LEASES: Load.SWAMPED,
    }
)
"""What is shed, from which load on; whatever is not here never is."""


class Overload:
    """How loaded the registry is. `limit_ms` is the lag that counts as late."""

    def __init__(self, *, limit_ms: int) -> None:
        self.limit_ms: Final = limit_ms
        self.load = Load.CALM
        self._late = 0
        self._calm = 0

    def observe(self, lag_ms: float) -> None:
        """One round of the event loop came `lag_ms` late."""
        if lag_ms >= self.limit_ms:
            self._calm = 0
            self._late += 1
            if self._late >= RAISE_AFTER:
                swamped = lag_ms >= self.limit_ms * SWAMPED_FACTOR
                self.load = max(self.load, Load.SWAMPED if swamped else Load.BUSY)
            return
        self._late = 0
        self._calm = self._calm + 1 if lag_ms < self.limit_ms / 2 else 0
        if self._calm >= LOWER_AFTER:
            self.load = Load.CALM

    def sheds(self, rpc: Rpc) -> bool:
        """Whether a call is to be refused now, with nothing done for it."""
        return self.load >= SHED_FROM.get(rpc, len(Load))
