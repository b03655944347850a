"""One process of a chaos run: started, killed, stopped, resumed, its wall clock stepped, what it says line by line.

It may come and go under the same name and address. Its log is kept in the run's folder. JSON lines on its standard
output go to `on_line`; commands to it are lines on its standard input.
Invariant: a process dies with the run that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.chaos.network import Network

REPOSITORY: Final = Path(__file__).resolve().parents[2]
STOP_S: Final = 10.0
TAIL_LINES: Final = 25
UCX_ABORT: Final = "Fatal: unexpected error: Endpoint timeout"
FAKETIME: Final = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
Line = dict[str, Any]


class PartyFailed(RuntimeError):
    """A process did not do what the run needs; the message ends with its log."""


def clocks_can_step() -> bool:
    """Whether there is faketime here."""
    return Path(FAKETIME).exists()


def _path() -> str:
    return ":".join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])


class Party:
    """`command` is run as `name` in `network`; its log and clock are files in `folder`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        network: Network,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[Line], None] = lambda _: None,
    ) -> None:
        self.name: Final = name
        self._command: Final = tuple(command)
        self._network: Final = network
        self._folder: Final = folder
        self._environment: Final = dict(environment or {})
        self._on_line: Final = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._stopping = False
        self.stopped = False
        self.runs = 0
        """How often it was started."""
        self.died: str = ""
        """What it said when it ended by itself, "" if it has not."""

    @property
    def ended_by_ucx(self) -> bool:
        """Whether it ended by itself, and not by a fault of ours: UCX aborts a process whose peer over TCP is silent.

        Seen once, while it answered a READ of a borrower that was stopped. As good as a kill of it.
        """
        return UCX_ABORT in self.died.rpartition("\n")[2]

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Raises PartyFailed if it does not run."""
        if self._process is None or self._process.returncode is not None:
            raise PartyFailed(f"{self.name} does not run:\n{self.log_end()}")
        return self._process.pid

    async def start(self) -> None:
        if self.running:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self.runs += 1
        self.died = ""
        self._stopping = False
        setpriv = shutil.which("setpriv")
        dying = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._network.prefix(self.name),
                *dying,
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": _path(), **self._clock(), **self._environment},
            )
        self._reader = asyncio.create_task(self._read(self._process), name=f"output of {self.name}")

    async def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        await self._end(signal.SIGKILL)

    async def terminate(self) -> None:
        """SIGTERM; SIGKILL after STOP_S."""
        await self._end(signal.SIGTERM)

    def signal_end(self) -> None:
        """SIGTERM, and no waiting."""
        self._stopping = True
        os.kill(self.pid, signal.SIGTERM)

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        if self.running:
            os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    def step_clock(self, seconds: int) -> None:
        """Its wall clock is so far from the machine's from now on (within a second); monotonic clocks stay."""
        path = self._folder / f"{self.name}.clock"
        fresh = path.with_suffix(".new")
        fresh.write_text(f"{seconds:+d}\n")
        fresh.replace(path)

    def say(self, line: str) -> None:
        """A command to it; lost if it does not run."""
        if self._process is not None and self._process.stdin is not None and self.running:
            with contextlib.suppress(OSError, RuntimeError):
                self._process.stdin.write(line.encode() + b"\n")

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.log"

    def log_end(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    async def _end(self, number: int) -> None:
        process, self._stopping = self._process, True
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.send_signal(number)
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
        self.stopped = False

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(b"{"):  # libraries write to standard output, too
                with contextlib.suppress(ValueError):
                    self._on_line(json.loads(line))
        status = await process.wait()
        if not self._stopping:
            at = time.strftime("%H:%M:%S")
            self.died = f"{self.name} ended by itself at {at} with status {status}; its log ends:\n{self.log_end()}"

    def _clock(self) -> dict[str, str]:
        if not clocks_can_step():
            return {}
        self.step_clock(0)
        return {
            "LD_PRELOAD": FAKETIME,
            "FAKETIME_TIMESTAMP_FILE": str(self._folder / f"{self.name}.clock"),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }
