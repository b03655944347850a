"""One child process of the harness: started in a group of its own, logged to a file, watched, and surely stopped.

Knows nothing of engines. Invariant: whatever happens to this process (return, exception, Ctrl-C, SIGKILL), nothing it
started stays: `stop()` ends the whole process group, and `site/sitecustomize.py` asks the kernel to kill each Python
child whose parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.engines.model import REPOSITORY

SITE: Final = Path(__file__).resolve().parent / "site"
TERM_GRACE_S: Final = 15.0
"""From SIGTERM to SIGKILL. Longer than an engine's own shut-down takes."""
POLL_S: Final = 0.1
TAIL_LINES: Final = 30


class ChildFailed(RuntimeError):
    """A child ended, or was not ready in time. The message holds the last lines of its log."""


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSettings:
    """What to run. `cores`: CPU numbers it may use; None leaves the choice to the kernel."""

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str]
    cores: frozenset[int] | None = None

    def environment(self) -> dict[str, str]:
        """Ours, with this child's own and what `sitecustomize.py` reads."""
        path = os.pathsep.join([str(SITE), str(REPOSITORY)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        environment["KVLEASE_TEST_HARNESS_PID"] = str(os.getpid())
        environment.pop("KVLEASE_TEST_CORES", None)
        if self.cores is not None:
            environment["KVLEASE_TEST_CORES"] = ",".join(str(core) for core in sorted(self.cores))
        return {**environment, **self.env}


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    """Command line that runs a module with the interpreter that runs us."""
    return (sys.executable, "-m", module, *arguments)


class Child:
    """A running child. Use `Child.start`; the caller owns it and calls `stop`."""

    def __init__(self, settings: ChildSettings, process: asyncio.subprocess.Process) -> None:
        self.settings = settings
        self._process = process

    @classmethod
    async def start(cls, settings: ChildSettings) -> Child:
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        with settings.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *settings.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                cwd=REPOSITORY,
                env=settings.environment(),
                start_new_session=True,
            )
        return cls(settings, process)

    @property
    def pid(self) -> int:
        """Process id, and id of the process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def failure(self, what: str) -> ChildFailed:
        """An error that shows the end of the log."""
        name, log = self.settings.name, self.settings.log
        return ChildFailed(f"{name} {what}; last lines of {log}:\n{tail(log)}")

    def check(self) -> None:
        """Raise ChildFailed if the child has ended."""
        if self.returncode is not None:
            raise self.failure(f"ended with status {self.returncode}")

    async def ready(self, probe: Callable[[], Awaitable[bool]], timeout_s: float) -> float:
        """Wait until `probe` says yes; return the seconds it took. Raises ChildFailed if the child ends or is late."""
        started = time.monotonic()
        while True:
            self.check()
            if await probe():
                return time.monotonic() - started
            if time.monotonic() - started > timeout_s:
                raise self.failure(f"was not ready within {timeout_s:.0f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), POLL_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child and everything in its group; nothing happens if all of them are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def wait(self, timeout_s: float) -> int:
        """Wait for the end and return the status. Raises TimeoutError."""
        return await asyncio.wait_for(self._process.wait(), timeout_s)

    async def stop(self, grace_s: float = TERM_GRACE_S) -> None:
        """SIGTERM, then SIGKILL to what is left of the group. Returns when the child is gone; may be called again."""
        try:
            if self.returncode is None:
                self.signal(signal.SIGCONT)
                self.signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await self.wait(grace_s)
        finally:
            self.signal(signal.SIGKILL)
            await self._process.wait()
