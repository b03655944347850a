"""The client against a hand-written registry: late, wrong, broken and missing answers, over real sockets.

What the real registry answers is in `test_client_registry.py`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_channel import ClientLimits
from kvlease.registry.errors import (
    Compacted,
    DeadlineExceeded,
    InvalidRequest,
    LenderSilent,
    MalformedAnswer,
    Overloaded,
    RegistryUnavailable,
)
from kvlease.registry.telemetry import context_from_traceparent
from kvlease.registry.values import (
    DEFAULT_TENANT,
    MAX_BATCH,
    MAX_DIGESTS,
    MAX_MESSAGE_BYTES,
    ConversationId,
    EngineId,
    Hit,
    Incarnation,
    LeaseFilter,
    LeaseId,
    LeaseState,
    LeaseView,
    Miss,
    MissReason,
    OnDeadline,
    Publication,
    Record,
    RenewResult,
    RenewStatus,
    ResolveQuery,
    TenantId,
)
from kvlease.registry.wire import encode_lease
from kvlease.registry.wire_resolve import encode_answer
from kvlease.v1 import registry_pb2 as pb
from opentelemetry.context import attach, detach

from tests.integration.registry_peer import peer, soon, until
from tests.ports import free_port

LONG_MS = 9_000


def query(name: str) -> ResolveQuery:
    return ResolveQuery(tenant=DEFAULT_TENANT, conversation=ConversationId(name))


def hit(name: str) -> Hit:
    return Hit(
        lease_id=LeaseId(f"lease-{name}"),
        engine_id=EngineId("d-1"),
        incarnation=Incarnation(b"i" * 16),
        conversation=ConversationId(name),
        record=Record(digests=b"d" * 32, body=b"body"),
        matched_strides=2,
        state=LeaseState.LIVE,
        remaining_ms=1_000,
    )


def answers(*pairs: tuple[int, Hit | Miss]) -> pb.ResolveStreamResponse:
    return pb.ResolveStreamResponse(
        answers=[
            pb.CorrelatedAnswer(correlation_id=correlation_id, response=encode_answer(answer))
            for correlation_id, answer in pairs
        ]
    )


def lease(name: str) -> LeaseView:
    return LeaseView(
        lease_id=LeaseId(name),
        tenant=DEFAULT_TENANT,
        conversation=None,
        engine_id=EngineId("d-1"),
        incarnation=Incarnation(b"i" * 16),
        tokens=128,
        stride_tokens=64,
        blocks=4,
        size_bytes=1,
        state=LeaseState.LIVE,
        remaining_ms=5,
    )


async def test_answers_in_any_order_reach_their_callers() -> None:
    async with peer() as registry, RegistryClient(registry.endpoint) as client:
        calls = [asyncio.create_task(client.resolve(query(name), timeout_ms=LONG_MS)) for name in "abc"]
        stream = await registry.resolve_stream()
        asked = (await stream.next()).requests
        assert [item.request.conversation for item in asked] == ["a", "b", "c"], "what waits together goes together"
        a, b, c = (item.correlation_id for item in asked)
        await stream.send(answers((c, hit("c")), (a, hit("a"))))
        await stream.send(answers((b, Miss(reason=MissReason.UNKNOWN))))
        assert await soon(asyncio.gather(*calls), "three answers") == [
            hit("a"),
            Miss(reason=MissReason.UNKNOWN),
            hit("c"),
        ]
        assert client.outstanding == 0


async def test_messages_stay_under_the_item_and_byte_limits() -> None:
    async with peer() as registry, RegistryClient(registry.endpoint) as client, asyncio.TaskGroup() as group:
        calls = [group.create_task(client.resolve(query("c"), timeout_ms=LONG_MS)) for _ in range(MAX_BATCH + 1)]
        long = ResolveQuery(tenant=DEFAULT_TENANT, digests=bytes(MAX_DIGESTS * 16), stride_tokens=64)
        calls += [group.create_task(client.resolve(long, timeout_ms=LONG_MS)) for _ in range(80)]
        stream = await registry.resolve_stream()
        seen = 0
        while seen < len(calls):
            message = await stream.next()
            assert 0 < len(message.requests) <= MAX_BATCH
            assert message.ByteSize() <= MAX_MESSAGE_BYTES
            seen += len(message.requests)
            await stream.send(answers(*((item.correlation_id, hit("c")) for item in message.requests)))
    assert all(call.result() == hit("c") for call in calls)


async def test_a_late_answer_is_dropped_and_leaves_nothing_behind() -> None:
    async with peer() as registry, RegistryClient(registry.endpoint) as client:
        first = asyncio.create_task(client.resolve(query("slow"), timeout_ms=LONG_MS))
        stream = await registry.resolve_stream()
        late = (await stream.next()).requests[0].correlation_id
        impatient = asyncio.create_task(client.resolve(query("slow"), timeout_ms=20))
        later = (await stream.next()).requests[0].correlation_id
        with pytest.raises(DeadlineExceeded):
            await soon(impatient, "the end of a resolve's time")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert client.outstanding == 0
        await stream.send(answers((late, hit("slow")), (later, hit("slow")), (999_999, hit("slow"))))
        third = asyncio.create_task(client.resolve(query("next"), timeout_ms=LONG_MS))
        await stream.send(answers(((await stream.next()).requests[0].correlation_id, hit("next"))))
        assert await soon(third, "an answer") == hit("next"), "an answer goes to its own caller"
        assert (client.late_answers, client.outstanding) == (3, 0)


async def test_a_wrong_answer_harms_its_caller_only() -> None:
    async with peer() as registry, RegistryClient(registry.endpoint) as client:
        calls = [asyncio.create_task(client.resolve(query(name), timeout_ms=LONG_MS)) for name in "ab"]
        stream = await registry.resolve_stream()
        wrong, right = (item.correlation_id for item in (await stream.next()).requests)
        message = answers((wrong, hit("a")), (right, hit("b")))
        message.answers[0].response.hit.incarnation = b"short"
        await stream.send(message)
        with pytest.raises(MalformedAnswer):
            await soon(calls[0], "an error")
        assert await soon(calls[1], "an answer") == hit("b")


async def test_an_answer_given_twice_counts_once() -> None:
    async with peer() as registry, RegistryClient(registry.endpoint) as client:
        call = asyncio.create_task(client.resolve(query("a"), timeout_ms=LONG_MS))
        stream = await registry.resolve_stream()
        correlation_id = (await stream.next()).requests[0].correlation_id
        await stream.send(answers((correlation_id, hit("a")), (correlation_id, hit("b"))))
        assert await soon(call, "an answer") == hit("a")
        assert client.late_answers == 1
        again = asyncio.create_task(client.resolve(query("c"), timeout_ms=LONG_MS))
        await stream.send(answers(((await stream.next()).requests[0].correlation_id, hit("c"))))
        assert await soon(again, "an answer on the same stream") == hit("c")


async def test_a_broken_stream_fails_who_waits_and_is_opened_again() -> None:
    async with peer() as registry, RegistryClient(registry.endpoint) as client:
        waiting = [asyncio.create_task(client.resolve(query("x"), timeout_ms=LONG_MS)) for _ in range(2)]
        stream = await registry.resolve_stream()
        await stream.next()
        stream.end(Overloaded("too many streams", retry_after_ms=77))
        errors = await soon(asyncio.gather(*waiting, return_exceptions=True), "two errors")
        assert [type(error) for error in errors] == [Overloaded, Overloaded]
        assert isinstance(errors[0], Overloaded)
        assert errors[0].retry_after_ms == 77
        with pytest.raises(Overloaded):  # at once: there is no stream to wait for
            await client.resolve(query("x"), timeout_ms=LONG_MS)
        stream = await registry.resolve_stream()
        again = asyncio.create_task(client.resolve(query("x"), timeout_ms=LONG_MS))
        await stream.send(answers(((await stream.next()).requests[0].correlation_id, hit("x"))))
        assert await soon(again, "an answer on the new stream") == hit("x")
        assert client.outstanding == 0


async def test_a_registry_that_is_away_costs_no_wait_and_is_found_when_it_comes() -> None:
    port = free_port()
    limits = ClientLimits(connect_timeout_ms=600_000)
    async with RegistryClient(f"127.0.0.1:{port}", limits=limits) as client:
        with pytest.raises(RegistryUnavailable):
            await soon(client.resolve(query("x"), timeout_ms=600_000), "an error well before the resolve's own time")
        with pytest.raises(RegistryUnavailable):
            await client.resolve(query("x"), timeout_ms=600_000)
        with pytest.raises(RegistryUnavailable):
            await client.locate(DEFAULT_TENANT, ConversationId("x"))
        async with peer(port) as registry:
            stream = await registry.resolve_stream()
            call = asyncio.create_task(client.resolve(query("x"), timeout_ms=LONG_MS))
            await stream.send(answers(((await stream.next()).requests[0].correlation_id, hit("x"))))
            assert await soon(call, "an answer") == hit("x")


async def test_too_many_waiting_resolves_are_refused() -> None:
    limits = ClientLimits(max_waiting=2)
    async with peer() as registry, RegistryClient(registry.endpoint, limits=limits) as client:
        waiting = [asyncio.create_task(client.resolve(query("x"), timeout_ms=LONG_MS)) for _ in range(2)]
        await until(lambda: client.outstanding == 2, "two resolves to wait")
        with pytest.raises(Overloaded):
            await client.resolve(query("x"), timeout_ms=LONG_MS)
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert client.outstanding == 0


async def test_what_breaks_the_contract_is_not_sent() -> None:
    async with peer() as registry, RegistryClient(registry.endpoint) as client:
        bad = ConversationId("a prompt with spaces \ud800")
        with pytest.raises(InvalidRequest):
            await client.resolve(query(bad), timeout_ms=LONG_MS)
        with pytest.raises(InvalidRequest):
            await client.locate(DEFAULT_TENANT, bad)
        with pytest.raises(InvalidRequest):
            await client.end_conversation(DEFAULT_TENANT, bad)
        with pytest.raises(InvalidRequest):
            await client.name_conversation(DEFAULT_TENANT, bad, ())
        with pytest.raises(InvalidRequest):
            await client.renew(TenantId(""), LeaseId("l"))
        assert registry.requests == []
        assert client.outstanding == 0


async def test_closing_ends_what_waits_and_passes_the_callers_error() -> None:
    async with peer() as registry:
        client = RegistryClient(registry.endpoint)
        calls: list[asyncio.Task[object]] = []

        async def work() -> None:
            async with client:
                calls.append(asyncio.create_task(client.resolve(query("x"), timeout_ms=LONG_MS)))
                locate = client.locate(DEFAULT_TENANT, ConversationId("x"), timeout_ms=LONG_MS)
                calls.append(asyncio.create_task(locate))
                await (await registry.resolve_stream()).next()
                await until(lambda: bool(registry.requests), "the unary call to arrive")
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await work()
        ends = await soon(asyncio.gather(*calls, return_exceptions=True), "both to end")
        assert [type(end) for end in ends] == [RegistryUnavailable, RegistryUnavailable]
        with pytest.raises(RegistryUnavailable):
            await client.resolve(query("x"), timeout_ms=LONG_MS)


async def test_unary_calls_end_by_their_deadline_and_with_typed_errors() -> None:
    async with peer() as registry, RegistryClient(registry.endpoint) as client:
        with pytest.raises(DeadlineExceeded):
            await soon(client.locate(DEFAULT_TENANT, ConversationId("x"), timeout_ms=30), "a deadline")
        registry.answers = [LenderSilent("no answer from d-1"), pb.RenewResponse(status=pb.RENEW_STATUS_RENEWED)]
        with pytest.raises(LenderSilent, match="no answer from d-1"):
            await client.renew(DEFAULT_TENANT, LeaseId("l"))
        assert await client.renew(DEFAULT_TENANT, LeaseId("l")) == RenewResult(status=RenewStatus.RENEWED)
        registry.answers = [pb.RenewResponse()]
        with pytest.raises(MalformedAnswer):
            await client.renew(DEFAULT_TENANT, LeaseId("l"))
        registry.answers = [encode_answer(hit("x"))]
        assert await client.resolve_unary(query("x")) == hit("x")


async def test_the_current_span_travels_with_unary_calls() -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with peer() as registry, RegistryClient(registry.endpoint) as client:
        registry.answers = [pb.EndResponse(ended=3), pb.EndResponse()]
        token = attach(context_from_traceparent(traceparent))
        try:
            assert await client.end_lease(DEFAULT_TENANT, LeaseId("l")) == 3
        finally:
            detach(token)
        await client.end_lease(DEFAULT_TENANT, LeaseId("l"))
        assert registry.metadata[0]["traceparent"] == traceparent
        assert "traceparent" not in registry.metadata[1]


async def test_a_list_takes_all_pages_and_the_first_revision() -> None:
    async with peer() as registry, RegistryClient(registry.endpoint) as client:
        registry.answers = [
            pb.ListLeasesResponse(leases=[encode_lease(lease("a"))], revision=5, next_page_token="p2"),
            pb.ListLeasesResponse(leases=[encode_lease(lease("a")), encode_lease(lease("b"))], revision=7),
        ]
        listed = await client.list_leases(LeaseFilter(tenant=DEFAULT_TENANT), page_size=1)
        assert [item.lease_id for item in listed.leases] == ["a", "b"]
        assert listed.revision == 5, "a watch from here misses nothing that changed between the pages"


async def test_a_list_without_end_is_refused() -> None:
    limits = ClientLimits(max_pages=3)
    async with peer() as registry, RegistryClient(registry.endpoint, limits=limits) as client:
        registry.answers = [pb.ListLeasesResponse(next_page_token="again") for _ in range(5)]
        with pytest.raises(MalformedAnswer, match="pages"):
            await client.list_leases()


async def test_a_watch_yields_events_and_ends_with_the_registrys_reason() -> None:
    event = pb.LeaseEvent(revision=8, type=pb.LEASE_EVENT_TYPE_ENDED, lease=encode_lease(lease("a")))
    async with peer() as registry, RegistryClient(registry.endpoint) as client:
        registry.answers = [pb.WatchResponse(revision=7), pb.WatchResponse(revision=8, events=[event]), Compacted("x")]
        seen = []
        async with aclosing(client.watch(LeaseFilter(engine_id=EngineId("d-1")), from_revision=7)) as watch:
            seen += [await soon(anext(watch), "an event") for _ in range(2)]
            with pytest.raises(Compacted):
                await soon(anext(watch), "the end")
        assert [(item.revision, [e.lease.lease_id for e in item.events]) for item in seen] == [(7, []), (8, ["a"])]
        assert registry.requests == [pb.WatchRequest(from_revision=7, engine_id="d-1")]


async def test_a_publish_is_split_and_its_results_are_counted() -> None:
    item = Publication(
        lease_id=LeaseId("l"),
        tenant=DEFAULT_TENANT,
        conversation=None,
        stride_tokens=64,
        block_count=1,
        size_bytes=1,
        deadline_ms=1,
        on_deadline=OnDeadline.LAPSE,
        fingerprint_hash=b"f" * 16,
        record=Record(digests=b"d" * 16, body=bytes(200 * 1024)),
    )
    ok = pb.PublishResult(lease_id="l", status=pb.PUBLISH_STATUS_PUBLISHED)
    async with peer() as registry, RegistryClient(registry.endpoint) as client:
        registry.answers = [pb.PublishResponse(results=[ok] * 20), pb.PublishResponse(results=[ok] * 10)]
        results = await client.publish(EngineId("d-1"), Incarnation(b"i" * 16), [item] * 30)
        assert len(results) == 30
        assert len(registry.requests) == 2
        registry.answers = [pb.PublishResponse(results=[ok])]
        with pytest.raises(MalformedAnswer):
            await client.publish(EngineId("d-1"), Incarnation(b"i" * 16), [item] * 2)
