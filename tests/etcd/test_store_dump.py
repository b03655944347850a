"""`kvlease leases --from-store`: what is in etcd when no registry is left to ask.

A real process, a real member. What a registry lists is tested elsewhere; here the same comes without one.
"""

from __future__ import annotations

import asyncio
import json
import sys

from kvlease.registry.clock import SystemClock
from kvlease.registry.values import DEFAULT_TENANT, LeaseId

from tests.etcd.cluster import Cluster
from tests.etcd.test_replicas import lend, replica
from tests.integration.holding_lender import holding


async def kvlease(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvlease.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_leases_are_listed_without_a_registry(solo: Cluster, prefix: bytes) -> None:
    async with replica(solo, prefix) as one, holding(one.client, "d-1", SystemClock()) as lender:
        await lend(lender, "first")
        await lend(lender, "second")
    store = "etcd://" + ",".join(solo.endpoints)
    code, out, err = await kvlease("leases", "--from-store", store, "--store-prefix", prefix.decode(), "--json")
    assert (code, err) == (0, "")
    assert [json.loads(line)["lease_id"] for line in out.splitlines()] == ["first", "second"]
    code, out, _ = await kvlease("leases", "--from-store", store, "--store-prefix", prefix.decode(), "--engine", "d-2")
    assert code == 0
    assert "0 leases at revision" in out


async def test_an_end_that_is_owed_is_no_lease_and_no_reason_to_complain(solo: Cluster, prefix: bytes) -> None:
    async with replica(solo, prefix) as one:
        async with holding(one.client, "d-1", SystemClock()) as lender:
            await lend(lender, "first")
            await lend(lender, "second")
        assert await one.client.end_lease(DEFAULT_TENANT, LeaseId("first")) == 1
    store = "etcd://" + ",".join(solo.endpoints)
    code, out, err = await kvlease("leases", "--from-store", store, "--store-prefix", prefix.decode(), "--json")
    assert (code, err) == (0, "")
    assert [json.loads(line)["lease_id"] for line in out.splitlines()] == ["second"]


async def test_faults_are_said_plainly(solo: Cluster) -> None:
    code, _, err = await kvlease("leases", "--from-store", "redis://127.0.0.1:1")
    assert code == 2
    assert "etcd://HOST:PORT" in err
    code, _, err = await kvlease("leases", "--from-store", "etcd://127.0.0.1:1")
    assert code == 1
    assert "127.0.0.1:1" in err
