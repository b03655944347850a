"""A real registry on a real socket, and everyone but lenders: each call, watch, health, reflection, metrics, traces.

What an answer should be is tested on the table; here it must arrive, errors with their reasons, and nothing else.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvlease.registry.client import RegistryClient
from kvlease.registry.errors import Compacted, InvalidRequest, KvleaseError, LimitReached
from kvlease.registry.errors_grpc import from_rpc_error
from kvlease.registry.server import RegistryServer, StartError
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.values import (
    Alias,
    ConversationId,
    EngineId,
    Hit,
    LeaseEvent,
    LeaseEventType,
    LeaseFilter,
    LeaseId,
    Miss,
    MissReason,
    ResolveQuery,
    TenantId,
)
from kvlease.v1 import registry_pb2 as pb

from tests.integration.raw_session import LIMIT_S, STRIDE, RawSession, digests, engine, lease, raw_stub

TENANT, OTHER = TenantId("acme"), TenantId("other")
SERVICE = "kvlease.v1.Registry"


@asynccontextmanager
async def registry(**settings: object) -> AsyncIterator[tuple[RegistryServer, RegistryClient, RawSession]]:
    """A registry, a client, and a lender that holds one lease of conversation "chat" over "xyz"."""
    given: dict[str, object] = {"listen": "127.0.0.1:0", "metrics_listen": NO_METRICS, **settings}
    async with (
        RegistryServer(RegistrySettings.model_validate(given)) as server,
        RegistryClient(server.endpoint) as client,
        raw_stub(server.endpoint) as stub,
    ):
        lender = RawSession(stub)
        await lender.start(held=[lease("a", "xyz")])
        yield server, client, lender


async def test_resolve_by_call_and_on_the_stream() -> None:
    async with registry() as (_, client, _lender):
        query = ResolveQuery(tenant=TENANT, digests=digests("xyw"), stride_tokens=STRIDE)
        for answer in (await client.resolve_unary(query), await client.resolve(query, timeout_ms=5_000)):
            assert isinstance(answer, Hit)
            assert (answer.lease_id, answer.matched_strides) == ("a", 2)


async def test_one_bad_resolve_does_not_harm_the_others_of_its_message() -> None:
    async with registry() as (server, _, _lender), raw_stub(server.endpoint) as stub:
        good = pb.ResolveRequest(tenant="acme", digests=digests("xyz"), stride_tokens=STRIDE)
        bad = pb.ResolveRequest(tenant="acme", digests=b"odd", stride_tokens=STRIDE)
        call = stub.ResolveStream()
        items = [pb.CorrelatedResolve(correlation_id=i, request=x) for i, x in ((7, good), (8, bad), (9, good))]
        for _ in range(2):
            await call.write(pb.ResolveStreamRequest(requests=items))
            async with asyncio.timeout(LIMIT_S):
                message = await call.read()
            assert isinstance(message, pb.ResolveStreamResponse)
            answers = {x.correlation_id: x.response for x in message.answers}
            assert answers.keys() == {7, 8, 9}
            assert answers[8].miss.reason == pb.MISS_REASON_INVALID
            assert {answers[7].hit.lease_id, answers[9].hit.lease_id} == {"a"}


@pytest.mark.parametrize(
    ("request_", "field", "limit"),
    [
        (pb.ResolveRequest(tenant="acme"), "digests", ""),
        (pb.ResolveRequest(tenant="a b", lease_id="a"), "tenant", "id_alphabet"),
        (pb.ResolveRequest(tenant="acme", digests=b"d" * 16 * 4_097, stride_tokens=1), "digests", "max_digests"),
    ],
)
async def test_a_bad_call_is_refused_with_field_and_limit(request_: pb.ResolveRequest, field: str, limit: str) -> None:
    async with registry() as (server, _, _lender), raw_stub(server.endpoint) as stub:
        with pytest.raises(InvalidRequest) as refused:
            await _typed(stub.Resolve(request_))
        assert (refused.value.field, refused.value.limit) == (field, limit)


async def test_a_foreign_tenant_sees_what_it_would_see_if_there_were_nothing() -> None:
    async with registry() as (_, client, _lender):
        unknown = Miss(reason=MissReason.UNKNOWN)
        for query in (
            ResolveQuery(tenant=OTHER, lease_id=LeaseId("a")),
            ResolveQuery(tenant=OTHER, conversation=ConversationId("chat")),
            ResolveQuery(tenant=OTHER, digests=digests("xyz"), stride_tokens=STRIDE),
        ):
            assert await client.resolve(query, timeout_ms=5_000) == unknown
        assert (await client.locate(OTHER, ConversationId("chat"))).reason is MissReason.UNKNOWN
        assert await client.end_lease(OTHER, LeaseId("a")) == 0
        assert (await client.list_leases(LeaseFilter(tenant=OTHER))).leases == ()


async def test_locate_by_conversation_and_alias() -> None:
    async with registry() as (_, client, _lender):
        alias = Alias(b"a" * 16)
        assert (await client.locate(TENANT, aliases=[alias])).conversation is None
        await client.name_conversation(TENANT, ConversationId("chat"), [alias])
        located = await client.locate(TENANT, aliases=[Alias(b"b" * 16), alias])
        assert located.lease is not None
        assert (located.conversation, located.lease.lease_id, located.api_url) == ("chat", "a", "http://d0")


async def test_lists_of_leases_and_engines() -> None:
    async with registry() as (_, client, lender):
        await lender.publish(*(lease(f"l{i}", f"{i}", conversation=f"c{i}") for i in range(7)))
        found = await client.list_leases(LeaseFilter(tenant=TENANT), page_size=3)
        assert sorted(x.lease_id for x in found.leases) == ["a", *(f"l{i}" for i in range(7))]
        of_one = await client.list_leases(LeaseFilter(conversation=ConversationId("c3")))
        assert [(x.lease_id, x.tokens) for x in of_one.leases] == [("l3", STRIDE)]
        (status,) = await client.list_engines()
        assert (status.engine.engine_id, status.connected, status.leases, status.leased_blocks) == ("d0", True, 8, 16)


async def _events(client: RegistryClient, wanted: LeaseFilter, from_revision: int, count: int) -> list[LeaseEvent]:
    events: list[LeaseEvent] = []
    async with asyncio.timeout(LIMIT_S), aclosing(client.watch(wanted, from_revision=from_revision)) as news:
        async for item in news:
            events.extend(item.events)
            if len(events) >= count:
                break
    return events


async def test_a_watch_from_a_list_misses_nothing_and_sees_nothing_twice() -> None:
    async with registry() as (_, client, lender):
        revision = (await client.list_leases()).revision
        seen: list[tuple[LeaseEventType, str]] = []
        async with asyncio.timeout(LIMIT_S), aclosing(client.watch(from_revision=revision)) as news:
            first = await anext(news)
            assert (first.revision, first.events) == (revision, ())
            for name, text in (("b", "xyzz"), ("c", "xyzzz")):
                await lender.publish(lease(name, text))
                expected = len(seen) + 2
                while len(seen) < expected:
                    seen.extend((x.type, x.lease.lease_id) for x in (await anext(news)).events)
        published, ended = LeaseEventType.PUBLISHED, LeaseEventType.ENDED
        assert seen == [(published, "b"), (ended, "a"), (published, "c"), (ended, "b")]


async def test_a_watch_does_not_go_on_in_another_registrys_history() -> None:
    async with registry() as (_, client, _lender):
        revision = (await client.list_leases()).revision
    async with registry() as (_, client, lender):
        await lender.publish(*(lease(f"l{i}", f"{i}", conversation=f"c{i}") for i in range(3)))
        with pytest.raises(Compacted):
            await _events(client, LeaseFilter(), revision, 1)


async def test_a_watch_is_filtered_and_resumed() -> None:
    async with registry() as (_, client, lender):
        revision = (await client.list_leases()).revision
        await lender.publish(lease("b", "b", conversation="c1"), lease("c", "c", conversation="c2", tenant="other"))
        await lender.publish(lease("d", "d", conversation="c3"))
        everything = await _events(client, LeaseFilter(), revision, 3)
        assert [x.lease.lease_id for x in everything] == ["b", "c", "d"]
        assert [x.revision for x in everything] == [revision + 1, revision + 2, revision + 3]
        resumed = await _events(client, LeaseFilter(), everything[0].revision, 2)
        assert resumed == everything[1:]
        assert await _events(client, LeaseFilter(tenant=OTHER), revision, 1) == [everything[1]]
        assert await _events(client, LeaseFilter(conversation=ConversationId("c3")), revision, 1) == [everything[2]]
        (of_engine, *_) = await _events(client, LeaseFilter(engine_id=EngineId("d0")), revision, 3)
        assert of_engine == everything[0]


async def test_a_watcher_that_fell_behind_or_comes_from_another_life_is_told_to_list_again() -> None:
    async with registry(keep_events=2) as (_, client, lender):
        revision = (await client.list_leases()).revision
        await lender.publish(*(lease(f"l{i}", f"{i}", conversation=f"c{i}") for i in range(3)))
        for from_revision in (revision, 1, revision + 1_000):
            with pytest.raises(Compacted):
                await _events(client, LeaseFilter(), from_revision, 1)


async def test_watchers_are_limited() -> None:
    async with registry(max_watchers=1) as (_, client, _lender), aclosing(client.watch()) as first:
        await anext(first)
        with pytest.raises(LimitReached) as refused:
            await _events(client, LeaseFilter(), 0, 1)
        assert refused.value.limit == "max_watchers"


async def test_resolve_streams_are_limited() -> None:
    async with registry(max_resolve_streams=1) as (server, client, _lender), raw_stub(server.endpoint) as stub:
        query = ResolveQuery(tenant=TENANT, lease_id=LeaseId("a"))
        assert isinstance(await client.resolve(query, timeout_ms=5_000), Hit)  # the client holds the one stream
        second = stub.ResolveStream()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.read()
        known = from_rpc_error(refused.value)
        assert isinstance(known, LimitReached)
        assert known.limit == "max_resolve_streams"


async def test_health_and_reflection() -> None:
    async with registry() as (server, _, _lender), grpc.aio.insecure_channel(server.endpoint) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            response = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health.Check(health_pb2.HealthCheckRequest(service="nothing"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await reflect.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = (await reflect.read()).list_services_response.service
        assert SERVICE in {x.name for x in listed}
        await reflect.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
        found = (await reflect.read()).file_descriptor_response.file_descriptor_proto
        described = {descriptor_pb2.FileDescriptorProto.FromString(x).name for x in found}
        assert "kvlease/v1/registry.proto" in described


async def test_health_says_not_serving_before_anything_stops() -> None:
    server = RegistryServer(RegistrySettings(listen="127.0.0.1:0", metrics_listen=NO_METRICS))
    await server.__aenter__()
    async with grpc.aio.insecure_channel(server.endpoint) as channel, raw_stub(server.endpoint) as stub:
        lender = RawSession(stub)
        await lender.start()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(server.__aexit__(None, None, None))
        async with asyncio.timeout(LIMIT_S):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await lender.hear()).WhichOneof("message") == "reconnect"
            await lender.close()
            await stopping


async def test_metrics_count_outcomes_misses_by_reason_and_ends() -> None:
    async with registry(metrics_listen="127.0.0.1:0") as (server, client, lender):
        await lender.publish(lease("b", "xyzz"))
        await client.resolve_unary(ResolveQuery(tenant=TENANT, conversation=ConversationId("chat")))
        await client.resolve_unary(ResolveQuery(tenant=TENANT, conversation=ConversationId("nothing")))
        await client.locate(TENANT, ConversationId("chat"))

        def value(name: str, **labels: str) -> float | None:
            return server.metrics.get_sample_value(name, labels)

        assert value("kvlease_registry_resolves_total", outcome="hit") == 1
        assert value("kvlease_registry_resolves_total", outcome="miss") == 1
        assert value("kvlease_registry_misses_total", reason="unknown") == 1
        assert value("kvlease_registry_locates_total", outcome="hit") == 1
        assert value("kvlease_registry_ends_total", reason="superseded") == 1
        assert value("kvlease_registry_publishes_total", status="published") == 2
        async with asyncio.timeout(LIMIT_S):
            # The gauges are refreshed each second, by nothing that a test could wait for.
            while value("kvlease_registry_leased_blocks", engine="d0", tenant="acme") != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=LIMIT_S).read().decode())
        assert 'kvlease_registry_leases{engine="d0",state="live",tenant="acme"} 1.0' in page
        assert "kvlease_registry_sessions 1.0" in page


async def test_an_address_in_use_is_said_plainly() -> None:
    async with registry() as (server, _, _lender):
        with pytest.raises(StartError, match="--listen"):
            async with RegistryServer(RegistrySettings(listen=server.endpoint, metrics_listen=NO_METRICS)):
                pass


async def test_two_engines_of_two_tenants_do_not_mix() -> None:
    async with registry() as (server, client, _lender), raw_stub(server.endpoint) as stub:
        second = RawSession(stub)
        await second.start(engine("d1"), held=[lease("z", "xyz", tenant="other")])
        for tenant, expected in ((TENANT, "a"), (OTHER, "z")):
            answer = await client.resolve(
                ResolveQuery(tenant=tenant, digests=digests("xyz"), stride_tokens=STRIDE), timeout_ms=5_000
            )
            assert isinstance(answer, Hit)
            assert answer.lease_id == expected


async def _typed(call: grpc.aio.UnaryUnaryCall[pb.ResolveRequest, pb.ResolveResponse]) -> pb.ResolveResponse:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        known: KvleaseError = from_rpc_error(error)
        raise known from error
