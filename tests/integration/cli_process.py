"""The `kvlease` command as a process: started, ended, what it said; and a registry of that kind with one lender.

No assertions. Every process started here is gone when its block ends, and every wait ends after LIMIT_S.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvlease.registry.client import RegistryClient
from kvlease.registry.client_channel import open_channel
from kvlease.registry.client_credentials import Credentials
from kvlease.v1 import registry_pb2 as pb
from kvlease.v1.registry_pb2_grpc import RegistryStub

from tests.integration.raw_session import RawSession, lease
from tests.integration.registry_peer import soon
from tests.ports import free_port

LIMIT_S = 30.0
"""A Python process that imports gRPC, on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


async def start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvlease.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )


async def ended(process: asyncio.subprocess.Process) -> Outcome:
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Outcome(status=process.returncode, out=out.decode(), err=err.decode())


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command that goes on by itself; killed at the end if it has not ended by then."""
    process = await start(*arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run(*arguments: str, **environment: str) -> Outcome:
    return await ended(await start(*arguments, **environment))


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    endpoint: str
    process: asyncio.subprocess.Process
    lender: RawSession

    async def ask(self, command: str, *arguments: str) -> Outcome:
        return await run(command, "--registry", self.endpoint, *arguments)


@asynccontextmanager
async def registry(
    *arguments: str, credentials: Credentials | None = None, held: Sequence[pb.PublishItem] | None = None
) -> AsyncIterator[Running]:
    """A registry process, and a lender in it with `held`, one lease unless given."""
    endpoint = f"127.0.0.1:{free_port()}"
    own = ("--listen", endpoint, "--metrics-listen", "none", "--log-format", "json")
    patient = ("--suspect-after-ms", "60000", "--session-ttl-ms", "120000")  # the lender sends no heartbeats
    process = await start("registry", *own, *patient, *arguments)
    try:
        async with RegistryClient(endpoint, credentials=credentials) as client:
            await soon(client.replicas.connected(patient=True), "the registry", limit_s=LIMIT_S)
        async with open_channel(endpoint, credentials) as channel:
            lender = RawSession(RegistryStub(channel))
            await lender.start(held=[lease("a", "xyz")] if held is None else held)
            yield Running(endpoint=endpoint, process=process, lender=lender)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
