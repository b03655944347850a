"""Start-up code of every Python process that the fleet harness starts. Only the harness puts this folder on PYTHONPATH.

It ties the process to its parent's life, keeps it on the cores it was given, and calms NIXL's progress thread. All
three are about sharing a small machine between several engines; none changes what an engine computes. Nothing here
may import vLLM, NIXL or kvlease at start-up: it runs in children that need none of them.
"""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

PR_SET_PDEATHSIG = 1
NIXL_BINDINGS = ("nixl_cu12._bindings", "nixl_cu13._bindings")
NIXL_PROGRESS_DELAY_US = 1000
"""NIXL's Python API asks for 0, a thread that spins; on two cores, two idle engines would leave nothing for work."""


def orphaned(harness: int) -> bool:
    """Whether the parent went before we could ask the kernel to watch it: ours is the harness or in our own group."""
    parent = os.getppid()
    if parent == harness:
        return False
    if os.getpgrp() == os.getpid():  # started into a group of its own, by the harness or by a child
        return not os.path.exists(f"/proc/{harness}")
    try:
        return os.getpgid(parent) != os.getpgrp()
    except ProcessLookupError:
        return True


def die_with_parent() -> None:
    """SIGKILL when the parent goes: an engine core must not outlive an API server that was killed."""
    harness = os.environ.get("KVLEASE_TEST_HARNESS_PID")
    if harness is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if orphaned(int(harness)):
        os.kill(os.getpid(), signal.SIGKILL)


def keep_cores() -> None:
    """Stay on the given cores. vLLM's NIXL worker moves its thread to the last core, the same one for every engine."""
    cores = {int(core) for core in os.environ.get("KVLEASE_TEST_CORES", "").split(",") if core}
    if not cores:
        return
    os.sched_setaffinity(0, cores)

    def stay(pid: int, mask: object, /) -> None:
        """Ignores the request: the harness has placed this process."""

    os.sched_setaffinity = stay


def slow_progress_thread(bindings: ModuleType) -> None:
    """Let new agents' progress threads pause between rounds instead of spinning."""
    stock = bindings.nixlAgentConfig

    class CalmAgentConfig(stock):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            stock.__setattr__(self, name, NIXL_PROGRESS_DELAY_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = CalmAgentConfig  # type: ignore[attr-defined]


class CalmingLoader(importlib.abc.Loader):
    """Loads the NIXL bindings as their own loader would, then calms them."""

    def __init__(self, stock: importlib.abc.Loader) -> None:
        self._stock = stock

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._stock.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._stock.exec_module(module)
        slow_progress_thread(module)


class NixlBindingsFinder(importlib.abc.MetaPathFinder):
    """Waits for the bindings to be imported, so that processes without NIXL do not load it."""

    def __init__(self) -> None:
        self._inside = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in NIXL_BINDINGS or self._inside:
            return None
        self._inside = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._inside = False
        if spec is not None and spec.loader is not None:
            spec.loader = CalmingLoader(spec.loader)
        return spec


die_with_parent()
os.register_at_fork(after_in_child=die_with_parent)
keep_cores()
sys.meta_path.insert(0, NixlBindingsFinder())
