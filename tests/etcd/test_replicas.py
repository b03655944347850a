"""Two registries on one etcd, as their callers see them: what is said to one holds at the other.

Real servers, real sockets, a real member; lenders are the connector's own lease holder behind a real session. Faults
that take longer, and all that happen together, are in the chaos suite.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from kvlease.etcd import EtcdCredentials
from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.errors import LenderSilent, RegistryUnavailable
from kvlease.registry.etcd_store import EtcdStore, EtcdStoreSettings
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.values import (
    DEFAULT_TENANT,
    Alias,
    ConversationId,
    Hit,
    LeaseEventType,
    LeaseId,
    Miss,
    MissReason,
    RenewStatus,
    ResolveQuery,
)

from tests.etcd.cluster import Cluster, ClusterSettings, etcd_cluster
from tests.integration.holding_lender import HoldingLender, holding, query
from tests.integration.lending_session import lending
from tests.integration.registry_peer import eventually, says_that_it_serves, until
from tests.integration.store_conformance import engine_put, lease_put

ASK_MS: Final = 5_000
STALE_MS: Final = 1_500


@dataclass
class Place:
    """A replica and a client of it."""

    server: RegistryServer
    client: RegistryClient

    async def answer(self, lease_id: str) -> Hit | Miss:
        return await self.client.resolve_unary(query(lease_id), timeout_ms=ASK_MS)

    async def hits(self, lease_id: str) -> bool:
        try:
            return isinstance(await self.answer(lease_id), Hit)
        except RegistryUnavailable:
            return False

    async def misses(self, lease_id: str) -> bool:
        return isinstance(await self.answer(lease_id), Miss)


@asynccontextmanager
async def replica(cluster: Cluster, prefix: bytes, **settings: object) -> AsyncIterator[Place]:
    given: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "metrics_listen": NO_METRICS,
        "store": "etcd://" + ",".join(cluster.endpoints),
        "store_prefix": prefix.decode(),
        "max_staleness_ms": STALE_MS,
        **settings,
    }
    async with (
        RegistryServer(RegistrySettings.model_validate(given)) as server,
        RegistryClient(server.endpoint) as client,
    ):
        place = Place(server, client)
        await eventually(lambda: _serves(place), "the replica is current")
        yield place


async def _serves(place: Place) -> bool:
    try:
        await place.client.list_engines()
    except RegistryUnavailable:
        return False
    return True


@asynccontextmanager
async def two(cluster: Cluster, prefix: bytes) -> AsyncIterator[tuple[Place, Place]]:
    async with replica(cluster, prefix) as one, replica(cluster, prefix) as other:
        yield one, other


async def lend(lender: HoldingLender, lease_id: str) -> None:
    lender.lend(lease_id)
    await until(lambda: LeaseId(lease_id) in lender.published, f"{lease_id} is published")


async def test_what_one_lends_the_other_resolves(solo: Cluster, prefix: bytes) -> None:
    async with two(solo, prefix) as (one, other), holding(one.client, "d-1", SystemClock()) as lender:
        await lend(lender, "first")
        await eventually(lambda: other.hits("first"), "resolved at the other")
        here, there = await one.answer("first"), await other.answer("first")
        assert isinstance(here, Hit)
        assert isinstance(there, Hit)
        assert here.record == there.record
        assert abs(here.remaining_ms - there.remaining_ms) < ASK_MS
        (engine,) = await other.client.list_engines()
        assert engine.connected
        assert not engine.suspect


async def test_an_end_reaches_the_lender_wherever_it_was_asked_for(solo: Cluster, prefix: bytes) -> None:
    async with two(solo, prefix) as (one, other), holding(one.client, "d-1", SystemClock()) as lender:
        await lend(lender, "first")
        await eventually(lambda: other.hits("first"), "resolved at the other")
        assert await other.client.end_lease(DEFAULT_TENANT, LeaseId("first")) == 1
        answer = await other.answer("first")
        assert isinstance(answer, Miss)
        await until(lambda: not len(lender.holder), "the lender gave it back")
        await eventually(lambda: one.misses("first"), "its home knows")
        answer = await one.client.resolve_unary(_by_id("first"))
        assert isinstance(answer, Miss)
        assert answer.reason is MissReason.ENDED


async def test_a_renewal_reaches_the_lender_and_its_answer_comes_back(solo: Cluster, prefix: bytes) -> None:
    async with two(solo, prefix) as (one, other):
        async with holding(one.client, "d-1", SystemClock(), ttl_ms=60_000, max_lifetime_ms=90_000) as lender:
            await lend(lender, "first")
            await eventually(lambda: other.hits("first"), "resolved at the other")
            renewed = await other.client.renew(DEFAULT_TENANT, LeaseId("first"), 80_000)
            assert renewed.status is RenewStatus.RENEWED
            assert 70_000 < renewed.remaining_ms < 80_000 + ASK_MS
            refused = await other.client.renew(DEFAULT_TENANT, LeaseId("first"), 500_000)
            assert refused.status is RenewStatus.AT_LIMIT
        # Its line is closed; the beats of its home stop naming it, and then nobody waits for it any more.
        await eventually(lambda: _has_left(other), "the lender is known to have left")
        with pytest.raises(LenderSilent):
            await other.client.renew(DEFAULT_TENANT, LeaseId("first"), 70_000)


async def test_names_and_events_travel(solo: Cluster, prefix: bytes) -> None:
    async with two(solo, prefix) as (one, other), holding(one.client, "d-1", SystemClock()) as lender:
        alias = Alias(b"a" * 16)
        async with aclosing(other.client.watch()) as events:
            await anext(events)
            await lend(lender, "first")
            await one.client.name_conversation(DEFAULT_TENANT, ConversationId("chat"), [alias])
            seen = [event for news in [await anext(events)] for event in news.events]
            assert [(x.type, x.lease.lease_id) for x in seen] == [(LeaseEventType.PUBLISHED, LeaseId("first"))]

        async def known() -> bool:
            return (await other.client.locate(DEFAULT_TENANT, aliases=[alias])).conversation == ConversationId("chat")

        await eventually(known, "the other knows the name")


async def test_a_lender_that_moves_loses_nothing(solo: Cluster, prefix: bytes) -> None:
    async with replica(solo, prefix) as other:
        clock = SystemClock()
        async with replica(solo, prefix) as one, AsyncExitStack() as lives:
            lender = await lives.enter_async_context(holding(one.client, "d-1", clock))
            await lend(lender, "first")
            await eventually(lambda: other.hits("first"), "resolved at the other")
            await lives.aclose()
            assert await other.hits("first"), "between two homes a lease is believed"
            async with holding(other.client, "d-1", clock) as moved:
                moved.lend("first")
                moved.lend("second")
                await until(lambda: len(moved.published) == 2, "both are published")
                await eventually(lambda: one.hits("second"), "the old home follows")
                assert await one.hits("first")
                (engine,) = await one.client.list_engines()
                assert engine.connected


async def test_whoever_starts_later_finds_what_there_is(solo: Cluster, prefix: bytes) -> None:
    async with replica(solo, prefix) as one, holding(one.client, "d-1", SystemClock()) as lender:
        await lend(lender, "first")
        await one.client.name_conversation(DEFAULT_TENANT, ConversationId("chat"), [Alias(b"a" * 16)])
        async with replica(solo, prefix) as late:
            await eventually(lambda: late.hits("first"), "resolved at the late one")
            located = await late.client.locate(DEFAULT_TENANT, aliases=[Alias(b"a" * 16)])
            assert located.conversation == ConversationId("chat")


async def test_whoever_starts_serves_once_it_knows_how_the_lenders_are(solo: Cluster, prefix: bytes) -> None:
    """Until then it would call them suspect, and be the only one that is asked when the others are rolled."""
    async with replica(solo, prefix) as one, holding(one.client, "d-1", SystemClock()) as lender:
        await lend(lender, "first")
        for _ in range(4):
            async with replica(solo, prefix) as late:
                await eventually(lambda: says_that_it_serves(late.server.endpoint), "it says that it serves")
                assert isinstance(await late.answer("first"), Hit)


async def test_whoever_starts_does_not_wait_for_ever_for_a_home_that_is_gone(solo: Cluster, prefix: bytes) -> None:
    owner, ends, name = engine_put(), tuple(solo.endpoints), prefix.decode()
    settings = EtcdStoreSettings(endpoints=ends, credentials=EtcdCredentials(), prefix=name)
    async with EtcdStore(settings, replica_id="gone") as gone:
        await gone.commit((owner, lease_put("first", owner)))
    async with replica(solo, prefix) as late:
        await eventually(lambda: says_that_it_serves(late.server.endpoint), "it says that it serves")
        (engine,) = await late.client.list_engines()
        assert engine.suspect


async def test_a_replica_cut_off_answers_nothing_until_it_is_back(solo: Cluster, prefix: bytes) -> None:
    async with two(solo, prefix) as (one, other), holding(one.client, "d-1", SystemClock()) as lender:
        await lend(lender, "first")
        await eventually(lambda: other.hits("first"), "resolved at the other")
        member = await solo.leader()
        member.stop()
        try:
            await eventually(lambda: refuses(other), "it refuses")
            await eventually(lambda: says_so(other), "it says so")
        finally:
            member.resume()
        await eventually(lambda: other.hits("first"), "it answers again")
        await eventually(lambda: one.hits("first"), "both do")
        await eventually(lambda: says_that_it_serves(other.server.endpoint), "it says so")
        await lend(lender, "second")


async def test_two_engines_of_one_id_are_never_both(solo: Cluster, prefix: bytes) -> None:
    async with two(solo, prefix) as (one, other), holding(one.client, "d-1", SystemClock()) as lender:
        await lend(lender, "first")
        await eventually(lambda: other.hits("first"), "resolved at the other")
        async with lending(other.server.endpoint) as second:  # another incarnation of d-1
            await until(lambda: ("refused", "ENGINE_ID_IN_USE") in [x[:2] for x in second.heard.events], "refused")
        assert await one.hits("first")


def _by_id(lease_id: str) -> ResolveQuery:
    return ResolveQuery(tenant=DEFAULT_TENANT, lease_id=LeaseId(lease_id))


async def _has_left(place: Place) -> bool:
    (engine,) = await place.client.list_engines()
    return not engine.connected


async def refuses(place: Place) -> bool:
    try:
        await place.client.list_engines()
    except RegistryUnavailable:
        return True
    return False


async def says_so(place: Place) -> bool:
    return not await says_that_it_serves(place.server.endpoint)


async def test_etcd_with_certificates_and_users(tmp_path: Path) -> None:
    """By the settings of the command line."""
    settings = ClusterSettings(folder=tmp_path / "etcd", hosts=("127.0.0.1",), tls=True, password="secret")
    async with etcd_cluster(settings) as cluster:
        assert cluster.authority is not None
        files = cluster.authority.client("registry-0")
        password = tmp_path / "password"
        password.write_text("secret\n")
        given = {
            "store_ca": str(cluster.authority.ca),
            "store_cert": str(files.cert),
            "store_key": str(files.key),
            "store_user": "root",
            "store_password_file": str(password),
        }
        async with (
            replica(cluster, b"/fleet/", **given) as one,
            replica(cluster, b"/fleet/", **given) as other,
            holding(one.client, "d-1", SystemClock()) as lender,
        ):
            await lend(lender, "first")
            await eventually(lambda: other.hits("first"), "resolved at the other")


async def test_a_store_that_does_not_let_us_in_is_said_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ClusterSettings(folder=tmp_path / "etcd", hosts=("127.0.0.1",), password="secret")
    async with etcd_cluster(settings) as cluster:
        password = tmp_path / "password"
        password.write_text("wrong")
        given = RegistrySettings.model_validate(
            {
                "listen": "127.0.0.1:0",
                "metrics_listen": NO_METRICS,
                "store": "etcd://" + ",".join(cluster.endpoints),
                "store_user": "root",
                "store_password_file": str(password),
            }
        )
        async with RegistryServer(given) as server, RegistryClient(server.endpoint):
            await until(lambda: "password" in caplog.text, "the log has the reason")
