"""A block pool with the rules of vLLM's: references, a free queue, and one reuse callback per block.

Pure. Blocks whose hash is known are found again by it until they are handed out. Only what lending touches is here:
`touch`, `free`, `unpin` and `take`.

Invariant: a block is in the free queue exactly if nobody holds a reference; each hand-out fires its callback first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

OnReuse = Callable[[int], None]


class PoolExhausted(RuntimeError):
    """More blocks were asked for than are free; nothing was changed."""


class Pool:
    """`blocks` blocks, all free."""

    def __init__(self, blocks: int) -> None:
        self._references = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._watchers: dict[int, OnReuse] = {}
        self._hashes: list[bytes | None] = [None] * blocks
        self._by_hash: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Hands out the first `count` of the free queue, callbacks first; raises PoolExhausted."""
        if count > len(self._free):
            raise PoolExhausted(f"{count} blocks asked for, {len(self._free)} are free")
        taken = tuple(self._free.popitem(last=False)[0] for _ in range(count))
        for block in taken:
            watcher = self._watchers.pop(block, None)
            if watcher is not None:
                watcher(block)
        for block in taken:
            known = self._hashes[block]
            if known is not None:
                self._hashes[block] = None
                del self._by_hash[known]
            self._references[block] = 1
        return taken

    def touch(self, blocks: Sequence[int]) -> None:
        """One more reference on each block."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One reference less. Blocks without a known hash go first in the queue, in this order; the others last."""
        first: list[int] = []
        for block in self._dropped(blocks):
            if self._hashes[block] is None:
                first.append(block)
            else:
                self._free[block] = None
        for block in reversed(first):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def unpin(self, blocks: Sequence[int], on_reuse: OnReuse) -> None:
        """One reference less, last in the queue; `on_reuse` replaces the callback that a block had before."""
        for block in blocks:
            self._watchers[block] = on_reuse
        for block in self._dropped(blocks):
            self._free[block] = None

    def remember(self, block: int, block_hash: bytes) -> None:
        """The block holds this prefix now; if another block does already, it stays the one that is found."""
        if block_hash not in self._by_hash:
            self._hashes[block] = block_hash
            self._by_hash[block_hash] = block

    def prefix(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """The blocks that hold the longest known prefix."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def _dropped(self, blocks: Sequence[int]) -> list[int]:
        gone: list[int] = []
        for block in blocks:
            assert self._references[block] > 0, f"block {block} has no reference to give back"
            self._references[block] -= 1
            if not self._references[block]:
                gone.append(block)
        return gone
