"""Leases that are in the store and not in the table, remembered by engine in case their engines come here.

Pure. Invariant: a lease is remembered for one engine at most, and never more than `MAX_PASSED_OVER` are.
"""

from __future__ import annotations

from typing import Final

from kvlease.registry.values import EngineId, LeaseId

MAX_PASSED_OVER: Final = 65_536
"""The one passed over first is forgotten first."""


class PassedOver:
    """`take` costs what it returns, however many are remembered for other engines."""

    def __init__(self) -> None:
        self._engine_of: Final[dict[LeaseId, EngineId]] = {}
        self._leases_of: Final[dict[EngineId, dict[LeaseId, None]]] = {}

    def __len__(self) -> int:
        return len(self._engine_of)

    def add(self, lease_id: LeaseId, engine_id: EngineId) -> None:
        """Remembered as the newest."""
        self.discard(lease_id)
        while len(self._engine_of) >= MAX_PASSED_OVER:
            self.discard(next(iter(self._engine_of)))
        self._engine_of[lease_id] = engine_id
        self._leases_of.setdefault(engine_id, {})[lease_id] = None

    def discard(self, lease_id: LeaseId) -> None:
        """Forgotten, if it was remembered."""
        engine_id = self._engine_of.pop(lease_id, None)
        if engine_id is None:
            return
        leases = self._leases_of[engine_id]
        del leases[lease_id]
        if not leases:
            del self._leases_of[engine_id]

    def take(self, engine_id: EngineId) -> list[LeaseId]:
        """Those of an engine, the oldest first; they are remembered no longer."""
        leases = list(self._leases_of.pop(engine_id, ()))
        for lease_id in leases:
            del self._engine_of[lease_id]
        return leases

    def clear(self) -> None:
        self._engine_of.clear()
        self._leases_of.clear()
