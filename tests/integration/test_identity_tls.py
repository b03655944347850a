"""Certificates, on real sockets with real TLS: who is let in, what each may do, and rotation without a restart.

What a foreign tenant is answered is compared with the answer where there is nothing, not with what we think it is.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_channel import open_channel
from kvlease.registry.client_credentials import Credentials, CredentialsInvalid
from kvlease.registry.errors import PermissionDenied, RegistryUnavailable, Unauthenticated
from kvlease.registry.server import RegistryServer, StartError
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.values import (
    DEFAULT_TENANT,
    Alias,
    ConversationId,
    EndReason,
    EngineId,
    Hit,
    Incarnation,
    LeaseFilter,
    LeaseId,
    Miss,
    MissReason,
    PublishStatus,
    RenewStatus,
    ResolveQuery,
    TenantId,
)
from kvlease.registry.wire import decode_publication, decode_publish_result
from kvlease.v1.registry_pb2_grpc import RegistryStub

from tests.integration.certificates import Authority, Files, put
from tests.integration.lending_session import lending as lent
from tests.integration.lending_session import publication
from tests.integration.raw_session import STRIDE, RawSession, digests, engine, lease
from tests.integration.registry_peer import eventually, until

ACME, OTHER = TenantId("acme"), TenantId("other")
LEASE, CHAT = LeaseId("a"), ConversationId("chat")
LENDER = "kvlease://lender/d0?tenant=acme"


class Fleet:
    """A registry with certificates, a lender with one lease of tenant acme, and clients by their grants."""

    def __init__(self, authority: Authority, server: RegistryServer) -> None:
        self.authority = authority
        self.server = server
        self._made = 0

    def files(self, *uris: str) -> Files:
        self._made += 1
        return self.authority.client(f"client{self._made}", *uris)

    def client(self, *uris: str) -> RegistryClient:
        return RegistryClient(self.server.endpoint, credentials=self.files(*uris).credentials)

    @asynccontextmanager
    async def session(self, *uris: str) -> AsyncIterator[RawSession]:
        async with open_channel(self.server.endpoint, self.files(*uris).credentials) as channel:
            yield RawSession(RegistryStub(channel))


@asynccontextmanager
async def fleet(folder: Path, **settings: object) -> AsyncIterator[Fleet]:
    authority = Authority(folder)
    own = authority.server()
    given: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "metrics_listen": NO_METRICS,
        "tls_cert": str(own.cert),
        "tls_key": str(own.key),
        "tls_ca": str(authority.ca),
        **settings,
    }
    async with RegistryServer(RegistrySettings.model_validate(given)) as server:
        yield Fleet(authority, server)


@asynccontextmanager
async def lending(folder: Path, **settings: object) -> AsyncIterator[tuple[Fleet, RawSession]]:
    async with fleet(folder, **settings) as running, running.session(LENDER) as lender:
        await lender.start(held=[lease("a", "xyz")])
        yield running, lender


def query(tenant: TenantId) -> ResolveQuery:
    return ResolveQuery(tenant=tenant, digests=digests("xyz"), stride_tokens=STRIDE)


async def test_each_role_does_its_work(tmp_path: Path) -> None:
    async with lending(tmp_path) as (running, _lender):
        async with running.client("kvlease://borrower/p0?tenant=acme") as borrower:
            for answer in (
                await borrower.resolve(query(ACME), timeout_ms=5_000),
                await borrower.resolve_unary(query(ACME)),
            ):
                assert isinstance(answer, Hit)
        async with running.client("kvlease://router/r0?tenant=acme") as router:
            await router.name_conversation(ACME, CHAT, [Alias(b"n" * 16)])
            assert (await router.locate(ACME, aliases=[Alias(b"n" * 16)])).lease is not None
            assert len((await router.list_leases(LeaseFilter(tenant=ACME))).leases) == 1
        async with running.client("kvlease://operator/ops") as operator:
            assert len((await operator.list_leases()).leases) == 1
            assert await operator.end_engine(EngineId("d0"), EndReason.DRAINED) == 1


async def test_a_role_does_not_do_anothers_work(tmp_path: Path) -> None:
    async with lending(tmp_path) as (running, _lender):
        async with running.client("kvlease://borrower/p0?tenant=*") as borrower:
            with pytest.raises(PermissionDenied):
                await borrower.locate(ACME, CHAT)
            with pytest.raises(PermissionDenied):
                await borrower.end_lease(ACME, LEASE)
        async with running.client("kvlease://router/r0?tenant=*") as router:
            for refused in (
                router.resolve_unary(query(ACME)),
                router.resolve(query(ACME), timeout_ms=5_000),
                router.end_engine(EngineId("d0")),
                router.end_tenant(ACME),
            ):
                with pytest.raises(PermissionDenied):
                    await refused
        async with running.client("kvlease://operator/ops") as operator:
            assert len((await operator.list_leases()).leases) == 1


async def test_a_lender_lends_as_itself_and_for_its_tenants(tmp_path: Path) -> None:
    async with lending(tmp_path) as (running, lender):
        foreign, own = await lender.publish(
            lease("b", "b", conversation="c1", tenant="other"), lease("c", "c", conversation="c2")
        )
        assert decode_publish_result(foreign).status is PublishStatus.INVALID
        assert decode_publish_result(own).status is PublishStatus.PUBLISHED
        async with running.session("kvlease://lender/d1?tenant=*") as impostor:
            with pytest.raises(PermissionDenied):
                await impostor.hello(engine("d0", b"j" * 16))
        async with running.client("kvlease://lender/d1?tenant=*") as impostor_client:
            item = decode_publication(lease("z", "z", conversation="c9"))
            with pytest.raises(PermissionDenied):
                await impostor_client.publish(EngineId("d0"), Incarnation(b"i" * 16), [item])
        async with running.session("kvlease://operator/ops") as operator:
            with pytest.raises(PermissionDenied):
                await operator.hello(engine("d2", b"j" * 16))
        async with running.client("kvlease://operator/ops") as operator_client:
            held = (await operator_client.list_leases()).leases
            assert [(x.lease_id, x.tenant) for x in held] == [("a", "acme"), ("c", "acme")]
            assert [x.engine.engine_id for x in await operator_client.list_engines()] == ["d0"]


async def test_what_a_lender_presents_for_others_is_left_out(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running, running.session(LENDER) as lender:
        ack = await lender.start(held=[lease("b", "b", conversation="c1", tenant="other"), lease("a", "xyz")])
        statuses = [decode_publish_result(x).status for x in ack.results]
        assert statuses == [PublishStatus.INVALID, PublishStatus.PUBLISHED]


@pytest.mark.parametrize("names_own_tenant", [True, False])
async def test_a_foreign_lease_is_answered_exactly_as_a_miss_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names_own_tenant: bool
) -> None:
    tenant = OTHER if names_own_tenant else ACME
    nothing = LeaseId("no-such-lease")
    async with lending(tmp_path) as (running, _lender):
        grants = ("kvlease://borrower/b?tenant=other", "kvlease://router/b?tenant=other")
        async with running.client(*grants) as client:
            with caplog.at_level(logging.WARNING):
                for given, absent in (
                    (ResolveQuery(tenant=tenant, lease_id=LEASE), ResolveQuery(tenant=OTHER, lease_id=nothing)),
                    (
                        ResolveQuery(tenant=tenant, conversation=CHAT),
                        ResolveQuery(tenant=OTHER, conversation=ConversationId("none")),
                    ),
                    (query(tenant), ResolveQuery(tenant=OTHER, digests=b"\0" * 16, stride_tokens=STRIDE)),
                ):
                    expected = await client.resolve_unary(absent)
                    assert expected == Miss(reason=MissReason.UNKNOWN)
                    assert await client.resolve_unary(given) == expected
                    assert await client.resolve(given, timeout_ms=5_000) == expected
                located = await client.locate(tenant, CHAT)
                assert (located.lease, located.reason, located.api_url) == (None, MissReason.UNKNOWN, "")
                assert await client.renew(tenant, LEASE) == await client.renew(OTHER, nothing)
                assert (await client.renew(tenant, LEASE)).status is RenewStatus.UNKNOWN
                assert await client.end_lease(tenant, LEASE) == 0
                assert await client.end_conversation(tenant, CHAT) == 0
        async with running.client("kvlease://operator/ops") as operator:
            assert [x.lease_id for x in (await operator.list_leases()).leases] == ["a"]
    told = [x.getMessage() for x in caplog.records if x.name.endswith("refusals")]
    for act in ("resolve", "renew", "end"):
        assert any(act in x and "a" in x.split() and "acme" in x and "router/b" in x for x in told), (act, told)
    assert not any(nothing in x for x in told)


async def test_lists_watches_and_names_of_a_foreign_tenant_are_refused(tmp_path: Path) -> None:
    async with lending(tmp_path) as (running, _lender), running.client("kvlease://router/r?tenant=other") as router:
        for selection in (LeaseFilter(), LeaseFilter(tenant=ACME)):
            with pytest.raises(PermissionDenied):
                await router.list_leases(selection)
            with pytest.raises(PermissionDenied):
                await anext(router.watch(selection))
        with pytest.raises(PermissionDenied):
            await router.name_conversation(ACME, CHAT, [Alias(b"n" * 16)])
        assert (await router.list_leases(LeaseFilter(tenant=OTHER))).leases == ()


async def test_without_a_good_certificate_nobody_comes_in(tmp_path: Path) -> None:
    async with lending(tmp_path) as (running, _lender):
        stranger = Authority(tmp_path / "elsewhere").client("x", "kvlease://operator/ops")
        unsigned = Credentials(tls_ca=str(running.authority.ca), tls_cert=str(stranger.cert), tls_key=str(stranger.key))
        for credentials in (None, Credentials(tls_ca=str(running.authority.ca)), unsigned):
            async with RegistryClient(running.server.endpoint, credentials=credentials) as client:
                with pytest.raises(RegistryUnavailable):
                    await client.list_engines(timeout_ms=1_000)
        for names in (("https://example.org/ops",), ("kvlease://root/ops",), ("kvlease://operator/ops?tenant=acme",)):
            async with running.client(*names) as client:
                with pytest.raises(Unauthenticated):
                    await client.list_engines()


async def test_a_client_does_not_trust_another_registry(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        own = running.files("kvlease://operator/ops")
        other_ca = Authority(tmp_path / "elsewhere").ca
        credentials = Credentials(tls_ca=str(other_ca), tls_cert=str(own.cert), tls_key=str(own.key))
        async with RegistryClient(running.server.endpoint, credentials=credentials) as client:
            with pytest.raises(RegistryUnavailable):
                await client.list_engines(timeout_ms=1_000)


# --- rotation


async def _server_certificate(port: int) -> str:
    """What the server shows at a handshake; it closes the connection afterwards, for want of a client's."""
    return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))


async def test_the_registrys_certificate_rotates_without_a_restart(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        files = running.files("kvlease://operator/ops")
        async with RegistryClient(running.server.endpoint, credentials=files.credentials) as before:
            await before.list_engines()
            first = await _server_certificate(running.server.port)
            second = running.authority.server()  # over the same files

            async def is_shown() -> bool:
                return await _server_certificate(running.server.port) != first

            await eventually(is_shown, "the new certificate")
            assert await _server_certificate(running.server.port) == second.cert.read_text()
            await before.list_engines()  # the open connection goes on
        async with RegistryClient(running.server.endpoint, credentials=files.credentials) as after:
            await after.list_engines()


async def test_a_certificate_without_its_key_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with fleet(tmp_path) as running:
        shown = await _server_certificate(running.server.port)
        put(running.authority.server().key, b"no key\n")
        await until(lambda: "stays in force" in caplog.text, "the log to tell of the unusable file")
        assert await _server_certificate(running.server.port) == shown
        async with running.client("kvlease://operator/ops") as client:
            await client.list_engines()


async def test_a_client_takes_its_new_certificate_for_its_next_connection(tmp_path: Path) -> None:
    async with lending(tmp_path) as (running, _lender):
        files = running.authority.client("rotating", "kvlease://router/r?tenant=other")
        async with RegistryClient(running.server.endpoint, credentials=files.credentials) as client:
            assert (await client.locate(ACME, CHAT)).lease is None
            running.authority.client("rotating", "kvlease://router/r?tenant=acme")

            async def is_found() -> bool:
                return (await client.locate(ACME, CHAT)).lease is not None

            await eventually(is_found, "the grants of the new certificate")


async def test_half_written_files_of_a_client_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with lending(tmp_path) as (running, _lender):
        files = running.authority.client("rotating", "kvlease://router/r?tenant=acme")
        async with RegistryClient(running.server.endpoint, credentials=files.credentials) as client:
            assert (await client.locate(ACME, CHAT)).lease is not None
            put(files.cert, b"half")

            async def is_told() -> bool:
                assert (await client.locate(ACME, CHAT)).lease is not None
                return "the old ones stay" in caplog.text

            await eventually(is_told, "the log to tell of it")


async def test_a_session_and_a_stream_live_through_a_change_of_the_clients_authority(tmp_path: Path) -> None:
    grants = ("kvlease://lender/d-1", "kvlease://borrower/d-1")
    old = Authority(tmp_path / "clients")
    engine_files, outdated = old.client("engine", *grants), old.client("outdated", "kvlease://operator/ops")
    async with fleet(tmp_path, tls_ca=str(old.ca), connection_age_ms=300) as running:

        def credentials(files: Files) -> Credentials:
            return Credentials(tls_ca=str(running.authority.ca), tls_cert=str(files.cert), tls_key=str(files.key))

        endpoint = running.server.endpoint
        async with (
            RegistryClient(endpoint, credentials=credentials(engine_files)) as borrower,
            RegistryClient(endpoint, credentials=credentials(outdated)) as outsider,
            lent(endpoint, credentials=credentials(engine_files)) as lender,
        ):
            await lender.hears("connected")
            lender.session.publish(publication("a"))
            asked = ResolveQuery(tenant=DEFAULT_TENANT, lease_id=LEASE)
            await eventually(lambda: _is_hit(borrower, asked), "a hit")
            assert await _is_let_in(outsider)

            Authority(tmp_path / "clients").client("engine", *grants)  # another CA, over the same files
            await eventually(lambda: _is_kept_out(outsider), "the old CA's certificates to be refused")
            lender.heard.events.clear()
            await lender.hears("connected")
            await eventually(lambda: _is_hit(borrower, asked), "a hit over a new connection")
            assert await _is_kept_out(outsider)


async def _is_kept_out(client: RegistryClient) -> bool:
    return not await _is_let_in(client)


async def _is_let_in(client: RegistryClient) -> bool:
    try:
        await client.list_engines(timeout_ms=1_000)
    except RegistryUnavailable:
        return False
    return True


async def _is_hit(client: RegistryClient, asked: ResolveQuery) -> bool:
    try:
        return isinstance(await client.resolve(asked, timeout_ms=1_000), Hit)
    except RegistryUnavailable:
        return False


async def test_a_registry_does_not_start_with_files_it_cannot_use(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, other = authority.server(), authority.server("other")
    for cert, key, ca in (
        (own.cert, other.key, authority.ca),
        (own.cert, own.key, own.key),
        (own.cert, tmp_path / "missing", authority.ca),
    ):
        settings = RegistrySettings(
            listen="127.0.0.1:0", metrics_listen=NO_METRICS, tls_cert=str(cert), tls_key=str(key), tls_ca=str(ca)
        )
        with pytest.raises(StartError, match=str(tmp_path)):
            async with RegistryServer(settings):
                pass
    own.key.chmod(0o644)
    with pytest.raises(StartError, match="chmod 600"):
        async with RegistryServer(
            RegistrySettings(
                listen="127.0.0.1:0",
                metrics_listen=NO_METRICS,
                tls_cert=str(own.cert),
                tls_key=str(own.key),
                tls_ca=str(authority.ca),
            )
        ):
            pass


async def test_a_client_says_at_once_what_is_wrong_with_its_files(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    good, other = authority.client("a", "kvlease://router/r"), authority.client("b", "kvlease://router/r")
    for credentials in (
        Credentials(tls_ca=str(good.ca), tls_cert=str(good.cert), tls_key=str(other.key)),
        Credentials(tls_ca=str(good.key)),
        Credentials(tls_ca=str(tmp_path / "missing")),
    ):
        with pytest.raises(CredentialsInvalid, match=str(tmp_path)):
            async with RegistryClient("127.0.0.1:1", credentials=credentials):
                pass
