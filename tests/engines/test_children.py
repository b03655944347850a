"""The harness's promise about processes: watched while they start, and gone afterwards, whatever happens.

Real processes, small Python programs instead of engines. Waiting is for conditions with a bound, never for a time.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engines.children import SITE, Child, ChildFailed, ChildSettings
from tests.engines.model import REPOSITORY
from tests.ports import free_ports

BOUND_S = 20.0

PARENT_OF_ONE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def program(tmp_path: Path, code: str, cores: frozenset[int] | None = None) -> ChildSettings:
    return ChildSettings(
        name="program",
        command=(sys.executable, "-c", code),
        log=tmp_path / "program.log",
        env={},
        cores=cores,
    )


async def printed(child: Child, word: str) -> list[str]:
    """Wait until the child has printed a line that starts with `word`; return the line's words."""

    def line() -> list[str]:
        lines = child.settings.log.read_text().splitlines()
        return next((found.split() for found in lines if found.startswith(word)), [])

    async def probe() -> bool:
        return bool(line())

    await child.ready(probe, BOUND_S)
    return line()


def gone(pids: Sequence[int]) -> bool:
    """Wait until none of the processes runs any more."""
    handles = []
    for pid in pids:
        try:
            handles.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    try:
        return all(select.select([handle], [], [], BOUND_S)[0] for handle in handles)
    finally:
        for handle in handles:
            os.close(handle)


def test_free_ports_are_different() -> None:
    assert len(set(free_ports(20))) == 20


async def test_early_death_shows_the_end_of_the_log(tmp_path: Path) -> None:
    child = await Child.start(program(tmp_path, "print('no such model'); raise SystemExit(3)"))

    async def never() -> bool:
        return False

    with pytest.raises(ChildFailed, match=r"status 3[\s\S]*no such model"):
        await child.ready(never, BOUND_S)
    await child.stop()


async def test_late_child_is_a_failure(tmp_path: Path) -> None:
    child = await Child.start(program(tmp_path, "import time; print('loading', flush=True); time.sleep(600)"))
    await printed(child, "loading")

    async def never() -> bool:
        return False

    try:
        with pytest.raises(ChildFailed, match=r"not ready within 0 s[\s\S]*loading"):
            await child.ready(never, 0.2)
    finally:
        await child.stop()
    assert child.returncode == -signal.SIGTERM


async def test_stop_ends_the_whole_group(tmp_path: Path) -> None:
    child = await Child.start(program(tmp_path, PARENT_OF_ONE))
    grandchild = int((await printed(child, "child"))[1])
    await child.stop()
    assert gone([child.pid, grandchild])


async def test_stop_ends_who_ignores_sigterm_and_who_is_stopped(tmp_path: Path) -> None:
    deaf = await Child.start(program(tmp_path, DEAF))
    await printed(deaf, "deaf")
    await deaf.stop(grace_s=0.2)
    assert deaf.returncode == -signal.SIGKILL

    stopped = await Child.start(program(tmp_path / "stopped", PARENT_OF_ONE))
    await printed(stopped, "child")
    stopped.signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    await stopped.stop()
    assert stopped.returncode == -signal.SIGTERM


HARNESS = """
import asyncio, pathlib, sys
from tests.engines.test_children import PARENT_OF_ONE, Child, printed, program
async def main():
    child = await Child.start(program(pathlib.Path(sys.argv[1]), PARENT_OF_ONE))
    print("pids", child.pid, (await printed(child, "child"))[1], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_nothing_outlives_a_harness_that_is_killed(tmp_path: Path) -> None:
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    with harness:
        assert harness.stdout is not None
        pids = [int(word) for word in harness.stdout.readline().split()[1:]]
        assert len(pids) == 2
        harness.kill()
    assert gone(pids)


def last_core() -> int:
    return max(os.sched_getaffinity(0))


async def test_child_stays_on_its_cores(tmp_path: Path) -> None:
    wanted = frozenset({last_core()})
    everywhere = f"os.sched_setaffinity(0, {set(os.sched_getaffinity(0))})"
    code = f"import os; {everywhere}; print('cores', *os.sched_getaffinity(0), flush=True)"
    child = await Child.start(program(tmp_path, code, cores=wanted))
    await asyncio.wait_for(child.wait(BOUND_S), BOUND_S)
    assert child.settings.log.read_text().split() == ["cores", str(last_core())]


@pytest.mark.nixl
def test_progress_thread_is_calmed() -> None:
    code = "import nixl._api, nixl_cu12._bindings as b; c = b.nixlAgentConfig(); c.pthrDelay = 0; print(c.pthrDelay)"
    output = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SITE)}, capture_output=True, check=True
    )
    assert output.stdout.split() == [b"1000"]
