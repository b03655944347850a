"""References that a lender's leases hold no more: back to its pool a few in each step, or at once if blocks are wanted.

The product's `Returns` decides on the portions; what is here is the engine's thread that carries them out.
Invariant: everything owed is given back, as long as the lender runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvlease.connector.lender_effects import Free, Unpin
from kvlease.connector.returns import Returns

from tests.sim.breaks import Straight
from tests.sim.pool import BlockPool

if TYPE_CHECKING:
    from tests.sim.lender import LenderParty

RETURNED_BLOCKS: Final = 2
"""Given back in one step."""


class LenderReturns:
    """Of one incarnation."""

    def __init__(self, lender: LenderParty, pool: BlockPool, makings: Straight, given: Callable[[], None]) -> None:
        """`given`: called when the pool has got some back."""
        self._lender, self._pool, self._makings = lender, pool, makings
        self._given = given
        self._owed = Returns()
        self._waiting = False

    @property
    def blocks(self) -> int:
        return self._owed.blocks

    def owe(self, effect: Free | Unpin) -> None:
        self._owed.owe(effect)
        self._later()

    def give_back(self, most: int) -> None:
        for portion in self._owed.take(most):
            blocks = reversed(portion.blocks)
            if isinstance(portion, Unpin):
                self._pool.unpin(blocks, self._makings.on_reuse(self._lender, portion.lease_id))
            else:
                self._pool.give_back(blocks)

    def _later(self) -> None:
        if self._owed.blocks and not self._waiting:
            self._waiting = True
            self._lender.world.after(1, self._lender, self._step)

    def _step(self) -> None:
        self._waiting = False
        self.give_back(RETURNED_BLOCKS)
        self._later()
        self._given()
