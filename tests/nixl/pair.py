"""Starts one lender and its borrowers as real processes, follows what they report, and surely ends them.

Used by the tests and by `python -m tests.nixl`. Invariant: leaving `Pair` ends every process it started and leaves
nothing in /dev/shm.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvlease.connector.seal_table import sweep

from tests.nixl.messages import (
    BorrowerSettings,
    Counts,
    Fault,
    LenderSettings,
    Ready,
    Transport,
    Workload,
    add,
    to_line,
)

REPOSITORY: Final = Path(__file__).resolve().parents[2]
START_S: Final = 30.0
TAIL_BYTES: Final = 4_000


class PairFailed(RuntimeError):
    """A process ended by itself, or a wait ran out. The message has the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSettings:
    reads: int
    """In all; each borrower posts its share."""
    seed: int = 1
    transport: Transport = Transport.SM
    borrowers: int = 2
    fault: Fault = Fault.NONE
    workload: Workload = Workload.CHURN
    in_flight: int = 6
    read_limit_ms: int = 5_000
    blocks: int = 160
    block_bytes: int = 4_096


class Pair:
    """A running pair. Open it with `async with`."""

    def __init__(self, settings: PairSettings) -> None:
        self.settings = settings
        self.ready: Ready | None = None
        self._tasks = asyncio.TaskGroup()
        self._changed = asyncio.Condition()
        self._counts: dict[int, Counts] = {}
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="kvlease-nixl-", ignore_cleanup_errors=True)
        self._socket = str(Path(self._folder.name) / "lender.sock")
        self._failed: PairFailed | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        try:
            await self.start_lender()
            for number in range(self.settings.borrowers):
                await self._start_borrower(number)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for name in ("borrower", "lender"):
                for key, process in self._running.items():
                    if key.startswith(name) and process.returncode is None:
                        process.send_signal(signal.SIGCONT)
                        process.terminate()
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(process.wait(), 3)
        finally:
            for process in self._running.values():
                if process.returncode is None:
                    process.kill()
            await self._tasks.__aexit__(None, None, None)
            self._folder.cleanup()
            sweep()

    # -- the lender -----------------------------------------------------------------------------------------------

    @property
    def lender(self) -> asyncio.subprocess.Process:
        return self._running["lender"]

    async def start_lender(self) -> Ready:
        """Starts the lender, again if it was killed, and waits until it lends."""
        self.ready = None
        settings = LenderSettings(
            socket=self._socket,
            seed=self.settings.seed,
            fault=self.settings.fault,
            workload=self.settings.workload,
            blocks=self.settings.blocks,
            block_bytes=self.settings.block_bytes,
        )
        await self._start("lender", "tests.nixl.lender", to_line(settings))
        await self._wait(lambda: self.ready is not None, START_S, "the lender")
        assert self.ready is not None
        return self.ready

    async def kill_lender(self) -> None:
        """SIGKILL; returns when the kernel has let go of it."""
        process = self._running.pop("lender")
        process.kill()
        await process.wait()

    async def stop_lender(self) -> None:
        """SIGSTOP; returns when every thread of it stands still."""
        self.lender.send_signal(signal.SIGSTOP)
        for _ in range(1_000):
            if all(state == "T" for state in _thread_states(self.lender.pid)):
                return
            await asyncio.sleep(0.005)
        raise PairFailed("the lender did not stop")

    def end_lease(self) -> None:
        """Has the lender of workload ONE_LEASE end its lease and write over its blocks."""
        self.lender.send_signal(signal.SIGUSR1)

    def continue_lender(self) -> None:
        self.lender.send_signal(signal.SIGCONT)

    # -- the borrowers --------------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        """All borrowers together, as last reported."""
        return add(list(self._counts.values()))

    @property
    def each(self) -> list[Counts]:
        return list(self._counts.values())

    async def until(self, condition: Callable[[Counts], bool], timeout_s: float) -> Counts:
        """Waits until all borrowers together have come so far; raises PairFailed if time or a process ends before."""
        await self._wait(lambda: condition(self.counts), timeout_s, "the borrowers")
        return self.counts

    async def finished(self, timeout_s: float) -> Counts:
        """Waits until every borrower has done its READs and ended."""
        everybody = self.settings.borrowers
        await self._wait(
            lambda: len(self._counts) == everybody and all(c.done for c in self._counts.values()),
            timeout_s,
            "the borrowers",
        )
        return self.counts

    async def _start_borrower(self, number: int) -> None:
        settings = BorrowerSettings(
            socket=self._socket,
            seed=self.settings.seed * 1_000 + number,
            reads=max(1, self.settings.reads // self.settings.borrowers),
            fault=self.settings.fault,
            block_bytes=self.settings.block_bytes,
            in_flight=self.settings.in_flight,
            read_limit_ms=self.settings.read_limit_ms,
        )
        await self._start(f"borrower{number}", "tests.nixl.borrower", to_line(settings))

    # -- processes ------------------------------------------------------------------------------------------------

    async def _start(self, name: str, module: str, argument: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "UCX_TLS": self.settings.transport.ucx_tls,
            "UCX_LOG_LEVEL": "error",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        with self._log(name).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                argument,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=REPOSITORY,
                env=environment,
            )
        self._running[name] = process
        self._tasks.create_task(self._follow(name, process))

    async def _follow(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            if not line.startswith(b"{"):  # NIXL's Python API logs to standard output
                continue
            said = json.loads(line)
            async with self._changed:
                if "pid" in said and "reads" in said:
                    self._counts[process.pid] = Counts(**said)
                else:
                    self.ready = Ready(**said)
                self._changed.notify_all()
        status = await process.wait()
        async with self._changed:
            if self._running.get(name) is process and status != 0:
                self._failed = PairFailed(f"{name} ended with status {status}; its log ends:\n{self._tail(name)}")
            self._changed.notify_all()

    async def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        async def met() -> None:
            async with self._changed:
                while not condition():
                    if self._failed is not None:
                        raise self._failed
                    await self._changed.wait()

        try:
            await asyncio.wait_for(met(), timeout_s)
        except TimeoutError:
            logs = "\n".join(f"{name}:\n{self._tail(name)}" for name in self._running)
            said = f"waited {timeout_s:.0f} s for {what}, who report {self.counts}\n{logs}"
            raise PairFailed(said) from None

    def _log(self, name: str) -> Path:
        return Path(self._folder.name) / f"{name}.log"

    def _tail(self, name: str) -> str:
        log = self._log(name)
        return log.read_bytes()[-TAIL_BYTES:].decode(errors="replace") if log.exists() else ""


def _thread_states(pid: int) -> list[str]:
    return [
        (thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in Path(f"/proc/{pid}/task").iterdir()
    ]
