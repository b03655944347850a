"""What a borrower's local blocks must hold, and what it did hold: the pair's outside judge.

Knows nothing of seals, NIXL or leases. Each request that has been released uses its blocks for a while, with the words
that were borrowed or that it computed itself, and the judge looks again when the use ends: a READ that lands in between
is seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from tests.nixl.agent import Memory
from tests.nixl.content import Words
from tests.nixl.messages import Counts

USED_AT_ONCE: Final = 16
POISON: Final = np.uint64(0xDEAD_BEEF_DEAD_BEEF)


class LocalBlocks:
    """The borrower's block memory: which are free, which are used and what they must hold."""

    def __init__(self, memory: Memory, counts: Counts) -> None:
        self._memory = memory
        self._counts = counts
        self._free = list(range(len(memory.words)))
        self._used: deque[tuple[tuple[int, ...], Words]] = deque()

    def take(self, count: int) -> tuple[int, ...] | None:
        """The blocks given back last come first; None if there are not enough."""
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    def give(self, blocks: Sequence[int]) -> None:
        self._free.extend(blocks)

    def hold(self, blocks: Sequence[int], words: Words) -> bool:
        """Whether these blocks hold exactly these words."""
        return bool(np.array_equal(self._memory.words[list(blocks)], words))

    def compute(self, blocks: Sequence[int], words: Words) -> None:
        self._memory.words[list(blocks)] = words

    def poison(self, blocks: Sequence[int]) -> None:
        self._memory.words[list(blocks)] = POISON

    def poisoned(self, blocks: Sequence[int]) -> bool:
        return bool((self._memory.words[list(blocks)] == POISON).all())

    def use(self, blocks: tuple[int, ...], words: Words) -> None:
        """A request works with these blocks; the oldest use ends, and is judged, when there are too many."""
        self._used.append((blocks, words))
        while len(self._used) > USED_AT_ONCE:
            self.end_use()

    def end_use(self) -> bool:
        """Ends the oldest use; False if there is none."""
        if not self._used:
            return False
        blocks, words = self._used.popleft()
        self._counts.wrong_in_use += not self.hold(blocks, words)
        self.give(blocks)
        return True
