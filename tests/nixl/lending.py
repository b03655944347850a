"""The lender's adapter: carries the core's effects out on the pool and the seal table, in the order given.

Stands where the vLLM adapter stands in a deployment, with the same duties. One reuse callback for all leases; it asks
the core which seals to break and never calls the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlease.connector.lender import LeaseHolder
from kvlease.connector.lender_effects import Announce, BreakSeal, Effect, Free, Pin, Unpin, WriteSeal
from kvlease.connector.record import record_hash
from kvlease.connector.seal_table import SealTable
from kvlease.registry.values import LeaseId, Publication

from tests.nixl.pool import OnReuse, Pool


class Lending:
    """Effects on one pool and one table. `announced` hears of each new publication."""

    def __init__(
        self, holder: LeaseHolder, pool: Pool, table: SealTable, announced: Callable[[Publication], None]
    ) -> None:
        self.holder = holder
        self.pool = pool
        self.table = table
        self._announced = announced

    def carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Pin(blocks=blocks):
                    self.pool.touch(blocks)
                case Free(blocks=blocks):
                    self.pool.free(blocks[::-1])
                case Unpin(lease_id=lease_id, blocks=blocks):
                    self.pool.unpin(blocks[::-1], self.callback(lease_id))
                case WriteSeal(slot=slot, value=value):
                    self.table.write_value(slot, value)
                case BreakSeal(slot=slot):
                    self.break_seal(slot)
                case Announce(draft=draft):
                    publication = draft.publication()
                    self.table.write_hash(draft.slot, record_hash(publication.record))
                    self._announced(publication)
                case _:
                    self.tell(effect)

    def tell(self, effect: Effect) -> None:
        """What the registry would be told beside new publications."""

    def callback(self, lease_id: LeaseId) -> OnReuse:
        """What the pool calls when a block of this lease, which has lapsed, is handed out."""
        del lease_id
        return self._on_reuse

    def break_seal(self, slot: int) -> None:
        self.table.break_seal(slot)

    def written(self) -> None:
        """The blocks handed out last have their new words."""

    def _on_reuse(self, block: int) -> None:
        self.carry_out(self.holder.on_reuse(block))
