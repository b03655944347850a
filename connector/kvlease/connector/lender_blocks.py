"""How many blocks some leases hold, those that they have in common counted once.

Pure. Leases share blocks where their tokens begin alike (a system prompt, the branches of one request): the engine's
prefix cache gives both the same blocks from the first one on. So a lease is a path in a tree of runs of blocks, and one
that has a beginning in common with others costs a comparison of it; one that has none costs nothing by the block.
Where the engine has computed one beginning twice and mixes the two, a block may count more than once, never not at all.

Invariant: the count is that of the different beginnings of the lists added and not dropped.
"""

from __future__ import annotations

from collections.abc import Iterable


class _Run:
    """Blocks that are in the same leases, one after the other."""

    __slots__ = ("after", "blocks", "leases")

    def __init__(self, blocks: tuple[int, ...], leases: int, after: dict[int, _Run]) -> None:
        self.blocks = blocks
        self.leases = leases
        """Lists that go through it. Those that are in no run after it end here."""
        self.after = after
        """By their first block."""

    def split(self, place: int) -> None:
        rest = _Run(self.blocks[place:], self.leases, self.after)
        self.blocks, self.after = self.blocks[:place], {rest.blocks[0]: rest}

    def join(self) -> None:
        """With the only run after it, if every list goes on there."""
        if len(self.after) != 1:
            return
        (rest,) = self.after.values()
        if rest.leases == self.leases:
            self.blocks, self.after = self.blocks + rest.blocks, rest.after


class HeldBlocks:
    """The blocks of some leases: each KV group of a lease is one list here."""

    def __init__(self) -> None:
        self.count = 0
        self._first: dict[int, _Run] = {}

    def more(self, groups: Iterable[tuple[int, ...]]) -> int:
        """How many would come on top with these."""
        return sum(self._more(blocks) for blocks in groups)

    def add(self, groups: Iterable[tuple[int, ...]]) -> None:
        for blocks in groups:
            self._add(blocks)

    def drop(self, groups: Iterable[tuple[int, ...]]) -> None:
        """What was added once as these."""
        for blocks in groups:
            self._drop(blocks)

    def _more(self, blocks: tuple[int, ...]) -> int:
        runs, place = self._first, 0
        while place < len(blocks) and (run := runs.get(blocks[place])) is not None:
            alike = _alike(run.blocks, blocks, place)
            place += alike
            if alike < len(run.blocks):
                break
            runs = run.after
        return len(blocks) - place

    def _add(self, blocks: tuple[int, ...]) -> None:
        runs, place = self._first, 0
        while place < len(blocks):
            run = runs.get(blocks[place])
            if run is None:
                runs[blocks[place]] = _Run(blocks[place:], 1, {})
                self.count += len(blocks) - place
                return
            alike = _alike(run.blocks, blocks, place)
            if alike < len(run.blocks):
                run.split(alike)
            run.leases += 1
            place += alike
            runs = run.after

    def _drop(self, blocks: tuple[int, ...]) -> None:
        runs, place = self._first, 0
        last: _Run | None = None
        while place < len(blocks):
            run = runs[blocks[place]]
            run.leases -= 1
            if not run.leases:  # nor is any other list in a run after it
                del runs[blocks[place]]
                self.count -= len(blocks) - place
                break
            place += len(run.blocks)
            last, runs = run, run.after
        if last is not None:
            last.join()

    def check(self, lists: Iterable[tuple[int, ...]]) -> None:
        """Recounts; raises AssertionError unless these are the lists that are held. For tests and the simulation."""
        beginnings: set[tuple[int, int]] = set()
        for blocks in lists:
            before = 0
            for block in blocks:
                beginnings.add((before, block))
                before = hash((before, block))
        assert self.count == len(beginnings), f"{self.count} blocks held, recounted {len(beginnings)}"


def _alike(run: tuple[int, ...], blocks: tuple[int, ...], place: int) -> int:
    """How many blocks from `place` on are those of the run. The first is."""
    least, most = 1, min(len(run), len(blocks) - place)
    if run[:most] == blocks[place : place + most]:
        return most
    while most - least > 1:  # so many are alike, so many are not
        middle = (least + most) // 2
        if run[least:middle] == blocks[place + least : place + middle]:
            least = middle
        else:
            most = middle
    return least
