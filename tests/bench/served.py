"""Programs of the benchmark in processes of their own: started, heard, measured, and surely ended.

A program says JSON, one marked line each: when it is ready, and its results. It ends when its standard input closes,
which happens at the latest when this process dies. Other lines on its standard output are its libraries' and are kept
only to explain a failure. Nothing here knows what a program does.
Invariant: leaving `Program` leaves no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

REPOSITORY: Final = Path(__file__).resolve().parents[2]
READY_S: Final = 60.0
"""Importing an inference engine takes tens of seconds on a small busy machine."""
END_S: Final = 5.0
LINE_BYTES: Final = 4 * 1024 * 1024
TAIL_BYTES: Final = 2_000
NOISE_LINES: Final = 10
MARK: Final = b"kvlease-bench "
"""Begins a line that the program itself says."""


class ProgramFailed(RuntimeError):
    """The program ended by itself or was late. The message has the end of what it wrote to standard error."""


class Program:
    """`python -m module arguments`, running between `async with` and its end."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._module: Final = module
        self._arguments: Final = arguments
        self._environment: Final = dict(environment or {})
        self._noise: Final[deque[bytes]] = deque(maxlen=NOISE_LINES)
        self._log: IO[bytes] | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the program has ended
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": _search_path(), **self._environment},
            limit=LINE_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        process = self._running
        try:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            if self._log is not None:
                self._log.close()

    @property
    def pid(self) -> int:
        return self._running.pid

    async def line(self, *, timeout_s: float = READY_S) -> object:
        """What it says next. Raises ProgramFailed."""
        stdout = self._running.stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while raw := await stdout.readline():
                    if raw.startswith(MARK):
                        return json.loads(raw.removeprefix(MARK))
                    self._noise.append(raw)
        except TimeoutError:
            raise ProgramFailed(f"{self._module} said nothing for {timeout_s:.0f} s\n{self._tail()}") from None
        raise ProgramFailed(f"{self._module} ended\n{self._tail()}")

    async def lines(self, *, timeout_s: float) -> AsyncIterator[object]:
        """Everything it says until it says null."""
        while (said := await self.line(timeout_s=timeout_s)) is not None:
            yield said

    def cpu_ns(self) -> int:
        """Processor time that all its threads have used so far, in nanoseconds. Linux only."""
        total = 0
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                total += int((thread / "schedstat").read_text().split()[0])
        return total

    def resident_bytes(self) -> int:
        """Memory that it occupies now. Linux only."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "the program is not started"
        return self._process

    def _tail(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - TAIL_BYTES))
        return b"".join([*self._noise, self._log.read()]).decode(errors="replace")


def _search_path() -> str:
    """The repository first, then what this process was given."""
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))


def say(said: object) -> None:
    """A program's side: one line to whoever started it."""
    sys.stdout.write(MARK.decode() + json.dumps(said) + "\n")
    sys.stdout.flush()


async def until_left() -> None:
    """A program's side: returns when the one who started it closes the pipe, or dies."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while await reader.read(1_024):
            pass
    finally:
        transport.close()
