"""What callers of one tenant notice of another's, where both share a registry: nothing.

With tokens on plain sockets; what a single lease is answered as is tested with certificates.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_channel import open_channel
from kvlease.registry.client_credentials import Credentials
from kvlease.registry.errors import LimitReached
from kvlease.registry.values import Hit, LeaseFilter, ResolveQuery, TenantId
from kvlease.v1 import registry_pb2 as pb
from kvlease.v1.registry_pb2_grpc import RegistryStub

from tests.integration.raw_session import LIMIT_S, STRIDE, RawSession, digests, lease
from tests.integration.registry_peer import eventually
from tests.integration.test_identity_tokens import Tokens, registry

ACME, OTHER = TenantId("acme"), TenantId("other")


async def test_the_pages_of_a_list_name_no_foreign_lease(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    lending = tokens.give("lender", "kvlease://lender/d0?tenant=acme")
    asking = tokens.give("router", "kvlease://router/r?tenant=other")
    async with (
        registry(tokens) as server,
        open_channel(server.endpoint, lending) as lenders,
        open_channel(server.endpoint, asking) as channel,
    ):
        lender = RawSession(RegistryStub(lenders))
        await lender.start(held=[lease(f"a{x:02}", f"a{x}", conversation=f"c{x}") for x in range(25)])
        for start in ("", "a", "a03"):
            asked = pb.ListLeasesRequest(tenant="other", page_size=1, page_token=start)
            answer = await RegistryStub(channel).ListLeases(asked)
            assert (list(answer.leases), answer.next_page_token) == ([], "")


async def test_one_tenants_streams_leave_room_for_those_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With two credentials, so that it is not a share of each."""
    tokens = Tokens(tmp_path)
    mine = tokens.give("engine", "kvlease://lender/d0?tenant=acme kvlease://borrower/d0?tenant=acme")
    router = tokens.give("router", "kvlease://router/r?tenant=acme")
    greedy = [
        tokens.give(f"greedy{x}", f"kvlease://borrower/{x}?tenant=other kvlease://router/{x}?tenant=other")
        for x in range(2)
    ]
    async with (
        registry(tokens, max_watchers=8, max_resolve_streams=8) as server,
        open_channel(server.endpoint, mine) as channel,
        RegistryClient(server.endpoint, credentials=mine) as borrower,
        RegistryClient(server.endpoint, credentials=router) as watcher,
        AsyncExitStack() as stack,
    ):
        lender = RawSession(RegistryStub(channel))
        await lender.start(held=[lease("a", "xyz")])
        stubs = [RegistryStub(await stack.enter_async_context(open_channel(server.endpoint, x))) for x in greedy]
        with caplog.at_level(logging.WARNING):
            streams = [stubs[x % 2].ResolveStream() for x in range(9)]
            watches: list[Any] = [stubs[x % 2].Watch(pb.WatchRequest(tenant="other")) for x in range(9)]
            request = pb.ResolveRequest(tenant="other", conversation="none")
            question = pb.CorrelatedResolve(correlation_id=1, request=request)

            async def answer(stream: Any) -> None:
                await stream.write(pb.ResolveStreamRequest(requests=[question]))
                assert len((await stream.read()).answers) == 1

            heard = [*(answer(x) for x in streams), *(x.read() for x in watches)]
            answered = await asyncio.gather(*heard, return_exceptions=True)
        served = [not isinstance(x, BaseException) for x in answered]
        assert (sum(served[:9]), sum(served[9:])) == (2, 2)
        asked = ResolveQuery(tenant=ACME, digests=digests("xyz"), stride_tokens=STRIDE)
        assert isinstance(await borrower.resolve(asked, timeout_ms=5_000), Hit)
        async with asyncio.timeout(LIMIT_S), aclosing(watcher.watch(LeaseFilter(tenant=ACME))) as watch:
            await anext(watch)
        assert "watch of borrower/" in caplog.text.lower()

        async with RegistryClient(server.endpoint, credentials=greedy[0]) as client:
            with pytest.raises(LimitReached) as refused:
                await anext(client.watch(LeaseFilter(tenant=OTHER)))
            assert refused.value.limit == "max_watchers_per_tenant"
            for watching in watches:
                watching.cancel()
            await eventually(lambda: _may_watch(client), "places are given back")


async def test_callers_of_every_tenant_have_the_whole(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    for grants in ("kvlease://router/r?tenant=*", "kvlease://operator/o"):
        credentials: Credentials = tokens.give("all", grants)
        async with (
            registry(tokens, max_watchers=4) as server,
            open_channel(server.endpoint, credentials) as channel,
            RegistryClient(server.endpoint, credentials=credentials) as client,
        ):
            watches: list[Any] = [RegistryStub(channel).Watch(pb.WatchRequest()) for _ in range(4)]
            await asyncio.gather(*(x.read() for x in watches))
            with pytest.raises(LimitReached) as refused:
                await anext(client.watch())
            assert refused.value.limit == "max_watchers"


async def _may_watch(client: RegistryClient) -> bool:
    try:
        async with aclosing(client.watch(LeaseFilter(tenant=OTHER))) as watch:
            await anext(watch)
    except LimitReached:
        return False
    return True
