"""That the benchmark runs and says what it should: nothing here looks at how fast anything is.

Real servers, vLLM's block pool and NIXL agents, as in a full run, with a few samples each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.bench.contest import Contestant, Role
from tests.bench.echo_server import BYTES_SERVICE
from tests.bench.effort import QUICK
from tests.bench.figures import Unit, decode
from tests.bench.payloads import Turns, engine
from tests.bench.registry_sections import port_of
from tests.bench.resolve_bench import ResolveBench, echo_of
from tests.bench.served import REPOSITORY, Program, ProgramFailed
from tests.bench.wire import AnswerTooShort, Script, Wire

RUN_S = 220
"""Importing vLLM is most of a quick run: 10 s alone, minutes where every core is wanted by others."""
EXPECTED = (
    ("resolve, 1k-token leases", "unary, p50 / bare echo"),
    ("resolve, 8k-token leases", "stream, 32 a message / bare echo"),
    ("resolve, 24k-token leases", "stream, one caller, p50 / bare echo"),
    ("locate (router, over the wire)", "unary, p50"),
    ("resolve by the client, 24k-token leases", "one caller, p99"),
    ("publish, 1k-token leases", "session, publish to resolvable, p50"),
    ("publish, 24k-token leases", "unary, 32 leases a call"),
    ("identity, 1k-token leases", "tokens: stream, 64 callers / no identity"),
    ("identity, 1k-token leases", "certificates: unary, p50"),
    ("a registry with 2,000 leases", "memory of a lease, beside its payload"),
    ("a registry with 2,000 leases", "publish to the last of 100 watchers, p99"),
    ("router", "first byte, added by the router, leases on, p50"),
    ("router", "locate in the copy, p50"),
    ("connector, each hook on the engine's thread", "get_new_blocks, 25 of lapsed leases, p99"),
    ("connector, each hook on the engine's thread", "a 24k-token turn is lent, p99"),
    ("seal check", "sm: post, READ, poll, verdict, p50"),
    ("seal check", "tcp: post, READ, poll, verdict, p50"),
)
"""Some of every part."""


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.nixl
@pytest.mark.timeout(RUN_S + 20)
def test_quick_run_has_every_part(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    run = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--quick", "--json", str(file)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    content = json.loads(file.read_text())
    assert content["quick"] is True
    assert content["machine"]["cores"] >= 1
    assert content["skipped"] == []
    figures = [decode(given) for given in content["figures"]]
    names = {(figure.section, figure.name) for figure in figures}
    assert len(names) == len(figures), "two figures of one name"
    assert not set(EXPECTED) - names
    assert all(figure.low <= figure.high and figure.low <= figure.value for figure in figures)
    # What something adds is a difference, and noise where everything runs at once.
    differences = ("added by", "for each idle lender")
    assert all(figure.low > 0 for figure in figures if not any(words in figure.name for words in differences))
    assert {figure.unit for figure in figures} == set(Unit)
    assert any(section in run.stdout for section, _ in EXPECTED)


async def test_leases_that_nobody_holds_end_the_run() -> None:
    """A benchmark that measures misses says so instead of being fast."""
    async with AsyncExitStack() as stack:
        echo = await stack.enter_async_context(Program("tests.bench.echo_server"))
        registry = await stack.enter_async_context(Program("tests.bench.registry_server"))
        echo_wire = await stack.enter_async_context(Wire(await port_of(echo)))
        registry_wire = await stack.enter_async_context(Wire(await port_of(registry)))
        bench = ResolveBench(
            [
                Contestant(role=Role.ECHO, program=echo, wire=echo_wire),
                Contestant(role=Role.MESSAGES, program=echo, wire=echo_wire),
                Contestant(role=Role.REGISTRY, program=registry, wire=registry_wire),
            ],
            QUICK,
            seed=1,
        )
        unpublished = list(Turns(engine("nobody", seed=1), seed=1, deadline_ms=0).many(1_024, 4))
        with pytest.raises(AnswerTooShort, match="does not find"):
            await bench.run({"1k": unpublished})


async def test_an_answer_that_is_too_short_ends_the_run() -> None:
    async with AsyncExitStack() as stack:
        echo = await stack.enter_async_context(Program("tests.bench.echo_server"))
        wire = await stack.enter_async_context(Wire(await port_of(echo)))

        def script(kind: str, least_bytes: int) -> Script:
            requests = echo_of([bytes(100)], 50)
            return Script(method=f"/{BYTES_SERVICE}/{kind}", requests=requests, least_bytes=least_bytes)

        assert len(await wire.unary_latencies(script("Unary", 50), 2)) == 2
        assert len(await wire.stream_latencies(script("Stream", 50), 2)) == 2
        with pytest.raises(AnswerTooShort):
            await wire.unary_latencies(script("Unary", 51), 2)
        with pytest.raises(AnswerTooShort):
            await wire.stream_latencies(script("Stream", 51), 2)


async def test_leaving_a_program_ends_it() -> None:
    async with Program("tests.bench.echo_server") as echo:
        await port_of(echo)
        pid = echo.pid
        assert echo.cpu_ns() > 0
        assert exists(pid)
    assert not exists(pid)


async def test_a_program_that_ends_is_reported_with_what_it_wrote() -> None:
    async with Program("tests.bench.seal_reads", "[]") as program:
        with pytest.raises(ProgramFailed, match="what the lender said"):
            await program.line()
