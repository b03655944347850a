"""`kvlease bench` against a registry process: what it says, what it leaves behind, and whom it asks for permission.

No bound on speed here: `make bench` has those.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.values import EngineId, LeaseId

from tests.integration.certificates import Authority
from tests.integration.cli_process import ended, registry, run, started
from tests.integration.registry_peer import eventually

QUICK = ("--seconds", "0.2", "--leases", "20", "--tokens", "1024", "--callers", "4")
GRANTS = tuple(f"kvlease://{role}/kvlease-bench?tenant=kvlease-bench" for role in ("lender", "borrower", "router"))


async def engines_and_leases(endpoint: str) -> tuple[set[EngineId], set[LeaseId]]:
    async with RegistryClient(endpoint) as client:
        engines = {x.engine.engine_id for x in await client.list_engines()}
        return engines, {x.lease_id for x in (await client.list_leases()).leases}


async def test_a_run_measures_each_kind_of_call_and_leaves_nothing_behind() -> None:
    async with registry("--replica-id", "registry-7") as running:
        outcome = await running.ask("bench", *QUICK, "--json")
        assert (outcome.status, outcome.err) == (0, "")
        about, *parts = outcome.lines
        assert (about["replica_id"], about["tokens"]) == ("registry-7", 1_024)
        assert 0 < about["leases"] <= 20, "as many as it may, or as it got done in its time"  # type: ignore[operator]
        assert about["record_bytes"] == 16 * 16 + 4 * 64 + 600
        assert [(x["what"], x["callers"]) for x in parts] == [
            ("publish to resolvable", 1),
            ("resolve, stream", 1),
            ("resolve, stream", 4),
            ("resolve, single calls", 1),
            ("locate", 1),
            ("locate", 4),
            ("end to its lender", 1),
        ]
        for part in parts:
            assert (part["failed"], part["calls"] > 0, part["rate"] > 0) == (0, True, True), part  # type: ignore[operator]
            assert 0 < part["p50_ms"] <= part["p99_ms"]  # type: ignore[operator]
        assert await engines_and_leases(running.endpoint) == ({"d0"}, {"a"})

        table = await running.ask("bench", *QUICK)
        assert table.status == 0
        assert "registry-7" in table.out.splitlines()[0]
        assert len(table.out.splitlines()) == 2 + len(parts)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_run_takes_its_leases_back(number: signal.Signals) -> None:
    async with registry() as running, started("bench", "--registry", running.endpoint, "--seconds", "60") as bench:

        async def lends() -> bool:
            return len((await engines_and_leases(running.endpoint))[1]) > 1

        await eventually(lends, "a lease of the bench")
        bench.send_signal(number)
        outcome = await ended(bench)
        assert (outcome.status, outcome.out) == (1, "")
        assert outcome.err == "kvlease bench: interrupted; its leases were taken back\n"
        assert await engines_and_leases(running.endpoint) == ({"d0"}, {"a"})


async def test_what_keeps_it_from_running_is_said() -> None:
    async with registry("--max-leases-per-tenant", "5") as running:
        in_use = await running.ask("bench", *QUICK, "--engine-id", "d0")
        assert (in_use.status, in_use.out) == (1, "")
        assert "ENGINE_ID_IN_USE" in in_use.err
        quota = await running.ask("bench", *QUICK)
        assert (quota.status, quota.out) == (1, "")
        assert "a lease was refused, quota" in quota.err
        assert await engines_and_leases(running.endpoint) == ({"d0"}, {"a"})
    away = await run("bench", "--registry", running.endpoint)
    assert (away.status, away.out) == (1, "")
    assert "no registry answers" in away.err


async def test_where_callers_are_known_it_needs_three_grants_and_says_which(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.server()
    engine = authority.client("engine", "kvlease://lender/d0?tenant=*")
    files = ("--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-ca", str(server.ca))
    async with registry(*files, credentials=engine.credentials) as running:
        outcomes = []
        for name, grants in (("operator", ("kvlease://operator/me",)), ("bench", GRANTS)):
            own = authority.client(name, *grants)
            flags = ("--tls-ca", str(own.ca), "--tls-cert", str(own.cert), "--tls-key", str(own.key))
            outcomes.append(await running.ask("bench", *QUICK, *flags))
        refused, done = outcomes
        assert (refused.status, refused.out) == (1, "")
        assert "PERMISSION_DENIED" in refused.err
        assert all(grant in refused.err for grant in GRANTS)
        assert (done.status, done.err) == (0, "")
