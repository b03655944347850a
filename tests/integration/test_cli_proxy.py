"""Commands go to registries and engines directly, whatever proxy the environment names: a token is shown to no other.

The proxy in here is a socket that listens; nobody may come to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.integration.cli_process import registry, run
from tests.ports import free_port

PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
EXCEPTIONS = ("no_proxy", "NO_PROXY", "no_grpc_proxy")


class Proxy:
    def __init__(self, port: int) -> None:
        self.visits = 0
        url = f"http://127.0.0.1:{port}"
        self.environment = dict.fromkeys(PROXIES, url) | dict.fromkeys(EXCEPTIONS, "")

    async def turn_away(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        writer.close()


@asynccontextmanager
async def listening_proxy() -> AsyncIterator[Proxy]:
    port = free_port()
    proxy = Proxy(port)
    async with await asyncio.start_server(proxy.turn_away, "127.0.0.1", port):
        yield proxy


@pytest.mark.parametrize("command", ["leases", "health"])
async def test_no_command_asks_a_registry_through_a_proxy(command: str) -> None:
    async with registry() as running, listening_proxy() as proxy:
        outcome = await run(command, "--registry", running.endpoint, "--json", **proxy.environment)
        assert (outcome.status, proxy.visits) == (0, 0), outcome


async def test_a_doctor_asks_an_engine_as_directly() -> None:
    async with registry() as running, listening_proxy() as proxy:
        engine = ("--decode", f"http://127.0.0.1:{free_port()}", "--json")
        outcome = await run("doctor", "--registry", running.endpoint, *engine, **proxy.environment)
        assert proxy.visits == 0
        assert "Connection refused" in outcome.out
