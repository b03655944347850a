"""Local blocks that a late READ may still write into: kept out of use until it has landed or its agent is gone.

Pure. The scheduler's side holds one more reference on each block of a late load, so that the pool cannot hand it out.

Invariant: a block is referenced here exactly as often as late loads list it.
"""

from __future__ import annotations


class Quarantine:
    """Late loads by request id; with several ranks, a load is over when the last of them says so."""

    def __init__(self) -> None:
        self._late: dict[str, tuple[set[int], tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._late)

    @property
    def blocks(self) -> int:
        """References held, counted once per late load."""
        return sum(len(blocks) for _, blocks in self._late.values())

    def enter(self, request_id: str, rank: int, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Rank `rank`'s READ for this request is late: which blocks to take a reference on now."""
        late = self._late.get(request_id)
        if late is not None:
            late[0].add(rank)
            return ()
        self._late[request_id] = ({rank}, blocks)
        return blocks

    def leave(self, request_id: str, rank: int) -> tuple[int, ...]:
        """That READ can write no more: which references to give back now."""
        late = self._late.get(request_id)
        if late is None:
            return ()
        late[0].discard(rank)
        if late[0]:
            return ()
        del self._late[request_id]
        return late[1]
