"""The topology of the compose file at work: certificates by the script, three etcd members, two registries, a router.

Everything is a process of its own with TLS on every connection; the lender and the borrower have the certificates that
the script makes for engines. What faults do is for the chaos suite; here, the files of deploy/ fit together.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_credentials import Credentials
from kvlease.registry.clock import SystemClock
from kvlease.registry.errors import KvleaseError
from kvlease.registry.values import Hit, LeaseId

from tests.deploy.compose_run import MEMBERS, METRICS, REGISTRIES, Compose, compose
from tests.deploy.tools import DEPLOY, said
from tests.integration.holding_lender import HoldingLender, holding, query
from tests.integration.registry_peer import eventually, until

ANSWER_S = 2.0
V3 = {"ETCDCTL_API": "3"}


def client(services: Compose, caller: str, registry: str = "") -> RegistryClient:
    """Of one registry, or of all."""
    endpoints = services.endpoint(registry) if registry else services.registries
    return RegistryClient(endpoints, credentials=services.proof(f"clients/{caller}"))


async def lend(lender: HoldingLender, lease_id: str) -> None:
    lender.lend(lease_id)
    await until(lambda: LeaseId(lease_id) in lender.published, f"{lease_id} is published")


async def hits(borrower: RegistryClient, lease_id: str) -> bool:
    try:
        return isinstance(await borrower.resolve_unary(query(lease_id), timeout_ms=1_000), Hit)
    except KvleaseError:
        return False


@pytest.mark.timeout(240)
async def test_registries_are_replaced_one_by_one_and_a_member_dies(tmp_path: Path) -> None:
    async with compose(tmp_path) as services, AsyncExitStack() as lives:
        await asyncio.gather(*(services.start(name) for name in (*MEMBERS, *REGISTRIES)))
        await services.healthy(*MEMBERS, *REGISTRIES)
        beside = {name: await lives.enter_async_context(client(services, "prefill-0", name)) for name in REGISTRIES}
        home = await lives.enter_async_context(client(services, "decode-0"))
        lender = await lives.enter_async_context(holding(home, "decode-0", SystemClock()))
        await lend(lender, "first")
        for name, borrower in beside.items():
            await eventually(lambda at=borrower: hits(at, "first"), f"it is resolved at {name}")  # type: ignore[misc]

        for name in REGISTRIES:  # as an upgrade does
            (other,) = (beside[x] for x in REGISTRIES if x != name)
            assert await services.stop(name) == 0
            assert await services.check(name) != 0
            assert await hits(other, "first"), "the other one goes on with what it knows"
            await lend(lender, f"without-{name}")
            await services.start(name)
            await services.healthy(name)
            await eventually(lambda at=beside[name]: hits(at, "first"), "the new one knows it")  # type: ignore[misc]
        assert lender.connects > 1

        await services.kill(MEMBERS[0])
        await lend(lender, "by-two")
        for borrower in beside.values():
            await eventually(lambda at=borrower: hits(at, "by-two"), "two are enough")  # type: ignore[misc]
        await services.start(MEMBERS[0])
        await services.healthy(MEMBERS[0])

        # etcd loses everything, and no registry is started again for it: lenders have what matters.
        for name in MEMBERS:
            await services.kill(name)
            services.forget(name)
        await asyncio.gather(*(services.start(name) for name in MEMBERS))
        await services.healthy(*MEMBERS, *REGISTRIES)
        await lend(lender, "after-all")
        for borrower in beside.values():
            await eventually(lambda at=borrower: hits(at, "after-all"), "all goes on")  # type: ignore[misc]
            await eventually(lambda at=borrower: hits(at, "first"), "what lenders hold is back")  # type: ignore[misc]
            assert await hits(borrower, "by-two")


@pytest.mark.timeout(240)
async def test_who_is_let_in_and_what_there_is_to_see(tmp_path: Path) -> None:
    async with compose(tmp_path) as services:
        await asyncio.gather(*(services.start(name) for name in (*MEMBERS, REGISTRIES[0], "router")))
        await services.healthy(*MEMBERS, REGISTRIES[0])
        async with RegistryClient(services.endpoint(REGISTRIES[0])) as nobody:
            with pytest.raises(KvleaseError):
                await nobody.list_engines(timeout_ms=2_000)
        async with client(services, "operator", REGISTRIES[0]) as operator:
            assert not await operator.list_engines()

        # An engine is not let in to etcd, where everything would be its own. A registry is; but neither that nor any
        # certificate of that authority that is not made out to a member is enough to be one.
        member, registries = MEMBERS[0], services.proof("registry/etcd")
        said(services.ask_etcd(member, services.proof("clients/decode-0")), status=1, env=V3)
        said(services.ask_etcd(member, registries), env=V3)
        peer = f"https://{services.endpoint(member, 2380)}/version"
        assert "etcdserver" in await asyncio.to_thread(_get, peer, services.proof("etcd/peer"))
        for proof in (registries, services.proof("etcd/server")):
            assert await asyncio.to_thread(_get, peer, proof) == ""

        there = await asyncio.to_thread(_get, f"http://{services.endpoint(MEMBERS[0], METRICS)}/metrics")
        for metric in _etcd_metrics_asked_for():
            assert f"\n{metric} " in there, metric
        await eventually(lambda: _router_knows(services), "the router has a registry")


def _etcd_metrics_asked_for() -> set[str]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "kvlease-alerts.yml").read_text())["groups"]
    return {name for group in groups for rule in group["rules"] for name in re.findall(r"\betcd_\w+", rule["expr"])}


async def _router_knows(services: Compose) -> bool:
    report = json.loads(await asyncio.to_thread(_get, f"http://{services.endpoint('router', 8000)}/health") or "{}")
    return bool(report.get("registry") == "up")


def _get(url: str, proof: Credentials | None = None) -> str:
    """The body, whatever the status; "" if nobody answers, or not to somebody with this proof."""
    context = None
    if proof is not None:
        context = ssl.create_default_context(cafile=proof.tls_ca)
        context.load_cert_chain(proof.tls_cert, proof.tls_key)
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S, context=context) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""
