"""Bearer tokens on real sockets: who is let in, tokens that come and go, and that no secret is ever told.

Plain sockets of loopback but for one test; what roles may do is tested with certificates.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_channel import open_channel
from kvlease.registry.client_credentials import Credentials, CredentialsInvalid
from kvlease.registry.errors import KvleaseError, PermissionDenied, Unauthenticated
from kvlease.registry.server import RegistryServer, StartError
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.values import ConversationId, Hit, LeaseFilter, LeaseId, ResolveQuery, TenantId
from kvlease.v1.registry_pb2_grpc import RegistryStub

from tests.integration.certificates import Authority, put
from tests.integration.collector import collecting
from tests.integration.raw_session import LIMIT_S, RawSession, lease
from tests.integration.registry_peer import eventually, until

ACME = TenantId("acme")
ROUTER, LENDER = "kvlease://router/r?tenant=acme", "kvlease://lender/d0?tenant=acme kvlease://borrower/d0?tenant=acme"


class Tokens:
    """A registry's token file and the clients' own, one each."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._grants: dict[str, str] = {}
        self.path = folder / "tokens"
        self.write()

    def give(self, name: str, grants: str) -> Credentials:
        """A token for `name`; a new one if it has one already."""
        token = secrets.token_hex(32)
        put(self._folder / name, token.encode() + b"\n")
        self._grants[name] = f"sha256:{hashlib.sha256(token.encode()).hexdigest()} {grants}"
        self.write()
        return Credentials(token_file=str(self._folder / name))

    def take(self, name: str) -> None:
        del self._grants[name]
        self.write()

    def write(self) -> None:
        put(self.path, "".join(f"{line}\n" for line in self._grants.values()).encode())

    def secrets(self) -> list[str]:
        """Everything that must not be told: tokens and their hashes."""
        own = [(self._folder / name).read_text().strip() for name in self._grants]
        return own + [hashlib.sha256(x.encode()).hexdigest() for x in own]


@asynccontextmanager
async def registry(tokens: Tokens, **settings: object) -> AsyncIterator[RegistryServer]:
    given: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "metrics_listen": NO_METRICS,
        "token_file": str(tokens.path),
        **settings,
    }
    async with RegistryServer(RegistrySettings.model_validate(given)) as server:
        yield server


async def test_a_token_says_who_a_caller_is(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    engine, router = tokens.give("engine", LENDER), tokens.give("router", ROUTER)
    async with (
        registry(tokens) as server,
        open_channel(server.endpoint, engine) as channel,
        RegistryClient(server.endpoint, credentials=engine) as borrower,
        RegistryClient(server.endpoint, credentials=router) as client,
    ):
        lender = RawSession(RegistryStub(channel))
        await lender.start(held=[lease("a", "xyz")])
        assert (await client.locate(ACME, ConversationId("chat"))).lease is not None
        asked = ResolveQuery(tenant=ACME, lease_id=LeaseId("a"))
        assert isinstance(await borrower.resolve(asked, timeout_ms=5_000), Hit)
        with pytest.raises(PermissionDenied):
            await client.resolve_unary(asked)


async def test_without_a_known_token_nobody_comes_in(tmp_path: Path) -> None:
    tokens, elsewhere = Tokens(tmp_path), Tokens(tmp_path / "elsewhere")
    tokens.give("somebody", ROUTER)
    async with registry(tokens) as server:
        for credentials in (None, elsewhere.give("other", ROUTER)):
            async with RegistryClient(server.endpoint, credentials=credentials) as client:
                with pytest.raises(Unauthenticated):
                    await client.list_engines()
                with pytest.raises(Unauthenticated):
                    await client.resolve(ResolveQuery(tenant=ACME, lease_id=LeaseId("a")), timeout_ms=5_000)
                with pytest.raises(Unauthenticated):
                    await anext(client.watch())


async def test_a_token_that_is_taken_away_ends_its_streams_and_no_others(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    engine, router, other = (tokens.give(x, y) for x, y in (("e", LENDER), ("r", ROUTER), ("o", ROUTER)))
    async with (
        registry(tokens) as server,
        open_channel(server.endpoint, engine) as channel,
        RegistryClient(server.endpoint, credentials=router) as client,
        RegistryClient(server.endpoint, credentials=other) as staying,
        aclosing(client.watch(_acme())) as watch,
        aclosing(staying.watch(_acme())) as going_on,
    ):
        lender = RawSession(RegistryStub(channel))
        await lender.start()
        await anext(watch)
        await anext(going_on)
        tokens.take("e")
        tokens.take("r")
        with pytest.raises(Unauthenticated):
            await lender.hear()
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(Unauthenticated):
                await anext(watch)
        with pytest.raises(Unauthenticated):
            await client.locate(ACME, ConversationId("chat"))
        assert (await anext(going_on)).events == ()


async def test_a_new_token_is_taken_up_by_both_sides(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    credentials = tokens.give("r", ROUTER)
    async with registry(tokens) as server, RegistryClient(server.endpoint, credentials=credentials) as client:
        await client.list_engines()
        tokens.give("r", ROUTER)

        async def is_let_in(asking: RegistryClient) -> bool:
            try:
                await asking.list_engines()
            except Unauthenticated:
                return False
            return True

        async def is_known() -> bool:
            async with RegistryClient(server.endpoint, credentials=credentials) as fresh:
                return await is_let_in(fresh)

        await eventually(is_known, "the registry to know the new token")
        await eventually(lambda: is_let_in(client), "the client to send it")


async def test_a_faulty_token_file_keeps_a_registry_from_starting_and_a_running_one_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens(tmp_path)
    credentials = tokens.give("r", ROUTER)
    async with registry(tokens) as server, RegistryClient(server.endpoint, credentials=credentials) as client:
        for content, fault in ((b"sha256:oops\n", "line 1"), (b"", "no line with a token")):
            caplog.clear()
            put(tokens.path, content)
            await until(partial(_is_told, caplog, f"stays in force: {tokens.path}: {fault}"), fault)
            await client.list_engines()
    for content, fault in ((b"sha256:oops\n", "line 1"), (b"# nobody yet\n", "no line with a token")):
        put(tokens.path, content)
        with pytest.raises(StartError, match=fault):
            async with registry(tokens):
                pass
    tokens.path.chmod(0o644)
    with pytest.raises(StartError, match="chmod 600"):
        async with registry(tokens):
            pass


async def test_tokens_over_tls(tmp_path: Path) -> None:
    authority, tokens = Authority(tmp_path), Tokens(tmp_path)
    own = authority.server()
    token = tokens.give("r", ROUTER).token_file
    async with registry(tokens, tls_cert=str(own.cert), tls_key=str(own.key)) as server:
        credentials = Credentials(tls_ca=str(authority.ca), token_file=token)
        async with RegistryClient(server.endpoint, credentials=credentials) as client:
            await client.list_engines()


async def test_a_token_does_not_travel_in_clear_to_another_host(tmp_path: Path) -> None:
    credentials = Tokens(tmp_path).give("r", ROUTER)
    for endpoint in ("registry.example:7411", "192.0.2.1:7411", "[2001:db8::1]:7411"):
        with pytest.raises(CredentialsInvalid, match="unencrypted"):
            async with RegistryClient(endpoint, credentials=credentials):
                pass


async def test_nothing_secret_is_told_at_any_level(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Identity, sessions, resolves and refusals, with everything logged and traced that there is to log and trace."""
    caplog.set_level(logging.DEBUG)
    tokens = Tokens(tmp_path)
    engine, router = tokens.give("engine", LENDER), tokens.give("router", ROUTER)
    content, body = "the digests of a prompt", b"body of a"
    prompt = content.ljust(32)[:32].encode()
    told: list[str] = []
    async with (
        collecting() as (collector, otlp_endpoint),
        registry(tokens, log_level="debug", otlp_endpoint=otlp_endpoint) as server,
        open_channel(server.endpoint, engine) as channel,
        RegistryClient(server.endpoint, credentials=engine) as borrower,
        RegistryClient(server.endpoint, credentials=router) as client,
        RegistryClient(server.endpoint) as stranger,
    ):
        lender = RawSession(RegistryStub(channel))
        item = lease("a", "xyz")
        item.record.digests = prompt
        await lender.start(held=[item, lease("b", "b", tenant="other")])
        for tenant in (ACME, TenantId("other")):
            await borrower.resolve(ResolveQuery(tenant=tenant, digests=prompt, stride_tokens=64), timeout_ms=5_000)
        for refused in (
            client.resolve_unary(ResolveQuery(tenant=ACME, digests=prompt, stride_tokens=64)),
            stranger.list_engines(),
            borrower.resolve(ResolveQuery(tenant=ACME, digests=b"odd", stride_tokens=64), timeout_ms=5_000),
        ):
            with pytest.raises(KvleaseError) as error:
                await refused
            told += [str(error.value), repr(error.value), repr(error.value.__cause__)]
        told += [repr(x) for x in (engine, router, server, channel, client)]
    spans = [str(span) for span in collector.spans]
    assert any("resolve" in x for x in spans), "there were no spans to look at"
    told += spans
    put(tokens.path, tokens.secrets()[0].encode())
    with pytest.raises(StartError) as faulty:
        async with registry(tokens):
            pass
    told += [str(faulty.value), repr(faulty.value.__cause__)]
    told += [f"{x.getMessage()} {x.args!r} {x.exc_text}" for x in caplog.records]
    assert any("refused" in x for x in told), "there was nothing to look at"
    for secret in (*tokens.secrets(), content, prompt.hex(), repr(prompt), body.decode()):
        assert not [x for x in told if secret in x], secret


def _acme() -> LeaseFilter:
    return LeaseFilter(tenant=ACME)


def _is_told(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return text in caplog.text
