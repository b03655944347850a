"""Reads seals from lenders' memory by NIXL, after the blocks have arrived.

The only place that knows how NIXL reads a few bytes; takes a NIXL agent that somebody else made (the engine's own, or
a test's) by its shape. Each READ lands in a slot of its own; a READ that is given up keeps its landing slot until NIXL
has let go of it, so that a late one cannot answer for another.

Invariant: the bytes handed out for a READ are those that this READ brought.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from kvlease.connector.seal import SLOT_BYTES, SealRef

LANDING_SLOTS: Final = 1_024
"""Seal READs in flight at once, those given up but not yet over included; beyond it a seal counts as unreadable."""


class NixlAgent(Protocol):
    """What is used of `nixl_agent` (NIXL's Python API, 1.x)."""

    def get_reg_descs(self, descs: Sequence[tuple[int, int, int, str]], mem_type: str) -> object: ...
    def register_memory(self, reg_list: object, backends: Sequence[str] = ...) -> object: ...
    def get_xfer_descs(self, descs: Sequence[tuple[int, int, int]], mem_type: str) -> object: ...
    def initialize_xfer(
        self, operation: str, local_descs: object, remote_descs: object, remote_agent: str, notif_msg: bytes = ...
    ) -> object: ...
    def transfer(self, handle: object) -> str: ...
    def check_xfer_state(self, handle: object) -> str: ...
    def release_xfer_handle(self, handle: object) -> object: ...


class SealReadState(StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class SealRead:
    """One READ of one slot; opaque to callers."""

    handle: object | None
    landing: int
    state: SealReadState
    data: bytes | None = None


class SealReader:
    """Seal READs of one borrower rank."""

    def __init__(self, agent: NixlAgent, slots: int = LANDING_SLOTS) -> None:
        self._agent = agent
        self._buffer = mmap.mmap(-1, slots * SLOT_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._free: deque[int] = deque(range(slots))
        self._given_up: list[SealRead] = []

    @property
    def region(self) -> tuple[int, int, int, str]:
        """The landing buffer, to be registered with the agent as DRAM before the first READ."""
        return (self._address, len(self._buffer), 0, "")

    @property
    def retired(self) -> int:
        """Landing slots that wait for NIXL to let go."""
        return len(self._given_up)

    def post(self, agent_name: str, seal: SealRef) -> SealRead:
        """Starts reading the slot that `seal` names from the lender's agent; never raises: failure is a state."""
        self._reap()
        if not self._free:
            return SealRead(None, -1, SealReadState.FAILED)
        landing = self._free.popleft()
        start = landing * SLOT_BYTES
        self._buffer[start : start + SLOT_BYTES] = bytes(SLOT_BYTES)
        try:
            local = self._agent.get_xfer_descs([(self._address + start, SLOT_BYTES, 0)], "DRAM")
            remote = self._agent.get_xfer_descs([(seal.address, SLOT_BYTES, 0)], "DRAM")
            handle = self._agent.initialize_xfer("READ", local, remote, agent_name, b"")
        except Exception:  # noqa: BLE001 - NIXL's bindings raise types of their own for each way a peer can fail
            self._free.append(landing)
            return SealRead(None, -1, SealReadState.FAILED)
        read = SealRead(handle, landing, SealReadState.PENDING)
        try:
            self._agent.transfer(handle)
        except Exception:  # noqa: BLE001
            self._finish(read, SealReadState.FAILED)
        return read

    def poll(self, read: SealRead) -> SealReadState:
        """Looks once; `read.data` has the slot's bytes when the state is DONE."""
        if read.state is not SealReadState.PENDING:
            return read.state
        try:
            state = self._agent.check_xfer_state(read.handle)
        except Exception:  # noqa: BLE001
            state = "ERR"
        if state == "DONE":
            start = read.landing * SLOT_BYTES
            read.data = bytes(self._buffer[start : start + SLOT_BYTES])
            self._finish(read, SealReadState.DONE)
        elif state != "PROC":
            self._finish(read, SealReadState.FAILED)
        return read.state

    def give_up(self, read: SealRead) -> None:
        """Nobody waits for this READ any more."""
        if read.state is SealReadState.PENDING:
            self._finish(read, SealReadState.FAILED)

    def _finish(self, read: SealRead, state: SealReadState) -> None:
        pending = read.state is SealReadState.PENDING and state is SealReadState.FAILED
        read.state = state
        if not self._release(read, sure=not pending):
            self._given_up.append(read)

    def _release(self, read: SealRead, *, sure: bool) -> bool:
        """Lets go of the handle; the landing slot is free only if nothing can land in it any more."""
        try:
            if not sure and self._agent.check_xfer_state(read.handle) == "PROC":
                return False
        except Exception:  # noqa: BLE001, S110 - a handle in error: only the release below tells whether it is over
            pass
        try:
            self._agent.release_xfer_handle(read.handle)
        except Exception:  # noqa: BLE001 - NIXL refuses to release a transfer that may still be writing
            return False
        self._free.append(read.landing)
        return True

    def _reap(self) -> None:
        self._given_up = [read for read in self._given_up if not self._release(read, sure=False)]
