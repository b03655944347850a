"""A registry's process that stands still and goes on, or is told to end, while etcd is there, slow or away.

Real processes on a real member. What a stopped registry has in its sockets when it wakes is the hard part: it knows
nothing of what happened, and everything that it would say is old.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.server import SHUTDOWN_S
from kvlease.registry.values import DEFAULT_TENANT, Hit, LeaseId
from kvlease.registry.wire_resolve import encode_query
from kvlease.v1 import registry_pb2 as pb

from tests.etcd.cluster import Cluster, ClusterSettings, etcd_cluster
from tests.etcd.test_replicas import STALE_MS, lend, replica
from tests.integration.holding_lender import holding, query
from tests.integration.raw_session import raw_stub
from tests.integration.registry_peer import LIMIT_S, eventually, soon
from tests.integration.registry_process import RegistryProcess, registry_process

ASKED = 20
SLACK_S = 1.0
"""A busy machine."""


@asynccontextmanager
async def process(cluster: Cluster, prefix: bytes, endpoint: str = "") -> AsyncIterator[RegistryProcess]:
    store = "etcd://" + ",".join(cluster.endpoints)
    flags = ("--store", store, "--store-prefix", prefix.decode(), "--max-staleness-ms", str(STALE_MS))
    async with registry_process(endpoint, *flags) as one:
        yield one


async def test_whoever_stood_still_says_nothing_old_when_it_goes_on(solo: Cluster, prefix: bytes) -> None:
    """Resolves that were asked while it stood still are the first that it reads, before it knows how late it is."""
    async with (
        replica(solo, prefix) as other,
        process(solo, prefix) as still,
        holding(other.client, "d-1", SystemClock()) as lender,
        RegistryClient(still.endpoint) as client,
        raw_stub(still.endpoint) as stub,
    ):
        await lend(lender, "first")

        async def hits() -> bool:
            return isinstance(await client.resolve_unary(query("first")), Hit)

        await eventually(hits, "resolved at the one that will stand still")
        stream: Any = stub.ResolveStream()
        ask = pb.ResolveStreamRequest(requests=[pb.CorrelatedResolve(correlation_id=1, request=_asked())])
        await stream.write(ask)
        assert (await stream.read()).answers[0].response.HasField("hit")
        watch: Any = stub.Watch(pb.WatchRequest())
        await watch.read()

        still.stand_still()
        assert await other.client.end_lease(DEFAULT_TENANT, LeaseId("first")) == 1
        await asyncio.sleep(STALE_MS / 1000 + 1)
        asked = [asyncio.ensure_future(stub.Resolve(_asked(), timeout=LIMIT_S)) for _ in range(ASKED)]
        for _ in range(ASKED):
            await stream.write(ask)
        still.go_on()
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, pb.ResolveResponse):  # it had caught up by then
                assert answer.HasField("miss"), answer
            else:
                assert isinstance(answer, grpc.aio.AioRpcError)
                assert answer.code() is grpc.StatusCode.UNAVAILABLE
        for said in await _rest(stream):
            assert said.answers[0].response.HasField("miss"), said
        assert not await _rest(watch)


@pytest.mark.parametrize("away", ["hangs", "is gone"])
async def test_whoever_is_told_to_end_ends_in_time_also_without_etcd(tmp_path: Path, away: str) -> None:
    """While a lender's publish waits for etcd."""
    settings = ClusterSettings(folder=tmp_path, hosts=("127.0.0.1",))
    async with (
        etcd_cluster(settings) as cluster,
        process(cluster, b"/kvlease/") as one,
        RegistryClient(one.endpoint) as client,
        holding(client, "d-1", SystemClock()) as lender,
    ):
        await lend(lender, "first")
        member = await cluster.leader()
        if away == "hangs":
            member.stop()
        else:
            member.kill()
        lender.lend("second")
        await asyncio.sleep(0.5)
        assert one.process.returncode is None
        asked_s = time.monotonic()
        one.terminate()
        await soon(one.process.wait(), "the registry to end", limit_s=SHUTDOWN_S + SLACK_S)
        assert one.process.returncode == 0
        print(f"etcd {away}: ended after {time.monotonic() - asked_s:.3f} s")


async def _rest(stream: Any) -> list[Any]:
    """What is said until the registry ends it, in good order or because it cannot serve."""
    said: list[Any] = []
    try:
        async with asyncio.timeout(LIMIT_S):
            while (message := await stream.read()) is not grpc.aio.EOF:
                said.append(message)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
    return said


def _asked() -> pb.ResolveRequest:
    return encode_query(query("first"))
