"""Real NIXL agents and the memory they register, for processes that share two cores.

The only file of the pair that imports NIXL. Processes die with their parent. Nothing here knows leases.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final, Protocol, cast

import numpy as np
from kvlease.connector.seal_reader import NixlAgent

from tests.nixl.content import Words

PROGRESS_DELAY_US: Final = 1_000
"""NIXL's Python API asks for 0, a progress thread that spins; with this it waits for events in between."""
_PR_SET_PDEATHSIG: Final = 1
_ADDR_NO_RANDOMIZE: Final = 0x0040000
_PERSONALITY_ASK: Final = 0xFFFFFFFF


class Agent(NixlAgent, Protocol):
    """What the pair uses of NIXL's agent beyond what a seal reader does."""

    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> bytes | str: ...
    def remove_remote_agent(self, agent: str) -> None: ...


def die_with_parent() -> None:
    """The kernel kills this process when its parent is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:
        sys.exit("the parent was gone before this process began")


def same_addresses_at_each_start() -> None:
    """Starts this process over without address randomisation, so that a restart finds its memory where it was."""
    libc = ctypes.CDLL(None, use_errno=True)
    current = libc.personality(_PERSONALITY_ASK)
    if current >= 0 and not current & _ADDR_NO_RANDOMIZE and libc.personality(current | _ADDR_NO_RANDOMIZE) >= 0:
        os.execv(sys.executable, sys.orig_argv)


class Memory:
    """Block memory: one row of words per block."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, blocks * block_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.block_bytes = block_bytes
        self.words: Words = np.frombuffer(self._mapping, dtype=np.uint64).reshape(blocks, -1)

    @property
    def region(self) -> tuple[int, int, int, str]:
        return (self.address, len(self._mapping), 0, "")

    def descriptors(self, blocks: Sequence[int], address: int | None = None) -> list[tuple[int, int, int]]:
        """Where these blocks lie, here or in a memory of the same shape that begins at `address`."""
        start = self.address if address is None else address
        return [(start + block * self.block_bytes, self.block_bytes, 0) for block in blocks]


def _nixl() -> tuple[ModuleType, ModuleType]:
    """NIXL's Python API and its bindings, from whichever wheel is here; the meta package would load torch to choose."""
    for wheel in ("nixl_cu12", "nixl_cu13"):
        try:
            return importlib.import_module(f"{wheel}._api"), importlib.import_module(f"{wheel}._bindings")
        except ModuleNotFoundError as error:
            if error.name != wheel:
                raise
    raise ModuleNotFoundError("this test needs NIXL: pip install nixl-cu12")


def open_agent(name: str, regions: Sequence[tuple[int, int, int, str]]) -> Agent:
    """A NIXL agent over UCX with these regions registered as DRAM. UCX reads its transports from the environment."""
    _api, _bindings = _nixl()
    stock = _bindings.nixlAgentConfig

    class CalmAgentConfig(stock):  # type: ignore[misc, valid-type]
        """The API sets the delay after construction; this keeps ours."""

        def __setattr__(self, attribute: str, value: object) -> None:
            stock.__setattr__(self, attribute, PROGRESS_DELAY_US if attribute == "pthrDelay" else value)

    _bindings.nixlAgentConfig = CalmAgentConfig  # type: ignore[attr-defined]
    try:
        agent = cast(Agent, _api.nixl_agent(name, _api.nixl_agent_config(backends=["UCX"])))
    finally:
        _bindings.nixlAgentConfig = stock  # type: ignore[attr-defined]
    agent.register_memory(agent.get_reg_descs(list(regions), "DRAM"))
    return agent


def state_of(agent: Agent, handle: object) -> str:
    """NIXL's state of a transfer, ERR where its bindings raise (each way a peer can fail has a type of its own)."""
    try:
        return agent.check_xfer_state(handle)
    except Exception:  # noqa: BLE001
        return "ERR"
