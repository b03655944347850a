"""Clients that move between two registries on one etcd: a lease of before the move is resolved after it.

Real processes where they are killed or stopped. How fast clients move whatever the store is: `test_replicas.py` of the
integration tests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.errors import KvleaseError
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.values import Hit, Miss

from tests.etcd.cluster import Cluster
from tests.integration.cut_line import cut_line
from tests.integration.first_replica import at_the_first
from tests.integration.holding_lender import holding, query
from tests.integration.registry_peer import until
from tests.integration.registry_process import RegistryProcess, registry_process

BUDGET_S = 2.0
ASK_MS = 5_000
RESOLVE_MS = 50
CLOCK = SystemClock()


async def first_hit(client: RegistryClient, lease_id: str, misses: list[Miss]) -> float:
    """When a resolve as a connector makes it is answered again; every miss until then goes to `misses`."""
    while True:
        try:
            answer = await client.resolve(query(lease_id), timeout_ms=RESOLVE_MS)
        except KvleaseError:
            await asyncio.sleep(0.01)
            continue
        if isinstance(answer, Hit):
            return time.monotonic()
        misses.append(answer)
        await asyncio.sleep(0.01)


def kill(replica: RegistryProcess) -> None:
    replica.process.kill()


@pytest.mark.parametrize("fault", [kill, RegistryProcess.stand_still, RegistryProcess.terminate])
async def test_the_home_of_a_lender_fails(
    solo: Cluster, prefix: bytes, fault: Callable[[RegistryProcess], None]
) -> None:
    store = ("--store", "etcd://" + ",".join(solo.endpoints), "--store-prefix", prefix.decode())
    async with registry_process("", *store) as home, registry_process("", *store) as other:
        both = f"{home.endpoint},{other.endpoint}"
        async with (
            at_the_first(both) as lending,
            at_the_first(both) as client,
            RegistryClient(other.endpoint) as beside,
            holding(lending, "d-1", CLOCK) as lender,
        ):
            lender.lend("kept")
            await until(lambda: "kept" in lender.published, "the lease")
            await first_hit(client, "kept", [])
            await first_hit(beside, "kept", [])
            assert (client.address, lending.address) == (home.endpoint, home.endpoint)
            began_s = time.monotonic()
            fault(home)
            misses: list[Miss] = []
            await until(lambda: client.address != home.endpoint or fault is not kill, "the connection to break")
            resolved_s = await first_hit(client, "kept", misses) - began_s
            lender.lend("new")
            await until(lambda: "new" in lender.published, "the next accepted publish")
            published_s = time.monotonic() - began_s
            await until(lambda: client.address == other.endpoint, "the borrower to move")
            await first_hit(client, "new", [])
            print(f"\n{fault.__name__}: resolve {resolved_s * 1000:.0f} ms, publish {published_s * 1000:.0f} ms")
            assert misses == [], "the other replica knows the lease as well"
            assert resolved_s < BUDGET_S
            assert published_s < BUDGET_S


async def test_a_replica_that_is_cut_off_from_etcd_is_left(solo: Cluster, prefix: bytes) -> None:
    given = {
        "listen": "127.0.0.1:0",
        "metrics_listen": NO_METRICS,
        "store_prefix": prefix.decode(),
        "max_staleness_ms": 1_500,
    }
    direct = RegistrySettings.model_validate({**given, "store": "etcd://" + ",".join(solo.endpoints)})
    async with cut_line(solo.endpoints[0]) as line:
        by_line = RegistrySettings.model_validate({**given, "store": f"etcd://{line.endpoint}"})
        async with RegistryServer(by_line) as home, RegistryServer(direct) as other:
            both = f"{home.endpoint},{other.endpoint}"
            async with (
                RegistryClient(home.endpoint) as at_home,
                RegistryClient(other.endpoint) as at_other,
            ):
                await at_home.replicas.connected(patient=True)
                await at_other.replicas.connected(patient=True)
            async with (
                at_the_first(both) as lending,
                at_the_first(both) as client,
                holding(lending, "d-1", CLOCK) as lender,
            ):
                lender.lend("kept")
                await until(lambda: "kept" in lender.published, "the lease")
                assert isinstance(await client.resolve(query("kept"), timeout_ms=ASK_MS), Hit)
                assert (client.address, lending.address) == (home.endpoint, home.endpoint)
                line.cut()
                while client.address != other.endpoint:
                    answer = await client.resolve(query("kept"), timeout_ms=ASK_MS)
                    assert isinstance(answer, Hit), "by the one while it may answer, then by the other"
                    await asyncio.sleep(0.01)
                lender.lend("new")
                await until(lambda: "new" in lender.published, "the next accepted publish")
                assert lending.address == other.endpoint
                await first_hit(client, "new", [])


async def test_lenders_leave_a_home_that_the_store_does_not_answer_while_it_may_still_be_read(
    solo: Cluster, prefix: bytes
) -> None:
    given = {"listen": "127.0.0.1:0", "metrics_listen": NO_METRICS, "store_prefix": prefix.decode()}
    direct = RegistrySettings.model_validate({**given, "store": "etcd://" + ",".join(solo.endpoints)})
    async with cut_line(solo.endpoints[0]) as line:
        by_line = RegistrySettings.model_validate(
            {**given, "store": f"etcd://{line.endpoint}", "max_staleness_ms": 60_000}
        )
        async with (
            RegistryServer(by_line) as home,
            RegistryServer(direct) as other,
            RegistryClient(home.endpoint) as at_home,
            RegistryClient(other.endpoint) as at_other,
        ):
            await at_home.replicas.connected(patient=True)
            await at_other.replicas.connected(patient=True)
            async with (
                at_the_first(f"{home.endpoint},{other.endpoint}") as lending,
                holding(lending, "d-1", CLOCK) as lender,
            ):
                lender.lend("kept")
                await until(lambda: "kept" in lender.published, "the lease")
                assert lending.address == home.endpoint
                line.stand_still()
                lender.lend("new")
                await until(lambda: "new" in lender.published, "the next accepted publish")
                assert lending.address == other.endpoint
                assert isinstance(await at_home.resolve(query("kept"), timeout_ms=ASK_MS), Hit)
                line.move()
                await first_hit(at_home, "new", [])
                assert lending.moves == 1, "and does not come back for that"
