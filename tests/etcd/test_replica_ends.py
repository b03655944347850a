"""Ends that were acknowledged, when every registry that knew of them dies before the lender has heard.

Real processes on a real member, killed; the lender is the connector's own lease holder behind a real session, whose
line is cut. What it presents to the next registry is what it holds, the ended lease with it.
"""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from kvlease.etcd import EtcdClient
from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.errors import RegistryUnavailable
from kvlease.registry.etcd_codec import Keys
from kvlease.registry.values import DEFAULT_TENANT, Hit, LeaseId

from tests.etcd.cluster import Cluster
from tests.etcd.test_replica_stops import process
from tests.etcd.test_replicas import lend, replica
from tests.integration.cut_line import cut_line
from tests.integration.holding_lender import holding, query
from tests.integration.registry_peer import eventually, until
from tests.ports import free_port

WATCHED = 20
PAUSE_S = 0.02


async def hits(client: RegistryClient, lease_id: str) -> bool:
    try:
        return isinstance(await client.resolve_unary(query(lease_id)), Hit)
    except RegistryUnavailable:
        return False


async def holds(etcd: EtcdClient, prefix: bytes, *names: str) -> bool:
    """Whether these are all keys of leases, and of ends that are owed."""
    keys = Keys(prefix.decode())
    found = [kv.key async for page in etcd.pages(keys.prefix) for kv in page.kvs]
    there = [x.removeprefix(keys.prefix).decode() for x in found if x.startswith((keys.leases, keys.ends))]
    return sorted(there) == sorted(names)


@pytest.mark.parametrize("asked_at", ["its home", "another one"])
async def test_an_end_outlives_every_registry_that_knew_of_it(
    solo: Cluster, etcd: EtcdClient, prefix: bytes, asked_at: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with (
        process(solo, prefix) as home,
        process(solo, prefix) as other,
        cut_line(home.endpoint) as line,
        RegistryClient(f"{line.endpoint},{address}") as lenders,
        holding(lenders, "d-1", SystemClock()) as lender,
    ):
        await lend(lender, "ended")
        await lend(lender, "kept")
        asked = home if asked_at == "its home" else other
        async with RegistryClient(asked.endpoint) as client:
            await eventually(lambda: hits(client, "ended"), "known where its end is asked for")
            line.cut()
            assert await client.end_lease(DEFAULT_TENANT, LeaseId("ended")) == 1
        await home.kill()
        await other.kill()
        assert await holds(etcd, prefix, "ends/ended", "leases/kept")
        assert LeaseId("ended") in lender.holder
        async with process(solo, prefix, address), RegistryClient(address) as client:
            found: list[bool] = []
            stop = asyncio.Event()
            watching = asyncio.create_task(_watch(client, found, stop))
            await until(lambda: LeaseId("ended") not in lender.holder, "the lender is told")
            await eventually(lambda: hits(client, "kept"), "what it holds is presented")
            await eventually(lambda: holds(etcd, prefix, "leases/kept"), "nothing is owed any more")
            asked_already = len(found)
            await until(lambda: len(found) >= asked_already + WATCHED, "some more answers")
            stop.set()
            await watching
            assert not any(found)


async def test_a_lender_that_hears_of_it_leaves_nothing_in_the_store(
    solo: Cluster, etcd: EtcdClient, prefix: bytes
) -> None:
    async with (
        replica(solo, prefix) as home,
        replica(solo, prefix) as other,
        holding(home.client, "d-1", SystemClock()) as lender,
    ):
        for number, asked in enumerate((home, other)):
            await lend(lender, f"lease-{number}")
            await eventually(partial(asked.hits, f"lease-{number}"), "known where its end is asked for")
            assert await asked.client.end_lease(DEFAULT_TENANT, LeaseId(f"lease-{number}")) == 1
            await until(lambda: not len(lender.holder), "the lender gave it back")
            await eventually(lambda: holds(etcd, prefix), "nothing is owed any more")


async def _watch(client: RegistryClient, found: list[bool], stop: asyncio.Event) -> None:
    while not stop.is_set():
        found.append(await hits(client, "ended"))
        await asyncio.sleep(PAUSE_S)
