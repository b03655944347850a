"""Client and lender's session with the real registry over real sockets: the life of a lease from both ends.

Faults that a healthy registry does not show are in `test_client.py` and `test_lender_session.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.errors import NoSession, RegistryUnavailable
from kvlease.registry.lender_session import LenderSession, SessionLimits
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import RegistrySettings
from kvlease.registry.values import (
    DEFAULT_TENANT,
    Alias,
    ConversationId,
    EndReason,
    Engine,
    EngineId,
    EngineStatus,
    Fingerprint,
    Hit,
    Incarnation,
    LeaseEventType,
    LeaseFilter,
    LeaseId,
    LeaseState,
    Miss,
    MissReason,
    OnDeadline,
    Publication,
    PublishResult,
    PublishStatus,
    Record,
    RenewResult,
    RenewStatus,
    ResolveQuery,
    TenantId,
)

from tests.integration.registry_peer import soon, until
from tests.ports import free_port

TTL_MS = 480_000
LONG_MS = 9_000
DELAY_MS = 60_000
"""More than any delay here. The registry knows the lender's present from messages, which take their time."""
QUICK = SessionLimits(backoff_first_ms=10, backoff_cap_ms=50, refused_pause_ms=50)
FINGERPRINT = Fingerprint(hash=b"f" * 16, fields=(("block_tokens", "32"), ("model", "tiny")))
CLOCK = SystemClock()


def engine(run: bytes = b"1", engine_id: str = "d-1") -> Engine:
    incarnation = Incarnation(run * 16)
    return Engine(engine_id=EngineId(engine_id), incarnation=incarnation, api_url="http://d-1", fingerprint=FINGERPRINT)


def chain(strides: int, seed: bytes = b"") -> bytes:
    digests, state = [], seed
    for stride in range(strides):
        state = hashlib.sha256(state + bytes([stride % 256])).digest()
        digests.append(state[:16])
    return b"".join(digests)


def publication(name: str, digests: bytes, conversation: str | None = "c") -> Publication:
    return Publication(
        lease_id=LeaseId(name),
        tenant=DEFAULT_TENANT,
        conversation=ConversationId(conversation) if conversation else None,
        stride_tokens=64,
        block_count=len(digests) // 8,
        size_bytes=1_024,
        deadline_ms=CLOCK.now_ms() + TTL_MS,
        on_deadline=OnDeadline.LAPSE,
        fingerprint_hash=FINGERPRINT.hash,
        record=Record(digests=digests, body=f"record of {name}".encode()),
    )


class Lender:
    """A lender that does what it is told, as the connector does: breaks no seals, frees no blocks, answers."""

    def __init__(self, client: RegistryClient, its_engine: Engine) -> None:
        self.session = LenderSession(client, its_engine, clock=CLOCK, listener=self, limits=QUICK)
        self.connects = 0
        self.ended: dict[LeaseId, EndReason] = {}
        self.results: dict[LeaseId, PublishStatus] = {}
        self.refusals: list[str] = []
        self.renews = True

    def on_connected(self) -> None:
        self.connects += 1

    def on_disconnected(self) -> None:
        pass

    def on_refused(self, reason: str, message: str) -> None:
        self.refusals.append(reason)

    def on_result(self, result: PublishResult) -> None:
        self.results[result.lease_id] = result.status

    def on_end(self, lease_id: LeaseId, reason: EndReason) -> None:
        self.ended[lease_id] = reason
        self.session.ended(lease_id, reason)

    def on_renew(self, lease_id: LeaseId, ttl_ms: int) -> None:
        if self.renews:
            self.session.renewed(lease_id, CLOCK.now_ms() + (ttl_ms or TTL_MS))
        else:
            self.session.refuse_renewal(lease_id, RenewStatus.DISABLED)

    async def lends(self, item: Publication) -> None:
        self.session.publish(item)
        await until(lambda: item.lease_id in self.results, f"the answer for {item.lease_id}")
        assert self.results[item.lease_id] is PublishStatus.PUBLISHED


@asynccontextmanager
async def lender(client: RegistryClient, its_engine: Engine) -> AsyncIterator[Lender]:
    """A lender whose session is kept open as long as the block."""
    its = Lender(client, its_engine)
    running = asyncio.create_task(its.session.run())
    try:
        yield its
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def settings(port: int = 0) -> RegistrySettings:
    listen = f"127.0.0.1:{port}"
    return RegistrySettings.model_validate({"listen": listen, "metrics_listen": "none", "heartbeat_interval_ms": 50})


@asynccontextmanager
async def fleet() -> AsyncIterator[tuple[RegistryClient, Lender]]:
    """A registry, a client, and a connected lender."""
    async with (
        RegistryServer(settings()) as server,
        RegistryClient(f"127.0.0.1:{server.port}") as client,
        lender(client, engine()) as its,
    ):
        await until(lambda: its.connects == 1, "the session")
        yield client, its


def by_digests(digests: bytes, tenant: TenantId = DEFAULT_TENANT) -> ResolveQuery:
    return ResolveQuery(tenant=tenant, digests=digests, stride_tokens=64, fingerprint_hash=FINGERPRINT.hash)


async def test_what_is_published_is_resolved_byte_for_byte() -> None:
    async with fleet() as (client, its):
        item = publication("l-1", chain(8))
        await its.lends(item)
        longer = by_digests(chain(8) + chain(4, b"next turn"))
        for answer in (await client.resolve(longer, timeout_ms=LONG_MS), await client.resolve_unary(longer)):
            assert isinstance(answer, Hit)
            assert (answer.lease_id, answer.record, answer.matched_strides) == ("l-1", item.record, 8)
            assert (answer.engine_id, answer.incarnation) == ("d-1", engine().incarnation)
            assert answer.state is LeaseState.LIVE
            assert 0 < answer.remaining_ms <= TTL_MS + DELAY_MS
        shorter = await client.resolve(by_digests(chain(3) + chain(9, b"edited")), timeout_ms=LONG_MS)
        assert isinstance(shorter, Hit)
        assert shorter.matched_strides == 3


async def test_misses_say_why() -> None:
    async with fleet() as (client, its):
        await its.lends(publication("l-1", chain(8)))
        unknown = await client.resolve(by_digests(chain(8), TenantId("somebody-else")), timeout_ms=LONG_MS)
        assert unknown == Miss(reason=MissReason.UNKNOWN), "another tenant's lease looks like no lease"
        other_model = by_digests(chain(8))._replace(fingerprint_hash=b"g" * 16, conversation=ConversationId("c"))
        answer = await client.resolve(other_model, timeout_ms=LONG_MS)
        assert isinstance(answer, Miss)
        assert answer.reason is MissReason.FINGERPRINT
        assert answer.lender_fingerprint == FINGERPRINT


async def test_many_resolves_at_once_get_their_own_answers() -> None:
    async with fleet() as (client, its):
        for number in range(20):
            await its.lends(publication(f"l-{number}", chain(4, bytes([number])), f"c-{number}"))
        asked = [number % 20 for number in range(600)]
        calls = [client.resolve(by_digests(chain(4, bytes([number]))), timeout_ms=LONG_MS) for number in asked]
        answers = await soon(asyncio.gather(*calls), "600 answers")
        assert [answer.lease_id for answer in answers if isinstance(answer, Hit)] == [f"l-{n}" for n in asked]


async def test_locate_by_conversation_and_by_alias() -> None:
    async with fleet() as (client, its):
        await its.lends(publication("l-1", chain(8)))
        located = await client.locate(DEFAULT_TENANT, ConversationId("c"))
        assert located.lease is not None
        assert (located.lease.lease_id, located.lease.tokens, located.api_url) == ("l-1", 512, "http://d-1")
        aliases = (Alias(b"1" * 16), Alias(b"2" * 16))
        missing = await client.locate(DEFAULT_TENANT, aliases=aliases)
        assert (missing.lease, missing.conversation, missing.reason) == (None, None, MissReason.UNKNOWN)
        await client.name_conversation(DEFAULT_TENANT, ConversationId("c"), aliases[1:])
        by_alias = await client.locate(DEFAULT_TENANT, aliases=aliases)
        assert by_alias.conversation == "c"
        assert by_alias.lease is not None
        assert by_alias.lease.lease_id == "l-1"


async def test_renewal_goes_to_the_lender_and_back() -> None:
    async with fleet() as (client, its):
        await its.lends(publication("l-1", chain(2)))
        renewed = await client.renew(DEFAULT_TENANT, LeaseId("l-1"), 900_000)
        assert renewed.status is RenewStatus.RENEWED
        assert TTL_MS + DELAY_MS < renewed.remaining_ms <= 900_000 + DELAY_MS
        its.renews = False
        assert (await client.renew(DEFAULT_TENANT, LeaseId("l-1"))).status is RenewStatus.DISABLED
        assert await client.renew(DEFAULT_TENANT, LeaseId("no-such")) == RenewResult(status=RenewStatus.UNKNOWN)


async def test_ends_from_all_sides() -> None:
    async with fleet() as (client, its):
        for name, conversation in (("a", "c-a"), ("b", "c-b"), ("c", "c-c"), ("d", "c-d"), ("e", "c-e")):
            await its.lends(publication(name, chain(2, name.encode()), conversation))
        its.session.ended(LeaseId("a"), EndReason.PRESSURE)
        assert await client.end_lease(DEFAULT_TENANT, LeaseId("b")) == 1
        assert await client.end_lease(DEFAULT_TENANT, LeaseId("b")) == 0
        assert await client.end_conversation(DEFAULT_TENANT, ConversationId("c-c")) == 1
        await until(lambda: len(its.ended) == 2, "two pushes")
        assert its.ended == {"b": EndReason.RELEASED, "c": EndReason.RELEASED}

        async def reason_of(name: str) -> object:
            query = ResolveQuery(tenant=DEFAULT_TENANT, lease_id=LeaseId(name))
            answer = await client.resolve(query, timeout_ms=LONG_MS)
            return answer.end_reason if isinstance(answer, Miss) else answer

        assert [await reason_of(name) for name in "abc"] == [
            EndReason.PRESSURE,
            EndReason.RELEASED,
            EndReason.RELEASED,
        ]
        assert await client.end_engine(EngineId("d-1")) == 2
        await until(lambda: len(its.ended) == 4, "four pushes")
        assert its.ended[LeaseId("e")] is EndReason.DRAINED
        assert its.session.leases == 0


async def test_a_longer_lease_supersedes_and_the_lender_hears_it_once() -> None:
    async with fleet() as (client, its):
        await its.lends(publication("turn-1", chain(4)))
        await its.lends(publication("turn-2", chain(9)))
        await until(lambda: bool(its.ended), "the end of the first turn's lease")
        assert its.ended == {"turn-1": EndReason.SUPERSEDED}
        listed = await client.list_leases(LeaseFilter(tenant=DEFAULT_TENANT))
        assert [lease.lease_id for lease in listed.leases] == ["turn-2"]


async def test_list_and_watch_fit_together() -> None:
    async with fleet() as (client, its):
        for number in range(5):
            await its.lends(publication(f"l-{number}", chain(2, bytes([number])), f"c-{number}"))
        listed = await client.list_leases(page_size=2)
        assert sorted(lease.lease_id for lease in listed.leases) == [f"l-{number}" for number in range(5)]
        await its.lends(publication("l-5", chain(2, b"five"), "c-5"))
        its.session.ended(LeaseId("l-0"), EndReason.REUSED)
        seen: list[tuple[LeaseEventType, LeaseId]] = []
        async with aclosing(client.watch(from_revision=listed.revision)) as watch:
            while len(seen) < 2:
                batch = await soon(anext(watch), "events")
                seen += [(event.type, event.lease.lease_id) for event in batch.events]
        assert seen == [(LeaseEventType.PUBLISHED, "l-5"), (LeaseEventType.ENDED, "l-0")]


async def test_engines_are_listed_with_their_pool() -> None:
    async with fleet() as (client, its):
        its.session.pool(free_blocks=7, total_blocks=9)
        await its.lends(publication("l-1", chain(2)))

        async def reported() -> EngineStatus:
            while True:
                status, *others = await client.list_engines()
                if status.free_blocks == 7:
                    assert not others
                    return status

        status = await soon(reported(), "a heartbeat with the pool")
        assert (status.engine, status.connected, status.leases, status.total_blocks) == (engine(), True, 1, 9)


async def test_unary_publish_needs_a_session() -> None:
    async with fleet() as (client, _):
        item = publication("l-1", chain(2))
        results = await client.publish(EngineId("d-1"), engine().incarnation, [item, item])
        assert [result.status for result in results] == [PublishStatus.PUBLISHED] * 2
        with pytest.raises(NoSession):
            await client.publish(EngineId("d-2"), engine().incarnation, [item])


async def test_a_restarted_registry_learns_all_from_its_lenders() -> None:
    port = free_port()
    item = publication("l-1", chain(8))
    async with RegistryClient(f"127.0.0.1:{port}") as client, lender(client, engine()) as its:
        async with RegistryServer(settings(port)):
            await its.lends(item)
            assert isinstance(await client.resolve(by_digests(chain(8)), timeout_ms=LONG_MS), Hit)
        with pytest.raises(RegistryUnavailable):
            await client.locate(DEFAULT_TENANT, ConversationId("c"))
        async with RegistryServer(settings(port)):
            await until(lambda: its.connects == 2, "the second session")

            async def resolved() -> None:
                while True:
                    try:
                        answer = await client.resolve(by_digests(chain(8)), timeout_ms=LONG_MS)
                    except RegistryUnavailable:
                        await asyncio.sleep(0.01)
                    else:
                        assert isinstance(answer, Hit)
                        assert answer.record == item.record
                        return

            await soon(resolved(), "the lease to be back")


async def test_a_drained_lender_is_forgotten() -> None:
    async with fleet() as (client, its):
        await its.lends(publication("l-1", chain(2)))
        await soon(its.session.goodbye(), "the goodbye")
        answer = await client.resolve(ResolveQuery(tenant=DEFAULT_TENANT, lease_id=LeaseId("l-1")), timeout_ms=LONG_MS)
        assert answer == Miss(reason=MissReason.ENDED, end_reason=EndReason.DRAINED)


async def test_a_second_process_under_the_same_engine_id_is_refused() -> None:
    async with fleet() as (client, its), lender(client, engine(run=b"2")) as twin:
        await until(lambda: "ENGINE_ID_IN_USE" in twin.refusals, "the refusal")
        await soon(its.session.goodbye(), "the goodbye of the first")
        await until(lambda: twin.connects == 1, "the second to be taken")


async def test_of_two_sessions_of_one_incarnation_the_newer_wins() -> None:
    async with fleet() as (client, _):
        first = Lender(client, engine(engine_id="d-2"))
        running = asyncio.create_task(first.session.run())
        await until(lambda: first.connects == 1, "the first session")
        async with lender(client, engine(engine_id="d-2")) as second:
            await until(lambda: "SESSION_REPLACED" in first.refusals, "the end of the first")
            running.cancel()
            await until(lambda: second.session.connected, "the second session")
