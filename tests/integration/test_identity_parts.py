"""An engine's connector and a router with credentials of their own, before a registry that lets nobody else in.

The link and the router are the product's; engines behind the router only answer HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from kvlease.connector.borrower import Ask, BorrowTerms, ComputeReason, Question
from kvlease.connector.digests import Chain
from kvlease.connector.journal import Journal
from kvlease.connector.link import Link
from kvlease.connector.probe import LenderProbe, Peer
from kvlease.connector.settings import ConnectorSettings
from kvlease.registry.clock import SystemClock
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.telemetry import configure_tracing
from kvlease.registry.values import DEFAULT_TENANT, Engine, EngineId, Incarnation, LeaseId
from kvlease.router.server import RouterServer

from tests.integration.certificates import Authority, Files
from tests.integration.lending_session import publication
from tests.integration.registry_peer import until
from tests.integration.router_peers import LIMIT_S, fleet, sample, url
from tests.integration.router_peers import Engine as HttpEngine

ENGINE = ("kvlease://lender/d0", "kvlease://borrower/d0")
QUESTION = Question(
    ask=Ask(
        request_id="r",
        tenant=DEFAULT_TENANT,
        conversation=None,
        lease_id=LeaseId("a"),
        chain=Chain.of(b""),
        prompt_tokens=1,
    ),
    terms=BorrowTerms(fingerprint_hash=b"", block_tokens=16, stride_tokens=64),
)
FOUND = ComputeReason.RECORD_INVALID
"""The lease is there; its record is none that an engine would have made."""


class OpenSideChannel:
    async def answers_for(self, peer: Peer) -> bool:
        return True

    async def close(self) -> None:
        return None


def registry(authority: Authority) -> RegistryServer:
    own = authority.server()
    return RegistryServer(
        RegistrySettings(
            listen="127.0.0.1:0",
            metrics_listen=NO_METRICS,
            tls_cert=str(own.cert),
            tls_key=str(own.key),
            tls_ca=str(authority.ca),
        )
    )


def link(server: RegistryServer, files: Files) -> Link:
    told = {"tls_ca": str(files.ca), "tls_cert": str(files.cert), "tls_key": str(files.key)}
    settings = ConnectorSettings.load({"registry": server.endpoint, "resolve_wait_ms": 5_000, **told})
    probe = LenderProbe(OpenSideChannel(), SystemClock(), settings.probe_ms)
    return Link(settings, SystemClock(), Journal(configure_tracing("test")), probe)


async def test_an_engine_lends_and_borrows_by_its_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with registry(authority) as server:
        opened = link(server, authority.client("engine", *ENGINE))
        opened.start()
        try:
            opened.lend_as(Engine(engine_id=EngineId("d0"), incarnation=Incarnation(b"i" * 16)))
            opened.call(opened.with_session, lambda session: session.publish(publication("a")))

            def is_lent() -> bool:
                opened.resolve("r", QUESTION)
                return any(x.found is FOUND for x in opened.answers)

            await until(is_lent, "the lease")
        finally:
            await asyncio.to_thread(opened.close)


async def test_an_engine_that_is_refused_says_so_and_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    async with registry(authority) as server:
        opened = link(server, authority.client("engine", "kvlease://lender/another"))
        opened.start()
        try:
            opened.lend_as(Engine(engine_id=EngineId("d0"), incarnation=Incarnation(b"i" * 16)))
            opened.resolve("r", QUESTION)
            await until(lambda: bool(opened.answers), "an answer")
            assert opened.answers[0].found is not FOUND
            await until(lambda: "refuses this lender (PERMISSION_DENIED)" in caplog.text, "the log to tell")
        finally:
            await asyncio.to_thread(opened.close)


def named(router: RouterServer, outcome: str) -> Callable[[], bool]:
    return lambda: sample(router, "kvlease_router_namings_total", outcome=outcome) > 0


@pytest.mark.parametrize(
    ("grant", "outcome"),
    [("kvlease://router/r", "named"), ("kvlease://router/r?tenant=other", "permission_denied")],
)
async def test_a_router_serves_turns_whether_or_not_it_is_let_in(tmp_path: Path, grant: str, outcome: str) -> None:
    authority = Authority(tmp_path)
    files = authority.client("router", grant)
    flags = ("--tls-ca", str(files.ca), "--tls-cert", str(files.cert), "--tls-key", str(files.key))
    async with (
        registry(authority) as server,
        fleet([HttpEngine()], [HttpEngine()], "--registry", server.endpoint, *flags) as (router, http),
    ):
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi?"}]}
        async with asyncio.timeout(LIMIT_S), http.post(url(router), json=body) as answer:
            assert answer.status == 200
        await until(named(router, outcome), f"a naming that ends as {outcome}")
