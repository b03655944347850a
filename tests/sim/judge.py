"""The judge: stands outside, knows which bytes each block should hold, and believes nobody's word for it.

It sees every write to a lender's memory, every seal written, every block that a borrower uses, and every request from
arrival to end. It decides by content alone: a borrowed block is right if it holds the stamps of exactly the borrower's
own tokens at that position. Invariant: it changes nothing, so a seed runs alike with or without it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvlease.connector.seal import VALUE_BYTES

from tests.sim.memory import EngineMemory, Stamps
from tests.sim.world import World


class Fault(StrEnum):
    """What must never happen."""

    WRONG_BYTES = "wrong bytes used"
    OVERWRITTEN = "a block in use was overwritten"
    WRITE_UNDER_SEAL = "a write under a whole seal"
    HELD_BACK = "a request was held back too long"
    READ_TWICE = "a request read twice"
    UNFINISHED = "a request did not finish"
    OUTLIVED = "a lease outlived its longest lifetime"
    LOST = "a lease that was acknowledged was lost without a cause"
    UNDONE = "an end that was acknowledged was undone"
    STALE = "a replica answered beyond its staleness bound"
    LEAK = "blocks were not given back"
    STUCK = "the healed system does not work"


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    fault: Fault
    at_ms: int
    what: str

    def __str__(self) -> str:
        return f"t={self.at_ms}: {self.fault}: {self.what}"


_MAX_OF_A_KIND: Final = 5
"""Violations kept for each fault: one is enough to be red."""


class Judge:
    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[Violation] = []
        self.counts: Counter[str] = Counter()
        self._found: Counter[Fault] = Counter()
        self._seals: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        """By memory and block: address and bytes, as written, of each seal that speaks for the block."""

    @property
    def now_ms(self) -> int:
        return self._world.now_ms

    def found(self, fault: Fault, what: str) -> None:
        self._found[fault] += 1
        if self._found[fault] <= _MAX_OF_A_KIND:
            self.violations.append(Violation(fault=fault, at_ms=self._world.now_ms, what=what))

    def expect(self, held: bool, fault: Fault, what: str) -> None:
        if not held:
            self.found(fault, what)

    # -- lenders --------------------------------------------------------------------------------------------------

    def sealed(self, memory: EngineMemory, address: int, blocks: tuple[int, ...]) -> None:
        """The lender has written this seal: it says of these blocks, from now on, that they are untouched."""
        slot = memory.slot(0, address)
        assert slot is not None
        for block in blocks:
            self._seals.setdefault((id(memory), block), []).append((address, slot[:VALUE_BYTES]))

    def lender_wrote(self, memory: EngineMemory, rank: int, block: int) -> None:
        seals = self._seals.get((id(memory), block))
        if not seals:
            return
        whole = [(address, value) for address, value in seals if (memory.slot(rank, address) or b"").startswith(value)]
        if whole:
            self.found(Fault.WRITE_UNDER_SEAL, f"block {block} of rank {rank}")
        self._seals[id(memory), block] = whole

    # -- borrowers ------------------------------------------------------------------------------------------------

    def used(self, who: str, memory: EngineMemory, blocks: dict[int, Stamps]) -> None:
        """A borrower takes these local blocks for the KV of its own tokens, whose stamps stand beside them."""
        self.counts["used"] += 1
        self._compare(Fault.WRONG_BYTES, who, memory, blocks)

    def holds(self, who: str, memory: EngineMemory, blocks: dict[int, Stamps]) -> None:
        """These blocks are in use, computed or borrowed, and nobody may have written to them since."""
        self._compare(Fault.OVERWRITTEN, who, memory, blocks)

    def _compare(self, fault: Fault, who: str, memory: EngineMemory, blocks: dict[int, Stamps]) -> None:
        for rank in range(memory.ranks):
            for block, stamps in blocks.items():
                if memory.block(rank, block)[: len(stamps)] != stamps:
                    self.found(fault, f"{who}: block {block} of rank {rank}")
                    return
