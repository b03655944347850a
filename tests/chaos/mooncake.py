"""Failover of Mooncake's master on etcd with its operation log, measured as ours is: for the table of `failover.py`.

Two masters on a cluster of three etcd members, one client; the serving master is killed. Needs a Python that has
mooncake-transfer-engine-non-cuda, and nothing of it in ours. What it keeps is not what we keep: see tests/bench/peers.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from tests.chaos.party import REPOSITORY
from tests.etcd.cluster import ClusterSettings, etcd_cluster
from tests.ports import free_ports

MASTER: Final = ("--enable_ha=true", "--enable_oplog=true", "--rpc_address=127.0.0.1")
CLIENT: Final = REPOSITORY / "tests" / "bench" / "mooncake_client.py"
SERVES_S: Final = 40.0
SETTLES_S: Final = 4.0
"""For the second master to follow, and the log of operations to be written."""
GIVE_UP_S: Final = 60.0
ASK_EVERY_S: Final = 0.02
BYTES: Final = 1_000


class MooncakeFailed(RuntimeError):
    """It does not run here, or not within the time."""


async def failover(python: Path) -> tuple[float, float]:
    """Once: seconds from the kill to the next good get of what was there, and to the next put.

    Raises MooncakeFailed.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvlease-mooncake-"))
    binary = python.parent / "mooncake_master"
    if not binary.exists():
        raise MooncakeFailed(f"there is no {binary}")
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(etcd_cluster(ClusterSettings(folder=folder / "etcd")))
        members = ";".join(cluster.endpoints)
        first = await _master(stack, binary, members, folder / "first.log")
        line = await _client(stack, python, members, folder / "client.log")
        end_s = time.monotonic() + SERVES_S
        while not await line.ask(f"put kept {BYTES}"):
            if time.monotonic() > end_s:
                raise MooncakeFailed(f"nothing was put within {SERVES_S:g} s; logs in {folder}")
            line = await _client(stack, python, members, folder / "client.log")
        await _master(stack, binary, members, folder / "second.log")
        await asyncio.sleep(SETTLES_S)
        if not await line.ask("get kept"):
            raise MooncakeFailed(f"what was put is not there; logs in {folder}")
        first.kill()
        began_s = time.monotonic()
        got_s = put_s = 0.0
        number = 0
        while not (got_s and put_s):
            number += 1
            if not got_s and await line.ask("get kept"):
                got_s = time.monotonic() - began_s
            if not put_s and await line.ask(f"put new-{number} {BYTES}"):
                put_s = time.monotonic() - began_s
            if time.monotonic() - began_s > GIVE_UP_S:
                raise MooncakeFailed(f"get after {got_s:.1f} s, put after {put_s:.1f} s (0: never); logs in {folder}")
            await asyncio.sleep(ASK_EVERY_S)
        return got_s, put_s


async def _master(stack: AsyncExitStack, binary: Path, members: str, log: Path) -> asyncio.subprocess.Process:
    rpc, metrics = free_ports(2)
    flags = (*MASTER, f"--etcd_endpoints={members}", f"--rpc_port={rpc}", f"--metrics_port={metrics}")
    with log.open("ab") as said:
        process = await asyncio.create_subprocess_exec(str(binary), *flags, stdout=said, stderr=said)
    stack.push_async_callback(_end, process)
    return process


class _Line:
    """The client's two pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, words: str) -> bool:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(words.encode() + b"\n")
            while line := await asyncio.wait_for(self._process.stdout.readline(), GIVE_UP_S):
                if line.startswith(b"@"):
                    return line.strip() == b"@ok"
        except (OSError, TimeoutError):
            return False
        return False


async def _client(stack: AsyncExitStack, python: Path, members: str, log: Path) -> _Line:
    with log.open("ab") as said:
        process = await asyncio.create_subprocess_exec(
            str(python),
            str(CLIENT),
            str(free_ports(1)[0]),
            f"etcd://{members}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
            env=os.environ,
        )
    stack.push_async_callback(_end, process)
    return _Line(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
