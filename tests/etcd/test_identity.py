"""Users, passwords, tokens and certificates of etcd: who is let in, what a refusal is, and tokens that go stale.

One member with users, whose tokens live for a second of disuse; one with TLS that asks for client certificates.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from kvlease.etcd import (
    AuthenticationFailed,
    CredentialsInvalid,
    EtcdClient,
    EtcdCredentials,
    PermissionDenied,
    PutOp,
    Unavailable,
    Watch,
)
from kvlease.etcd.proof import RELOAD_S

from tests.etcd.cluster import ROOT, Cluster, ClusterSettings, etcd_cluster
from tests.etcd.reader import changes
from tests.integration.certificates import Authority, put
from tests.integration.registry_peer import eventually

PASSWORD = "a password that nobody else has"
TOKEN_TTL_S = 1


@pytest.fixture(scope="module")
def guarded_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(
        ClusterSettings(
            folder=tmp_path_factory.mktemp("guarded"),
            hosts=("127.0.0.1",),
            password=PASSWORD,
            flags=("--auth-token-ttl", str(TOKEN_TTL_S)),
        )
    )
    asyncio.run(_start(cluster))
    yield cluster
    cluster.close()


async def _start(cluster: Cluster) -> None:
    await cluster.start()
    await cluster.control("role", "add", "mine")
    await cluster.control("role", "grant-permission", "mine", "readwrite", "/mine/", "/mine0")
    await cluster.control("user", "add", f"guest:{PASSWORD}")
    await cluster.control("user", "grant-role", "guest", "mine")
    await cluster.control("role", "add", "half")
    await cluster.control("role", "grant-permission", "half", "read", "/mine/", "/mine/m")
    await cluster.control("user", "add", f"half:{PASSWORD}")
    await cluster.control("user", "grant-role", "half", "half")


@pytest.fixture
async def guarded(guarded_process: Cluster) -> Cluster:
    await guarded_process.heal()
    return guarded_process


def root(password: str = PASSWORD) -> EtcdCredentials:
    return EtcdCredentials(user=ROOT, password=password)


async def next_value(watch: Watch) -> bytes:
    (found,) = await changes(watch, 1)
    return found.events[0].kv.value


async def test_user_and_password(guarded: Cluster, prefix: bytes) -> None:
    async with EtcdClient(guarded.endpoints, credentials=root()) as etcd:
        await asyncio.gather(*(etcd.put(prefix + b"%d" % number, b"") for number in range(20)))


async def test_wrong_password_and_none(guarded: Cluster, prefix: bytes) -> None:
    async with EtcdClient(guarded.endpoints, credentials=root("wrong")) as etcd:
        with pytest.raises(AuthenticationFailed, match="invalid user ID or password"):
            await etcd.get(prefix)
        with pytest.raises(AuthenticationFailed):
            await anext(etcd.watch(prefix))
    async with EtcdClient(guarded.endpoints) as etcd:
        with pytest.raises(AuthenticationFailed, match="wants a user"):
            await etcd.put(prefix, b"")


async def test_a_password_that_cannot_be_read_does_not_replace_the_last_one(
    guarded: Cluster, prefix: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    put(file, PASSWORD.encode())
    credentials = EtcdCredentials(user=ROOT, password_file=str(file))
    async with EtcdClient(guarded.endpoints, credentials=credentials) as etcd:
        await etcd.put(prefix, b"1")
        put(file, b"\xff")
        for _ in range(2):
            await asyncio.sleep(TOKEN_TTL_S + 1.5)
            await etcd.put(prefix, b"2")
    assert sum("the old one stays" in x for x in caplog.messages) == 1


async def test_keys_of_others(guarded: Cluster) -> None:
    credentials = EtcdCredentials(user="guest", password=PASSWORD)
    async with EtcdClient(guarded.endpoints, credentials=credentials) as etcd:
        await etcd.put(b"/mine/a", b"")
        for call in (etcd.get(b"/other"), etcd.put(b"/other", b""), anext(etcd.watch(b"/other"))):
            with pytest.raises(PermissionDenied):
                await call
        with pytest.raises(PermissionDenied):
            await anext(etcd.watch(b"/m"))
        async with etcd.watch(b"/mine/") as watch:
            await anext(watch)
            await etcd.put(b"/mine/a", b"1")
            assert await next_value(watch) == b"1"


async def test_watch_on_more_than_one_may_read(guarded: Cluster) -> None:
    """etcd 3.4 refuses it in the words that it has for a stale token, too: that is tried, and not for ever."""
    credentials = EtcdCredentials(user="half", password=PASSWORD)
    async with EtcdClient(guarded.endpoints, credentials=credentials) as etcd, etcd.watch(b"/mine/") as watch:
        async with asyncio.timeout(5):
            for _ in range(2):
                with pytest.raises(PermissionDenied):
                    await anext(watch)


async def test_tokens_that_went_stale(guarded: Cluster, prefix: bytes) -> None:
    """By disuse, and all at once when etcd restarts; a call, a transaction and a watch each go on with a fresh one."""
    (member,) = guarded.members.values()
    async with EtcdClient(guarded.endpoints, credentials=root()) as etcd, etcd.watch(prefix) as watch:
        await anext(watch)
        await etcd.put(prefix, b"1")
        assert await next_value(watch) == b"1"
        await asyncio.sleep(TOKEN_TTL_S + 1.5)
        await etcd.txn([], [])
        member.kill()
        member.start()
        await member.ready()
        await etcd.put(prefix, b"2", idempotent=True, timeout_ms=10_000)
        assert await next_value(watch) == b"2"


async def test_each_kind_of_call_renews_a_stale_token(guarded: Cluster, prefix: bytes) -> None:
    """A client for each, since a fresh token serves them all."""

    async def watched(etcd: EtcdClient) -> None:
        async with etcd.watch(prefix) as watch:
            await anext(watch)
            await etcd.put(prefix, b"1")
            assert await next_value(watch) == b"1"

    async def leased(etcd: EtcdClient) -> None:
        grant = await etcd.grant(30)
        assert await etcd.keep_alive_once(grant.lease_id) == 30

    async def at_once(etcd: EtcdClient) -> None:
        await asyncio.gather(*(etcd.txn([], [PutOp(key=b"/at-once%d" % one, value=b"")]) for one in range(20)))

    async def in_turn(use: Callable[[EtcdClient], Awaitable[None]]) -> None:
        async with EtcdClient(guarded.endpoints, credentials=root()) as etcd:
            await etcd.get(prefix)
            await asyncio.sleep(TOKEN_TTL_S + 1.5)
            await use(etcd)

    await asyncio.gather(*(in_turn(use) for use in (watched, leased, at_once)))


async def test_password_where_users_are_off(solo: Cluster, prefix: bytes) -> None:
    async with EtcdClient(solo.endpoints, credentials=root()) as etcd:
        await etcd.put(prefix, b"")


async def test_certificates(tmp_path: Path, prefix: bytes) -> None:
    settings = ClusterSettings(folder=tmp_path / "etcd", hosts=("127.0.0.1",), tls=True, password=PASSWORD)
    async with etcd_cluster(settings) as cluster:
        assert cluster.authority is not None
        files = cluster.authority.client("kvlease")
        ca = str(files.ca)
        credentials = EtcdCredentials(
            tls_ca=ca, tls_cert=str(files.cert), tls_key=str(files.key), user=ROOT, password=PASSWORD
        )
        async with EtcdClient(cluster.endpoints, credentials=credentials) as etcd, etcd.watch(prefix) as watch:
            await anext(watch)
            await etcd.put(prefix, b"1")
            assert await next_value(watch) == b"1"

        stranger = Authority(tmp_path / "stranger").client("kvlease")
        for refused in (
            EtcdCredentials(tls_ca=ca),
            EtcdCredentials(tls_ca=ca, tls_cert=str(stranger.cert), tls_key=str(stranger.key)),
            EtcdCredentials(tls_ca=str(stranger.ca), tls_cert=str(files.cert), tls_key=str(files.key)),
            EtcdCredentials(),
        ):
            async with EtcdClient(cluster.endpoints, credentials=refused) as etcd:
                with pytest.raises(Unavailable):
                    await etcd.get(prefix, timeout_ms=400)


async def test_certificates_are_replaced_while_the_client_is_open(
    tmp_path: Path, prefix: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them, the CA too: whoever went on with the old ones would get no connection any more."""
    caplog.set_level(logging.INFO, "kvlease.etcd")
    settings = ClusterSettings(folder=tmp_path / "etcd", hosts=("127.0.0.1",), tls=True)
    async with etcd_cluster(settings) as cluster:
        assert cluster.authority is not None
        (member,) = cluster.members.values()
        mine = cluster.authority.client("kvlease")
        credentials = EtcdCredentials(tls_ca=str(mine.ca), tls_cert=str(mine.cert), tls_key=str(mine.key))
        async with EtcdClient(cluster.endpoints, credentials=credentials) as etcd, etcd.watch(prefix) as watch:
            await anext(watch)
            await etcd.put(prefix, b"1")
            assert await next_value(watch) == b"1"

            put(mine.cert, b"half of a")  # it goes on with what it has
            await eventually(lambda: _logs(etcd, prefix, caplog, "not usable"), "the fault is in the log")
            await asyncio.sleep(RELOAD_S + 0.1)  # and does not say it again with the next look
            assert (await etcd.get(prefix)).kvs[0].value == b"1"

            fresh = Authority(tmp_path / "fresh")
            server, client = fresh.server("etcd"), fresh.client("kvlease")
            for old, new in ((mine.cert, client.cert), (mine.key, client.key), (mine.ca, client.ca)):
                put(old, new.read_bytes())
            for name in ("etcd.pem", "etcd.key"):
                put(mine.ca.with_name(name), server.cert.with_name(name).read_bytes())
            await eventually(lambda: _logs(etcd, prefix, caplog, "read again"), "new files are found")
            member.kill()
            member.start()
            await member.ready()
            await etcd.put(prefix, b"2", idempotent=True, timeout_ms=10_000)
            assert await next_value(watch) == b"2"
            assert sum("not usable" in x for x in caplog.messages) == 1
            assert "PRIVATE" not in caplog.text


async def _logs(etcd: EtcdClient, prefix: bytes, caplog: pytest.LogCaptureFixture, text: str) -> bool:
    """Files are looked at when something is asked; what was begun with the old ones need not be answered."""
    with contextlib.suppress(Unavailable):
        await etcd.get(prefix, timeout_ms=300)
    return any(text in x for x in caplog.messages)


async def test_credentials_that_cannot_be_used(tmp_path: Path) -> None:
    files, others = Authority(tmp_path / "a").client("one"), Authority(tmp_path / "b").client("two")
    with pytest.raises(CredentialsInvalid, match="go together"):
        EtcdCredentials(tls_ca=str(files.ca), tls_cert=str(files.cert))
    with pytest.raises(CredentialsInvalid, match="needs tls_ca"):
        EtcdCredentials(tls_cert=str(files.cert), tls_key=str(files.key))
    with pytest.raises(CredentialsInvalid, match="go together"):
        EtcdCredentials(user="root")
    with pytest.raises(CredentialsInvalid, match="one of them"):
        EtcdCredentials(user="root", password="a", password_file="b")
    for content, fault in (
        (b"", "no password"),
        (b"\xff\xfe", "UTF-8"),
        (b"p" * 4_097, "no password"),
        (None, "No such"),
    ):
        file = tmp_path / "password"
        if content is None:
            file.unlink()
        else:
            put(file, content)
        with pytest.raises(CredentialsInvalid, match=fault) as unusable:
            EtcdCredentials(user="root", password_file=str(file)).read_password()
        assert str(file) in unusable.value.message
        assert unusable.value.__cause__ is None or isinstance(unusable.value.__cause__, OSError)
    with pytest.raises(CredentialsInvalid, match="unencrypted"):
        EtcdClient(("127.0.0.1:2379", "etcd.example:2379"), credentials=root())
    for wrong in (
        EtcdCredentials(tls_ca=str(tmp_path / "none.pem")),
        EtcdCredentials(tls_ca=str(files.key)),
        EtcdCredentials(tls_ca=str(files.ca), tls_cert=str(files.cert), tls_key=str(others.key)),
    ):
        with pytest.raises(CredentialsInvalid):
            await EtcdClient(("127.0.0.1:1",), credentials=wrong).__aenter__()
    assert PASSWORD not in repr(root())
