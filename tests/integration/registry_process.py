"""A registry in a process of its own, which a test can kill, stop, let go on and terminate.

`kvlease registry` as it is run by hand; its log goes nowhere.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvlease.registry.client import RegistryClient

from tests.integration.registry_peer import soon
from tests.ports import free_port

START_S = 30.0
"""A Python process that imports gRPC, on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryProcess:
    endpoint: str
    process: asyncio.subprocess.Process

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    def stand_still(self) -> None:
        """Connections stay, the kernel takes new ones, and nobody answers."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """As a rolling upgrade does."""
        self.process.terminate()


@asynccontextmanager
async def registry_process(endpoint: str = "", *arguments: str) -> AsyncIterator[RegistryProcess]:
    """A registry that serves, on a free port or on `endpoint`, with further flags."""
    where = endpoint or f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvlease.cli", "registry", "--listen", where, "--metrics-listen", "none", *arguments),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with RegistryClient(where) as client:
            await soon(client.replicas.connected(patient=True), "the registry to start", limit_s=START_S)
        yield RegistryProcess(endpoint=where, process=process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            await process.wait()
