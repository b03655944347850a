"""What commands refuse before they ask anybody: status 2, and one sentence that names the flag; and where they write.

Where something is to be written there is a registry, else there is none.
"""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from tests.integration.cli_process import Running, registry, run
from tests.ports import free_port

NOWHERE = f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("watch --from-revision -1", "--from-revision: must be 0-"),
        ("watch --from-revision 99999999999999999999", "--from-revision: must be 0-"),
        ("watch --count -1", "--count: must be 0-"),
        ("leases --timeout-ms 10000000000000", "--timeout-ms: must be 1-86400000"),
        ("leases --timeout-ms 0", "--timeout-ms: must be 1-86400000"),
        ("resolve --conversation c --stride-tokens -5", "--stride-tokens: must be 1-4294967295"),
        ("bench --engine-id a~b", "--engine-id: must be 1-128 characters of"),
        ("bench --tenant a~b", "--tenant: must be 1-128 characters of"),
        ("leases --from-store memory", "--from-store must be etcd://HOST:PORT,HOST:PORT"),
    ],
)
async def test_a_wrong_value_is_refused_in_a_sentence(given: str, said: str) -> None:
    outcome = await run(*given.split(), "--registry", NOWHERE)
    assert (outcome.status, outcome.out) == (2, "")
    assert said in outcome.err.splitlines()[-1]


async def test_a_store_that_is_away_is_not_taken_for_a_registry() -> None:
    outcome = await run("leases", "--from-store", f"etcd://{NOWHERE}", "--registry", "127.0.0.1:1")
    assert (outcome.status, outcome.out) == (1, "")
    assert outcome.err.startswith(f"kvlease leases: etcd at {NOWHERE}: ")
    assert "kvlease registry" not in outcome.err


def asking(running: Running) -> dict[str, str]:
    """The environment of a command, with what Python does by itself: it keeps what is written until it is much."""
    return {**os.environ, "KVLEASE_REGISTRY": running.endpoint, "PYTHONUNBUFFERED": ""}


@pytest.mark.parametrize(("redirection", "said"), [(">/dev/full", "No space left on device"), (">&-", "is closed")])
@pytest.mark.parametrize("command", ["--version", "leases", "health"])
async def test_an_answer_that_cannot_be_written_is_a_failure(command: str, redirection: str, said: str) -> None:
    async with registry() as running:
        line = f"{sys.executable} -m kvlease.cli {command} {redirection}"
        process = await asyncio.create_subprocess_shell(line, stderr=asyncio.subprocess.PIPE, env=asking(running))
        _, err = await process.communicate()
    assert process.returncode == 1
    assert err.decode() in (f"kvlease: stdout: {said}\n", f"kvlease: stdout {said}\n")


async def test_a_reader_may_have_enough() -> None:
    async with registry() as running:
        line = f"{sys.executable} -m kvlease.cli leases | true; echo ${{PIPESTATUS[0]}}"
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", line),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=asking(running),
        )
        assert await process.communicate() == (b"0\n", b"")
