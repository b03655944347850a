"""A real registry on a real socket, and lenders' sessions with it: order, gaps, replacement, pushes, resync, shutdown.

The rules themselves are tested on the table; here they must arrive at the other end of the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.errors import (
    EngineIdInUse,
    InvalidRequest,
    LenderSilent,
    NoSession,
    RegistryUnavailable,
    SessionGap,
    SessionReplaced,
)
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.store import MemoryStore
from kvlease.registry.table_changes import StoreChange
from kvlease.registry.values import (
    ConversationId,
    EndReason,
    EngineId,
    Hit,
    Incarnation,
    LeaseId,
    Miss,
    MissReason,
    OnDeadline,
    Publication,
    PublishStatus,
    Record,
    RenewStatus,
    ResolveQuery,
    TenantId,
)
from kvlease.v1 import registry_pb2 as pb

from tests.integration.raw_session import (
    LENDER_NOW_MS,
    LIMIT_S,
    STRIDE,
    HandClock,
    RawSession,
    digests,
    engine,
    lease,
    raw_stub,
)

TENANT = TenantId("acme")
OTHER_INCARNATION = b"j" * 16


class Place:
    """A registry, a client of it, and as many raw sessions as a test wants."""

    def __init__(self, server: RegistryServer, client: RegistryClient, clock: HandClock) -> None:
        self.server, self.client, self.clock = server, client, clock

    @asynccontextmanager
    async def session(self) -> AsyncIterator[RawSession]:
        async with raw_stub(self.server.endpoint) as stub:
            yield RawSession(stub)

    async def resolve(self, text: str) -> Hit | Miss:
        query = ResolveQuery(tenant=TENANT, digests=digests(text), stride_tokens=STRIDE)
        return await self.client.resolve(query, timeout_ms=5_000)

    async def found(self, text: str) -> str | None:
        answer = await self.resolve(text)
        return answer.lease_id if isinstance(answer, Hit) else None


@asynccontextmanager
async def place(listen: str = "127.0.0.1:0") -> AsyncIterator[Place]:
    clock = HandClock()
    settings = RegistrySettings(listen=listen, metrics_listen=NO_METRICS)
    async with RegistryServer(settings, clock=clock) as server, RegistryClient(server.endpoint) as client:
        yield Place(server, client, clock)


async def test_a_published_lease_is_resolved_byte_for_byte_until_it_is_ended() -> None:
    async with place() as here, here.session() as lender:
        welcome = await lender.hello()
        assert (welcome.heartbeat_interval_ms, welcome.suspect_after_ms, welcome.session_ttl_ms) == (
            1_000,
            10_000,
            60_000,
        )
        await lender.say(snapshot=pb.Snapshot(last=True))
        assert (await lender.ack()).seq == 2
        item = lease("a", "xyz")
        (result,) = await lender.publish(item)
        assert result.status == pb.PUBLISH_STATUS_PUBLISHED
        answer = await here.resolve("xyzw")
        assert isinstance(answer, Hit)
        assert (answer.record.digests, answer.record.body) == (item.record.digests, item.record.body)
        assert (answer.matched_strides, answer.traceparent) == (3, item.traceparent)
        assert await here.client.end_conversation(TENANT, ConversationId("chat")) == 1
        assert await here.found("xyzw") is None
        pushed = await lender.hear()
        assert [(x.lease_id, x.reason) for x in pushed.end.leases] == [("a", pb.END_REASON_RELEASED)]
        await lender.say(ended=pb.EndedBatch(ended=[pb.Ended(lease_id="a", reason=pb.END_REASON_RELEASED)]))
        assert (await lender.ack()).seq == 4
        assert await lender.close() is grpc.StatusCode.OK


async def test_a_bad_item_is_answered_in_its_place() -> None:
    async with place() as here, here.session() as lender:
        await lender.start()
        bad = lease("b", "uvw")
        bad.record.digests = b"odd"
        large = lease("d", "opq")
        large.block_count = 65_537
        results = await lender.publish(lease("a", "xyz"), bad, lease("c", "rst"), large)
        good, invalid = pb.PUBLISH_STATUS_PUBLISHED, pb.PUBLISH_STATUS_INVALID
        assert [x.status for x in results] == [good, invalid, good, invalid]
        assert "digests" in results[1].message
        assert results[3].message == "block_count may be 65536 at most"


async def test_a_lease_that_no_answer_could_tell_of_takes_no_list_from_others() -> None:
    async with place() as here, here.session() as lender:
        await lender.start()
        wide = lease("b", "uvw", conversation="other")
        wide.stride_tokens = 2**32 - 1
        results = await lender.publish(lease("a", "xyz"), wide)
        assert [x.status for x in results] == [pb.PUBLISH_STATUS_PUBLISHED, pb.PUBLISH_STATUS_INVALID]
        assert [x.lease_id for x in (await here.client.list_leases()).leases] == ["a"]


@pytest.mark.parametrize("seq", [2, 4, 9])
async def test_a_gap_closes_the_session(seq: int) -> None:
    async with place() as here, here.session() as lender:
        await lender.start()
        await lender.say(seq=seq, heartbeat=pb.Heartbeat(now_lender_ms=LENDER_NOW_MS))
        with pytest.raises(SessionGap):
            await lender.hear()


async def test_a_session_starts_with_a_hello() -> None:
    async with place() as here:
        async with here.session() as lender:
            await lender.say(heartbeat=pb.Heartbeat(now_lender_ms=1))
            with pytest.raises(InvalidRequest):
                await lender.hear()
        async with here.session() as lender:
            await lender.say(seq=2, hello=pb.Hello(engine=engine(), now_lender_ms=1))
            with pytest.raises(SessionGap):
                await lender.hear()
        async with here.session() as lender:
            await lender.say(hello=pb.Hello(engine=engine("no spaces"), now_lender_ms=1))
            with pytest.raises(InvalidRequest) as refused:
                await lender.hear()
            assert refused.value.limit == "id_alphabet"


async def test_the_newest_session_of_an_incarnation_replaces_the_older() -> None:
    async with place() as here, here.session() as old, here.session() as new:
        await old.start(held=[lease("a", "xyz"), lease("b", "uvw", conversation="chat2")])
        await new.start(held=[lease("a", "xyz")])
        with pytest.raises(SessionReplaced):
            await old.hear()
        assert await here.found("xyz") == "a"
        assert await here.found("uvw") is None, "the snapshot replaces what was believed"
        (status,) = await here.client.list_engines()
        assert status.connected, "the end of the old stream must not disconnect the new one"


async def test_an_engine_id_in_use_is_refused_until_its_holder_is_silent() -> None:
    async with place() as here, here.session() as old:
        await old.start(held=[lease("a", "xyz")])
        async with here.session() as new:
            await new.say(hello=pb.Hello(engine=engine(incarnation=OTHER_INCARNATION), now_lender_ms=1))
            with pytest.raises(EngineIdInUse) as refused:
                await new.hear()
            assert refused.value.retry_after_ms == 10_000
        here.clock.time_ms += 10_000
        async with here.session() as new:
            await new.start(engine(incarnation=OTHER_INCARNATION))
            with pytest.raises(SessionReplaced):
                await old.hear()
            assert await here.found("xyz") is None


async def test_a_crashed_engine_is_back_under_its_id_at_once() -> None:
    async with place() as here:
        async with here.session() as old:
            await old.start(held=[lease("a", "xyz")])
            assert await here.found("xyz") == "a"
            old.cut()
        async with asyncio.timeout(5):
            seen = await here.client.list_engines()
            while seen[0].connected:
                seen = await here.client.list_engines()
        async with here.session() as new:
            await new.start(engine(incarnation=OTHER_INCARNATION))
            assert await here.found("xyz") is None


async def test_a_silent_lender_is_suspect_and_a_heartbeat_brings_it_back() -> None:
    async with place() as here, here.session() as lender:
        await lender.start(held=[lease("a", "xyz", ttl_ms=600_000)])
        here.clock.time_ms += 10_000
        assert await here.resolve("xyz") == Miss(reason=MissReason.SUSPECT)
        await lender.say(heartbeat=pb.Heartbeat(now_lender_ms=LENDER_NOW_MS + 10_000, free_blocks=5, total_blocks=9))
        await lender.ack()
        assert await here.found("xyz") == "a"
        (status,) = await here.client.list_engines()
        assert (status.silent_ms, status.free_blocks, status.total_blocks, status.leases) == (0, 5, 9, 1)
        here.clock.time_ms += 60_000
        with pytest.raises(NoSession):
            await lender.hear()
        assert await here.client.list_engines() == ()


async def test_a_lost_connection_and_a_goodbye() -> None:
    async with place() as here:
        async with here.session() as lender:
            await lender.start(held=[lease("a", "xyz")])
            lender.cut()
        async with asyncio.timeout(LIMIT_S):
            while (await here.client.list_engines())[0].connected:
                pass  # until the registry has noticed; each question is a round trip
        assert await here.found("xyz") == "a", "a lost connection ends nothing by itself"
        with pytest.raises(LenderSilent):
            await here.client.renew(TENANT, LeaseId("a"), 0)
        async with here.session() as lender:
            ack = await lender.start(held=[lease("a", "xyz")])
            assert [x.status for x in ack.results] == [pb.PUBLISH_STATUS_PUBLISHED]
            await lender.say(goodbye=pb.Goodbye())
            await lender.ack()
            assert await lender.close() is grpc.StatusCode.OK
        assert await here.found("xyz") is None
        answer = await here.client.resolve(ResolveQuery(tenant=TENANT, lease_id=LeaseId("a")), timeout_ms=5_000)
        assert answer == Miss(reason=MissReason.ENDED, end_reason=EndReason.DRAINED)


async def test_renewals_are_joined_pushed_and_answered() -> None:
    async with place() as here, here.session() as lender:
        await lender.start(held=[lease("a", "xyz")])
        asked = [asyncio.create_task(here.client.renew(TENANT, LeaseId("a"), 90_000)) for _ in range(3)]
        push = (await lender.hear()).renew
        assert (push.lease_id, push.ttl_ms) == ("a", 90_000)
        await here.client.list_engines()  # comes after the other two on the same connection: they wait by now
        renewed = pb.Renewed(lease_id="a", deadline_lender_ms=LENDER_NOW_MS + 90_000)
        await lender.say(renewed=pb.RenewedBatch(renewed=[renewed]))
        await lender.ack()
        results = await asyncio.gather(*asked)
        assert {(x.status, x.remaining_ms) for x in results} == {(RenewStatus.RENEWED, 90_000)}
        refused = asyncio.create_task(here.client.renew(TENANT, LeaseId("a"), 0))
        assert (await lender.hear()).renew.lease_id == "a", "three callers were one push"
        await lender.say(renew_refused=pb.RenewRefused(lease_id="a", status=pb.RENEW_STATUS_DISABLED))
        assert (await refused).status is RenewStatus.DISABLED
        unknown = await here.client.renew(TenantId("other"), LeaseId("a"), 0)
        assert unknown.status is RenewStatus.UNKNOWN


async def test_a_lender_that_does_not_answer_a_renewal_is_silent() -> None:
    async with place() as here, here.session() as lender:
        await lender.start(held=[lease("a", "xyz")])
        asked = asyncio.create_task(here.client.renew(TENANT, LeaseId("a"), 0, timeout_ms=9_000))
        assert (await lender.hear()).WhichOneof("message") == "renew"
        here.clock.time_ms += 1_000
        with pytest.raises(LenderSilent):
            await asked


async def test_publish_by_a_call_needs_a_session() -> None:
    publication = Publication(
        lease_id=LeaseId("a"),
        tenant=TENANT,
        conversation=None,
        stride_tokens=STRIDE,
        block_count=1,
        size_bytes=1,
        deadline_ms=LENDER_NOW_MS + 1_000,
        on_deadline=OnDeadline.LAPSE,
        fingerprint_hash=b"f" * 16,
        record=Record(digests=digests("xyz"), body=b"body"),
    )
    async with place() as here:
        engine_id, incarnation = EngineId("d0"), Incarnation(b"i" * 16)
        with pytest.raises(NoSession):
            await here.client.publish(engine_id, incarnation, [publication])
        async with here.session() as lender:
            await lender.start()
            (result,) = await here.client.publish(engine_id, incarnation, [publication])
            assert result.status is PublishStatus.PUBLISHED
            assert await here.found("xyz") == "a"


async def test_a_registry_that_was_restarted_learns_everything_again() -> None:
    async with place() as here, here.session() as lender:
        listen = here.server.endpoint
        await lender.start(held=[lease("a", "xyz")])
    async with place(listen) as here:
        assert await here.found("xyz") is None
        async with here.session() as lender:
            await lender.start(held=[lease("a", "xyz"), lease("b", "uvw", conversation="chat2")])
            assert {await here.found("xyz"), await here.found("uvw")} == {"a", "b"}


async def test_at_shutdown_lenders_are_told_to_go_elsewhere_and_new_ones_are_refused() -> None:
    server = RegistryServer(RegistrySettings(listen="127.0.0.1:0", metrics_listen=NO_METRICS))
    await server.__aenter__()
    async with raw_stub(server.endpoint) as stub:
        lender, late = RawSession(stub), RawSession(stub)
        await lender.start(held=[lease("a", "xyz")])
        stopping = asyncio.create_task(server.__aexit__(None, None, None))
        assert (await lender.hear()).WhichOneof("message") == "reconnect"
        await late.say(hello=pb.Hello(engine=engine("d1"), now_lender_ms=1))
        with pytest.raises(RegistryUnavailable):
            await late.hear()
        assert await lender.close() is grpc.StatusCode.OK
        async with asyncio.timeout(LIMIT_S):
            await stopping


class HeldStore(MemoryStore):
    """Takes nothing until it is let go, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.go.set()
        self.commits = 0

    async def commit(self, changes: Sequence[StoreChange]) -> None:
        self.commits += 1
        await self.go.wait()
        await super().commit(changes)


async def test_messages_that_wait_for_a_slow_store_share_its_commits() -> None:
    """One by one they would take as many round trips to it as there are messages, heartbeats waiting behind."""
    store = HeldStore()
    settings = RegistrySettings(listen="127.0.0.1:0", metrics_listen=NO_METRICS)
    async with RegistryServer(settings, store=store) as server, raw_stub(server.endpoint) as stub:
        lender = RawSession(stub)
        await lender.start()
        store.go.clear()
        before, names = store.commits, [f"lease-{number}" for number in range(20)]
        for name in names:
            await lender.say(publish=pb.PublishBatch(leases=[lease(name, name, conversation=name)]))
        async with asyncio.timeout(LIMIT_S), RegistryClient(server.endpoint) as client:
            while len((await client.list_leases()).leases) < len(names):  # noqa: ASYNC110 - asked over the network
                await asyncio.sleep(0)
        store.go.set()
        acks = [await lender.ack() for _ in names]
        assert [x.results[0].lease_id for x in acks] == names
        assert store.commits <= before + 2, "the one that was under way, and one for all that waited"
