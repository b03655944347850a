"""The `kvlease` command as operators run it: processes, exit statuses, what is on stdout, what is on stderr.

The registry in here is a process of its own, `kvlease registry`; the lender is a raw session with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_channel import connected

from tests.integration.raw_session import RawSession, digests, lease, raw_stub
from tests.integration.registry_peer import free_port

LIMIT_S = 30.0
"""A Python process that imports gRPC, on a busy machine."""
COMMANDS = ("registry", "router", "leases", "engines", "end", "resolve", "watch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


async def _start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvlease.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )


async def _ended(process: asyncio.subprocess.Process) -> Outcome:
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Outcome(status=process.returncode, out=out.decode(), err=err.decode())


async def _run(*arguments: str, **environment: str) -> Outcome:
    return await _ended(await _start(*arguments, **environment))


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    endpoint: str
    process: asyncio.subprocess.Process
    lender: RawSession

    async def ask(self, command: str, *arguments: str) -> Outcome:
        return await _run(command, "--registry", self.endpoint, *arguments)


@asynccontextmanager
async def _registry() -> AsyncIterator[Running]:
    """A registry process, and a lender in it with one lease."""
    endpoint = f"127.0.0.1:{free_port()}"
    process = await _start("registry", "--listen", endpoint, "--metrics-listen", "none", "--log-format", "json")
    try:
        async with RegistryClient(endpoint) as client:
            await connected(client.channel, timeout_ms=int(LIMIT_S * 1_000), patient=True)
        async with raw_stub(endpoint) as stub:
            lender = RawSession(stub)
            await lender.start(held=[lease("a", "xyz")])
            yield Running(endpoint=endpoint, process=process, lender=lender)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_help_version_and_wrong_usage() -> None:
    shown, version, wrong = await asyncio.gather(_run("--help"), _run("--version"), _run("nonsense"))
    assert shown.status == 0
    assert all(command in shown.out for command in (*COMMANDS, "exit status"))
    assert (version.status, version.out.split()[0]) == (0, "kvlease")
    assert wrong.status == 2


@pytest.mark.parametrize("command", ["registry", "leases", "resolve", "watch"])
async def test_each_command_has_help(command: str) -> None:
    shown = await _run(command, "--help")
    assert shown.status == 0
    assert f"usage: kvlease {command}" in shown.out


async def test_a_wrong_setting_is_said_with_its_flag_and_variable() -> None:
    outcome = await _run("registry", "--store", "etcd://somewhere", KVLEASE_REGISTRY_LISTEN="nowhere")
    assert outcome.status == 2
    assert "--listen (KVLEASE_REGISTRY_LISTEN): must be HOST:PORT" in outcome.err
    assert "--store (KVLEASE_REGISTRY_STORE): etcd is not available" in outcome.err


async def test_no_registry_is_a_failure_with_its_address() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    outcome = await _run("leases", "--registry", endpoint)
    assert outcome.status == 1
    assert endpoint in outcome.err
    assert outcome.out == ""


async def test_what_operators_ask() -> None:
    async with _registry() as running:
        leases, engines, hit, miss = await asyncio.gather(
            running.ask("leases", "--json"),
            running.ask("engines", "--json"),
            running.ask("resolve", "--tenant", "acme", "--digests", digests("xyw").hex(), "--json"),
            running.ask("resolve", "--tenant", "other", "--lease", "a", "--json"),
        )
        assert [(x["lease_id"], x["tenant"], x["state"]) for x in leases.lines] == [("a", "acme", "live")]
        assert [(x["engine_id"], x["connected"], x["leases"]) for x in engines.lines] == [("d0", True, 1)]
        assert (hit.status, hit.lines[0]["lease_id"], hit.lines[0]["matched_strides"]) == (0, "a", 2)
        assert (miss.status, miss.lines[0]["miss"]) == (3, "unknown")

        table, bad = await asyncio.gather(running.ask("leases"), running.ask("resolve", "--digests", "not hex"))
        head, row, _ = table.out.splitlines()
        assert head.split()[:4] == ["LEASE", "TENANT", "CONVERSATION", "ENGINE"]
        assert row.split()[:4] == ["a", "acme", "chat", "d0"]
        assert bad.status == 2


async def test_an_end_is_seen_by_a_watch() -> None:
    async with _registry() as running:
        async with RegistryClient(running.endpoint) as client:
            revision = (await client.list_leases()).revision
        ended = await running.ask("end", "--tenant", "acme", "--conversation", "chat", "--json")
        assert ended.lines == [{"ended": 1}]
        watched, again = await asyncio.gather(
            running.ask("watch", "--from-revision", str(revision), "--count", "1", "--json"),
            running.ask("end", "--tenant", "acme", "--conversation", "chat"),
        )
        (event,) = watched.lines
        assert (event["revision"], event["type"], event["lease_id"]) == (revision + 1, "ended", "a")
        assert event["end_reason"] == "released"
        assert (again.status, again.out) == (0, "0 leases ended\n")


async def test_sigterm_stops_the_registry_in_good_order() -> None:
    async with _registry() as running:
        running.process.send_signal(signal.SIGTERM)
        while (pushed := await running.lender.hear()).WhichOneof("message") != "reconnect":
            pass
        assert pushed.WhichOneof("message") == "reconnect"
        await running.lender.close()
        outcome = await _ended(running.process)
        assert outcome.status == 0
        messages = [json.loads(line)["message"] for line in outcome.err.splitlines()]
        assert any("serves on" in x for x in messages)
        assert any("stopped" in x for x in messages)
