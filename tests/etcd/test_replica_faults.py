"""What operators, neighbours and odd lenders do to registries on a real etcd; all of it is survived.

Real servers on one real member, each test under a prefix of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from kvlease.etcd import EtcdClient, NoSpace, prefix_end
from kvlease.registry.clock import SystemClock
from kvlease.registry.errors import InvalidRequest
from kvlease.registry.etcd_batches import MAX_CHANGES, MIN_SHARED_TTL_S
from kvlease.registry.etcd_codec import Keys, decode_alias_put
from kvlease.registry.server import RegistryServer, StartError
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.store import Store
from kvlease.registry.table_changes import AliasPut, EngineGone, LeasePut
from kvlease.registry.values import Alias, ConversationId, LeaseId, TenantId
from kvlease.v1 import registry_pb2 as pb

from tests.etcd.cluster import Cluster, ClusterSettings, etcd_cluster
from tests.etcd.test_registry_store import store
from tests.etcd.test_replicas import lend, refuses, replica, two
from tests.integration.holding_lender import holding
from tests.integration.raw_session import RawSession, engine, raw_stub
from tests.integration.registry_peer import eventually, until
from tests.integration.store_conformance import engine_put, lease_put, take_changes

SERVES_AGAIN_S: Final = 8.0
"""After a password that is good again: a few tries of each of those that wait, on a busy machine."""


async def test_everything_deleted_at_once_is_written_again(solo: Cluster, prefix: bytes, etcd: EtcdClient) -> None:
    async with two(solo, prefix) as (one, other), holding(one.client, "d-1", SystemClock()) as lender:
        await lend(lender, "first")
        await eventually(lambda: other.hits("first"), "resolved at the other")
        await etcd.delete(prefix, end=prefix_end(prefix))

        async def written() -> bool:
            found = await etcd.get(Keys(prefix.decode()).lease(LeaseId("first")))
            return bool(found.kvs)

        await eventually(written, "its home has written it again")
        async with replica(solo, prefix) as late:
            await eventually(lambda: late.hits("first"), "resolved at one that starts later")


async def test_the_stores_password_is_replaced_while_registries_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """First at etcd, which lets the old one in no more; the file follows later, as it does when people are involved."""
    settings = ClusterSettings(folder=tmp_path / "etcd", hosts=("127.0.0.1",), password="secret")
    async with etcd_cluster(settings) as cluster:
        await cluster.control("role", "add", "fleet")
        await cluster.control("role", "grant-permission", "fleet", "--prefix=true", "readwrite", "/fleet/")
        await cluster.control("user", "add", "kvlease:first")
        await cluster.control("user", "grant-role", "kvlease", "fleet")
        password = tmp_path / "password"
        password.write_text("first\n")
        given = {"store_user": "kvlease", "store_password_file": str(password), "session_ttl_ms": 12_000}
        async with (
            replica(cluster, b"/fleet/", **given) as one,
            replica(cluster, b"/fleet/", **given) as other,
            holding(one.client, "d-1", SystemClock()) as lender,
        ):
            await lend(lender, "before")
            await eventually(lambda: other.hits("before"), "resolved at the other")
            await cluster.control("user", "passwd", "kvlease", "--interactive=false", told="second\n")
            await eventually(lambda: refuses(other), "the old password is no good any more")
            await until(lambda: "not renewed" in caplog.text, "a renewal is missed")
            await asyncio.sleep(2)
            assert sum("not renewed" in x for x in caplog.messages) <= 2  # one from each
            password.write_text("second\n")
            async with asyncio.timeout(SERVES_AGAIN_S):
                await eventually(lambda: other.hits("before"), "both serve again")
                await eventually(lambda: one.hits("before"), "both serve again")
                await lend(lender, "after")
                await eventually(lambda: other.hits("after"), "resolved at the other")
            assert "second" not in caplog.text


@pytest.mark.parametrize(
    ("content", "fault"), [(b"\xff\xfe", "not UTF-8 text"), (b"\n", "no password"), (None, "No such file")]
)
async def test_a_password_file_that_cannot_be_used_is_named_at_the_start(
    tmp_path: Path, content: bytes | None, fault: str
) -> None:
    password = tmp_path / "password"
    if content is not None:
        password.write_bytes(content)
    given = {"store": "etcd://127.0.0.1:1", "store_user": "kvlease", "store_password_file": str(password)}
    settings = RegistrySettings.model_validate({"listen": "127.0.0.1:0", "metrics_listen": NO_METRICS, **given})
    with pytest.raises(StartError, match=f"--store-password-file {password}: {fault}"):
        async with RegistryServer(settings):
            pass


async def test_a_lender_whose_clock_is_past_all_clocks_stops_no_registry(solo: Cluster, prefix: bytes) -> None:
    """What a home tells others of its lenders' clocks has to fit into a message, or it tells nothing any more."""
    hello = pb.Hello(engine=engine("odd"), now_lender_ms=2**63 - 1)
    async with two(solo, prefix) as (one, other), holding(other.client, "d-1", SystemClock()) as lender:
        async with raw_stub(one.server.endpoint) as stub:
            odd = RawSession(stub)
            await odd.say(hello=hello)
            with pytest.raises(InvalidRequest, match="now_lender_ms"):
                await odd.hear()
        await lend(lender, "first")
        await eventually(lambda: one.hits("first"), "resolved at the one that it tried")


async def test_keys_of_a_fleet_below_ours_are_not_ours(
    solo: Cluster, prefix: bytes, etcd: EtcdClient, caplog: pytest.LogCaptureFixture
) -> None:
    """`/kvlease/` beside `/kvlease/west/`: what is written there is not read as something here, nor complained of."""
    below = prefix + b"west/"
    owner = engine_put()
    name = AliasPut(tenant=TenantId("t"), alias=Alias(b"a" * 16), conversation=ConversationId("c"), ttl_ms=60_000)
    async with store(solo, prefix) as mine, store(solo, below, "west") as west, mine.follow() as followed:
        await west.commit((owner, lease_put("theirs", owner), name))
        await west.beat(1, ())
        await etcd.delete(below, end=prefix_end(below))
        await mine.commit((owner,))
        assert await take_changes(followed, 1) == [(owner, True)]
        async with mine.follow() as again:
            assert again.view.aliases == ()
    assert not [x for x in caplog.records if x.levelno >= logging.WARNING]


async def test_an_engine_that_came_back_before_we_heard_that_it_had_left_is_kept(solo: Cluster, prefix: bytes) -> None:
    """Its home has written; another one's earlier hello is read only then. It does not stop the later one's keeping."""
    owner = engine_put()
    async with store(solo, prefix, "one", engine_ttl_s=2) as one:
        async with one.follow() as followed:
            async with store(solo, prefix, "two", engine_ttl_s=2) as two:
                await two.commit((owner,))
            await one.commit((owner, lease_put("one", owner)))
            assert [own for _, own in await take_changes(followed, 3)] == [False, True, True]
        assert await _there_later(one) == (lease_put("one", owner),)


async def test_an_engine_that_left_and_came_back_in_one_commit_is_kept(solo: Cluster, prefix: bytes) -> None:
    owner = engine_put()
    gone = EngineGone(engine_id=owner.engine.engine_id, incarnation=owner.engine.incarnation)
    async with store(solo, prefix, engine_ttl_s=2) as one:
        async with one.follow() as followed:
            await one.commit((owner,))
            await one.commit((gone, owner, lease_put("one", owner)))
            await take_changes(followed, 4)
        assert await _there_later(one) == (lease_put("one", owner),)


async def test_whoever_writes_late_keeps_nothing_of_an_engine_that_has_moved(solo: Cluster, prefix: bytes) -> None:
    """Else what its last home leaves behind would stay for ever."""
    owner = engine_put()
    async with store(solo, prefix, "one", engine_ttl_s=2) as one:
        async with store(solo, prefix, "two", engine_ttl_s=2) as two, one.follow() as followed:
            await one.commit((owner,))
            await two.commit((owner,))
            await take_changes(followed, 2)
            await one.commit((lease_put("late", owner),))
            await take_changes(followed, 1)
        assert await _there_later(one) == ()


async def _there_later(one: Store) -> Sequence[LeasePut]:
    """After twice the time that etcd keeps what nobody renews."""
    await asyncio.sleep(4)
    async with one.follow() as followed:
        return followed.view.leases


async def test_whatever_times_callers_choose_for_names_etcd_has_few_leases(
    solo: Cluster, prefix: bytes, etcd: EtcdClient
) -> None:
    tenant, conversation = TenantId("t"), ConversationId("c")
    names = [
        AliasPut(tenant=tenant, alias=Alias(bytes([i]) * 16), conversation=conversation, ttl_ms=1 + i * i * 1_700)
        for i in range(MAX_CHANGES)
    ]
    keys = Keys(prefix.decode())
    async with store(solo, prefix) as mine:
        await mine.commit(names)
    found = (await etcd.get(keys.aliases, end=prefix_end(keys.aliases))).kvs
    assert len(found) == len(names)
    leases = {kv.lease: await etcd.time_to_live(kv.lease) for kv in found}
    assert len(leases) < 12
    for kv in found:
        lease, wanted_s = leases[kv.lease], decode_alias_put(kv.value).ttl_ms / 1000
        assert lease is not None
        assert wanted_s < lease.granted_ttl_s < 2 * wanted_s + 2 * MIN_SHARED_TTL_S


async def test_a_full_etcd_is_named_in_the_log_and_works_again_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ("--quota-backend-bytes", str(16 * 1024 * 1024))
    settings = ClusterSettings(folder=tmp_path / "etcd", hosts=("127.0.0.1",), flags=flags)
    async with (
        etcd_cluster(settings) as cluster,
        EtcdClient(cluster.endpoints) as etcd,
        replica(cluster, b"/kvlease/") as one,
        holding(one.client, "d-1", SystemClock()) as lender,
    ):
        await lend(lender, "first")
        with pytest.raises(NoSpace):
            await fill(etcd)
        await eventually(lambda: refuses(one), "it answers nothing")
        await until(lambda: "database space exceeded" in caplog.text, "the log says why")
        lender.lend("second")
        revision = (await etcd.delete(b"/junk/", end=prefix_end(b"/junk/"))).header.revision
        await etcd.compact(revision, physical=True)
        await cluster.control("defrag")
        await cluster.control("alarm", "disarm")
        await eventually(lambda: one.hits("first"), "it answers again")
        await eventually(lambda: one.hits("second"), "what was lent meanwhile is known")


async def fill(etcd: EtcdClient) -> None:
    for i in range(100):
        await etcd.put(f"/junk/{i}".encode(), bytes(1024 * 1024), idempotent=True, timeout_ms=20_000)
