"""References on blocks that leases hold no more and that the pool has not got back yet, in portions for engine steps.

Pure. Giving the blocks of one long lease back at once would stall a step for as long as a short decode takes. A block
that waits here is referenced, so nobody can write to it: waiting costs room, never safety.

Invariant: what was owed is handed out once, in the order in which it was owed, the last block of each lease first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvlease.connector.lender_effects import Free, Unpin


class Returns:
    """What one lender owes its pool."""

    def __init__(self) -> None:
        self._owed: deque[Free | Unpin] = deque()
        self._left = 0
        """Blocks of the first one that are still owed."""
        self._blocks = 0

    @property
    def blocks(self) -> int:
        """References that are still to be given back."""
        return self._blocks

    def owe(self, effect: Free | Unpin) -> None:
        if not effect.blocks:
            return
        if not self._owed:
            self._left = len(effect.blocks)
        self._owed.append(effect)
        self._blocks += len(effect.blocks)

    def take(self, most: int) -> Iterator[Free | Unpin]:
        """Portions of `most` blocks in all, or of what there is."""
        while most > 0 and self._owed:
            first = self._owed[0]
            start = max(0, self._left - most)
            portion = first.blocks[start : self._left]
            most -= len(portion)
            self._blocks -= len(portion)
            self._left = start
            if not start:
                self._owed.popleft()
                self._left = len(self._owed[0].blocks) if self._owed else 0
            yield Unpin(lease_id=first.lease_id, blocks=portion) if isinstance(first, Unpin) else Free(blocks=portion)
