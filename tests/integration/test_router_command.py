"""`kvlease router` as a process: its settings, what it says about wrong ones, and how it stops.

The process is real; what it waits for is a line it writes or a request an engine receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kvlease.registry.flags import SettingsError, split_address
from kvlease.router.routes import Role, Target
from kvlease.router.settings import load

from tests.integration.router_peers import LIMIT_S, Call, Engine, chunk, routing, sample, url

ENGINES = ("--prefill", "http://p:1", "--decode", "http://d:1")
START_S = 30.0
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--prefill (KVLEASE_ROUTER_PREFILL): at least one URL is needed"),
        (["--prefill", "http://p"], "--decode (KVLEASE_ROUTER_DECODE): at least one URL is needed"),
        ([*ENGINES, "--decode", "http://d:1/v1"], "--decode (KVLEASE_ROUTER_DECODE): the same URL is given twice"),
        ([*ENGINES, "--prefill", "p:1"], "--prefill (KVLEASE_ROUTER_PREFILL): 'p:1' is not an http"),
        ([*ENGINES, "--prefill", "x@http://p:2"], "ENGINE_ID@ is for decode engines only"),
        ([*ENGINES, "--decode", "a b@http://p:2"], "'a b' is not an engine id"),
        ([*ENGINES, "--decode", "http://u:pw@d:2"], "no user"),
        ([*ENGINES, "--listen", "8000"], "--listen (KVLEASE_ROUTER_LISTEN): must be HOST:PORT"),
        ([*ENGINES, "--listen", "h:99999"], "--listen (KVLEASE_ROUTER_LISTEN): must be HOST:PORT"),
        ([*ENGINES, "--listen", "none"], "--listen (KVLEASE_ROUTER_LISTEN): must be HOST:PORT"),
        ([*ENGINES, "--registry", "nowhere"], "--registry (KVLEASE_ROUTER_REGISTRY): must be HOST:PORT"),
        ([*ENGINES, "--tenant", "a b"], "--tenant (KVLEASE_ROUTER_TENANT): must be 1-128 of"),
        ([*ENGINES, "--idle-timeout-ms", "0"], "--idle-timeout-ms (KVLEASE_ROUTER_IDLE_TIMEOUT_MS): Input should be"),
        ([*ENGINES, "--log-level", "loud"], "--log-level (KVLEASE_ROUTER_LOG_LEVEL): Input should be 'debug'"),
    ],
)
def test_a_wrong_setting_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(argv)
    assert message in str(caught.value)
    assert "pw" not in str(caught.value)


def test_settings_come_from_flags_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLEASE_ROUTER_PREFILL", "http://p:1, http://p:2/")
    monkeypatch.setenv("KVLEASE_ROUTER_DECODE", "d-1@http://d:1/v1")
    monkeypatch.setenv("KVLEASE_ROUTER_RENEW", "true")
    settings = load(["--no-renew", "--registry", "none"])
    assert settings.targets() == (
        Target(role=Role.PREFILL, url="http://p:1"),
        Target(role=Role.PREFILL, url="http://p:2"),
        Target(role=Role.DECODE, url="http://d:1", engine_id=settings.targets()[2].engine_id),
    )
    assert settings.targets()[2].engine_id == "d-1"
    assert (settings.renew, settings.leases, settings.recompute_threshold) == (False, False, None)


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address("localhost:0") == ("localhost", 0)


@contextlib.asynccontextmanager
async def command(*argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVLEASE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvlease.router", *argv, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        async with asyncio.timeout(START_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def said(process: asyncio.subprocess.Process, text: str) -> str:
    """The first line that holds `text`; "" if the process ends without."""
    assert process.stderr is not None
    while line := (await process.stderr.readline()).decode():
        if text in line:
            return line
    return ""


async def test_a_wrong_setting_ends_the_command_with_2() -> None:
    async with command("--prefill", "http://p") as process:
        assert await said(process, "kvlease router: --decode (KVLEASE_ROUTER_DECODE): ")
        assert await process.wait() == 2


async def test_a_taken_address_ends_the_command_with_1() -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with taken:
        address = "127.0.0.1:" + str(taken.sockets[0].getsockname()[1])
        async with command("--listen", address, "--registry", "none", *ENGINES) as process:
            told = f"kvlease router: --listen {address}: Address already in use\n"
            assert await said(process, "kvlease router:") == told
            assert await process.wait() == 1


async def test_a_name_that_nobody_knows_ends_the_command_with_1() -> None:
    async with command("--listen", "nobody.invalid:0", "--registry", "none", *ENGINES) as process:
        told = "kvlease router: --listen nobody.invalid:0: this name cannot be looked up\n"
        assert await said(process, "kvlease router:") == told
        assert await process.wait() == 1


async def test_what_does_not_end_in_its_time_is_told_so() -> None:
    """A stream, an answer that is waited for, and a body that does not come: within the time-out, not twice that."""
    engine = Engine()

    async def script(call: Call) -> web.StreamResponse:
        if call.body.get("stream") and not call.params.get("do_remote_decode"):
            response = await call.stream()
            await response.write(chunk({"content": "Hel"}) + b"data: {")
        elif call.params.get("do_remote_decode"):
            return engine.prefilled()
        await asyncio.Event().wait()
        raise AssertionError

    engine.script = script
    loop = asyncio.get_running_loop()
    async with engine.serve(), aiohttp.ClientSession() as http, asyncio.timeout(LIMIT_S):
        async with routing([engine], [engine], "--drain-timeout-ms", "2000") as router:
            stream = await http.post(url(router), json={**BODY, "stream": True})
            whole = asyncio.create_task(http.post(url(router), json=BODY).__aenter__())
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            await engine.received(4)
            started = loop.time()
        assert 2.0 <= loop.time() - started < 3.8
        cut, error, done, rest = (await stream.read()).removeprefix(chunk({"content": "Hel"})).split(b"\n\n")
        assert (cut, done, rest) == (b"data: {", b"data: [DONE]", b"")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        answer = await whole
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert (await answer.json())["error"]["code"] == "shutting_down"
        assert (await reader.readline()) == b"HTTP/1.1 503 Service Unavailable\r\n"
        writer.close()
    outcomes = {name: sample(router, "kvlease_router_turns_total", outcome=name) for name in ("broken", "failed")}
    assert outcomes == {"broken": 1, "failed": 1}
    assert sample(router, "kvlease_router_turns_total", outcome="client_gone") == 0


async def test_sigterm_lets_a_turn_in_flight_end() -> None:
    hold = asyncio.Event()
    engine = Engine()

    async def script(call: Call) -> web.StreamResponse:
        await hold.wait()
        return await engine.default(call)

    engine.script = script
    async with engine.serve():
        flags = ("--listen", "127.0.0.1:0", "--registry", "none", "--prefill", engine.url, "--decode", engine.url)
        async with command(*flags) as process, aiohttp.ClientSession() as http:
            found = re.search(r"router serves on (\S+)", await said(process, "router serves"))
            assert found is not None
            target = f"http://{found[1]}/v1/chat/completions"
            turn = asyncio.create_task(http.post(target, json=BODY).__aenter__())
            await engine.received(1)
            process.send_signal(signal.SIGTERM)
            assert await said(process, "router stops")
            hold.set()
            async with asyncio.timeout(LIMIT_S):
                answer = await turn
                assert answer.status == 200
                assert (await answer.json())["choices"][0]["message"]["content"] == "Hello there"
            assert await process.wait() == 0
