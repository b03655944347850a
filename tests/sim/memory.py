"""What an engine's registered memory holds: KV blocks as stamps, seal tables as bytes, per rank.

One-sided READs look here whatever the engine's processes are doing. A new incarnation is a new `EngineMemory` at the
same addresses. Invariant: a write to a KV block is told to the watcher before the next event can read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvlease.connector.seal import BROKEN, SLOT_BYTES, VALUE_BYTES, pack_value, slot_offset, table_bytes

from tests.sim.tokens import BLOCK_TOKENS

TABLE_ADDRESS: Final = 0x7F00_0000_0000
"""Where every rank of every engine has its table: addresses are no identity."""

Stamps = tuple[int, ...]


class EngineMemory:
    """The memory of one incarnation. `on_write` is called for each block written, with rank and block."""

    def __init__(
        self, *, ranks: int, blocks: int, slots: int, garbage: int, on_write: Callable[[int, int], None] | None = None
    ) -> None:
        self.ranks: Final = ranks
        self.blocks: Final = blocks
        self._kv = [[[-garbage] * BLOCK_TOKENS for _ in range(blocks)] for _ in range(ranks)]
        self._tables = [bytearray(table_bytes(slots)) for _ in range(ranks)]
        self._on_write = on_write

    # -- KV -------------------------------------------------------------------------------------------------------

    def block(self, rank: int, block: int) -> Stamps:
        return tuple(self._kv[rank][block])

    def write(self, rank: int, block: int, offset: int, stamps: Stamps) -> None:
        self._kv[rank][block][offset : offset + len(stamps)] = stamps
        if self._on_write is not None:
            self._on_write(rank, block)

    # -- seals ----------------------------------------------------------------------------------------------------

    def write_seal(self, slot: int, value: int) -> None:
        """In every rank's table."""
        for rank in range(self.ranks):
            self._put(rank, slot_offset(slot), pack_value(value))

    def write_hash(self, slot: int, record_hash: bytes) -> None:
        for rank in range(self.ranks):
            self._put(rank, slot_offset(slot) + VALUE_BYTES, record_hash)

    def break_seal(self, slot: int) -> None:
        for rank in range(self.ranks):
            self._put(rank, slot_offset(slot), pack_value(BROKEN))

    def slot(self, rank: int, address: int) -> bytes | None:
        """The bytes at this address; None if it is not within the rank's table."""
        offset = address - TABLE_ADDRESS
        if not 0 <= rank < self.ranks or not 0 <= offset <= len(self._tables[rank]) - SLOT_BYTES:
            return None
        return bytes(self._tables[rank][offset : offset + SLOT_BYTES])

    def _put(self, rank: int, offset: int, raw: bytes) -> None:
        self._tables[rank][offset : offset + len(raw)] = raw
