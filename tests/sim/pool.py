"""A block pool that behaves as the engine's own, for lenders and borrowers alike.

What the safety contract leans on: references; a free queue whose front takes freed blocks without a hash and whose
tail takes those with one; *one* reuse callback per block id, overwritten by the next; the callback is called when a
block is handed out, before its taker has it. Invariant: a block is in the free queue exactly if nobody refers to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

OnReuse = Callable[[int], None]


class NoBlocks(Exception):
    """The pool has too few free blocks."""


class BlockPool:
    def __init__(self, blocks: int, *, caching: bool) -> None:
        self.size: Final = blocks
        self._caching: Final = caching
        self._references = [0] * blocks
        self._keys: list[int | None] = [None] * blocks
        self._cached: dict[int, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._watchers: dict[int, OnReuse] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def key(self, block: int) -> int | None:
        """What the block is known to hold: the stamp of its last token."""
        return self._keys[block]

    def references(self, block: int) -> int:
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """Hands out `count` blocks from the front of the queue. Raises NoBlocks, without any change."""
        if count > len(self._free):
            raise NoBlocks(f"{count} blocks wanted, {len(self._free)} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            watcher = self._watchers.pop(block, None)
            if watcher is not None:
                watcher(block)
        for block in taken:
            self.uncache(block)
            self._references[block] = 1
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Gives references back; the first of `blocks` is to be handed out before the others."""
        first: list[int] = []
        for block in blocks:
            self._release(block)
            if not self._references[block]:
                if self._keys[block] is None:
                    first.append(block)
                else:
                    self._free[block] = None
        for block in reversed(first):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def unpin(self, blocks: Iterable[int], on_reuse: OnReuse) -> None:
        """Gives references back, to the tail; `on_reuse` is called when a block is handed out again."""
        for block in blocks:
            self._release(block)
            self._watchers[block] = on_reuse
            if not self._references[block]:
                self._free[block] = None

    def cache(self, block: int, key: int) -> None:
        """The block is whole now, and can be found by what it holds."""
        if self._caching and self._keys[block] is None:
            self._keys[block] = key
            self._cached.setdefault(key, {})[block] = None

    def uncache(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            blocks = self._cached[key]
            del blocks[block]
            if not blocks:
                del self._cached[key]

    def find(self, keys: Sequence[int]) -> list[int]:
        """The blocks that hold the longest prefix of `keys`."""
        found: list[int] = []
        for key in keys:
            blocks = self._cached.get(key)
            if blocks is None:
                break
            found.append(next(iter(blocks)))
        return found

    def reset(self) -> None:
        """Forgets what blocks hold; every watcher is told first. All blocks must be free."""
        assert len(self._free) == self.size, "a pool is reset only while nothing is referenced"
        for block in list(self._watchers):
            self._watchers.pop(block)(block)
        for block in range(self.size):
            self.uncache(block)

    def check(self) -> None:
        assert self._references.count(0) == len(self._free), "free queue and references differ"
        assert not any(map(self._references.__getitem__, self._free)), "a block in use is in the free queue"

    def _release(self, block: int) -> None:
        assert self._references[block] > 0, f"block {block} was given back too often"
        self._references[block] -= 1
