"""One-sided READs, as the hardware does them: no process of the lender takes part.

Each block is sampled at an instant of its own and lands in the borrower's memory then, whoever owns the local block by
that time. A READ may be slow, fail half way, or land its rest after everybody has given up on it. A seal READ samples
its two words at two instants. The address decides what is read: a new incarnation there answers for the old one.
Invariant: after DONE or FAILED nothing of a READ lands any more.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from kvlease.connector.seal import VALUE_BYTES, Proof

from tests.sim.memory import EngineMemory
from tests.sim.network import Network


class ReadState(StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Fabric:
    """Which memory answers at each address, which is a party's name; None while the engine is down."""

    def __init__(self, network: Network) -> None:
        self.network: Final = network
        self.memories: dict[str, EngineMemory | None] = {}


class BlockRead:
    """The READ of one rank's share of some blocks: `pairs` of remote and local block."""

    def __init__(
        self, fabric: Fabric, address: str, rank: int, pairs: tuple[tuple[int, int], ...], into: EngineMemory
    ) -> None:
        self.state = ReadState.PENDING
        self.landed_late = 0
        """Blocks that landed after `expect_late` was called."""
        self._late = False
        self._fabric = fabric
        self._address = address
        self._rank = rank
        self._into = into
        self._left = len(pairs)
        world, faults = fabric.network.world, fabric.network.faults
        duration = world.between(1, faults.long_ms) if world.chance(faults.read_slow) else world.between(1, 3)
        hangs = world.chance(faults.read_hangs)
        fails = world.chance(faults.read_fails)
        if fails:
            world.hardware(world.between(1, duration), self._fail)
        for pair in pairs:
            delay = world.between(1, duration)
            if hangs and world.chance(0.6):
                delay += world.between(40, 300)
            world.hardware(delay, lambda pair=pair: self._copy(pair))  # type: ignore[misc]  # mypy: lambda default

    def expect_late(self) -> None:
        self._late = True

    def _copy(self, pair: tuple[int, int]) -> None:
        if self.state is not ReadState.PENDING:
            return
        remote, local = pair
        memory = self._fabric.memories.get(self._address)
        if memory is None or self._rank >= memory.ranks or remote >= memory.blocks:
            self._fail()
            return
        self._into.write(self._rank, local, 0, memory.block(self._rank, remote))
        self.landed_late += self._late
        self._left -= 1
        if not self._left:
            self.state = ReadState.DONE

    def _fail(self) -> None:
        if self.state is ReadState.PENDING:
            self.state = ReadState.FAILED


class SlotRead:
    """The READ of one seal's slot."""

    def __init__(self, fabric: Fabric, address: str, proof: Proof) -> None:
        self.state = ReadState.PENDING
        self.slot = b""
        self._fabric = fabric
        self._address = address
        self._proof = proof
        self._value = self._hash = b""
        world, faults = fabric.network.world, fabric.network.faults
        first = world.between(0, faults.long_ms) if world.chance(faults.read_slow * 0.3) else world.between(0, 1)
        gap = world.between(1, faults.long_ms) if world.chance(faults.seal_torn) else 0
        value_first = world.chance(0.5)
        if world.chance(faults.read_fails):
            world.hardware(first, self._fail)
        elif world.chance(faults.read_hangs * 0.5):
            return  # never answers: the limit is for this
        world.hardware(first, lambda: self._sample(value=value_first, record_hash=not value_first))
        world.hardware(first + gap, lambda: self._sample(value=not value_first, record_hash=value_first))

    def _sample(self, *, value: bool, record_hash: bool) -> None:
        if self.state is not ReadState.PENDING:
            return
        memory = self._fabric.memories.get(self._address)
        slot = None if memory is None else memory.slot(self._proof.seal.tp_rank, self._proof.seal.address)
        if slot is None:
            self._fail()
            return
        if value:
            self._value = slot[:VALUE_BYTES]
        if record_hash:
            self._hash = slot[VALUE_BYTES:]
        if self._value and self._hash:
            self.slot = self._value + self._hash
            self.state = ReadState.DONE

    def _fail(self) -> None:
        if self.state is ReadState.PENDING:
            self.state = ReadState.FAILED
