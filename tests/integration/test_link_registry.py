"""The connector's thread and a real registry: a lender that says something new about itself keeps its place.

Real sockets; the engine's part is played by calls as the engine's thread makes them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Self

from kvlease.connector.journal import Journal
from kvlease.connector.link import Link
from kvlease.connector.probe import LenderProbe, Peer
from kvlease.connector.settings import ConnectorSettings
from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.lender_session import LenderSession
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.telemetry import configure_tracing
from kvlease.registry.values import (
    DEFAULT_TENANT,
    ConversationId,
    EndReason,
    Engine,
    EngineId,
    Fingerprint,
    Hit,
    Incarnation,
    LeaseId,
    Miss,
    MissReason,
    OnDeadline,
    Publication,
    Record,
    RenewStatus,
    ResolveQuery,
)

from tests.integration.registry_peer import eventually

OLD = Fingerprint(hash=b"o" * 16, fields=(("weights_version", "0"),))
NEW = Fingerprint(hash=b"n" * 16, fields=(("weights_version", "0, step-17"),))
ENGINE = Engine(engine_id=EngineId("d-1"), incarnation=Incarnation(b"i" * 16), fingerprint=OLD)


class NoSideChannel:
    async def answers_for(self, peer: Peer) -> bool:
        return False

    async def close(self) -> None:
        return None


def lease(name: str, fingerprint: Fingerprint, now_ms: int, conversation: str = "c") -> Publication:
    return Publication(
        lease_id=LeaseId(name),
        tenant=DEFAULT_TENANT,
        conversation=ConversationId(conversation),
        stride_tokens=64,
        block_count=2,
        size_bytes=0,
        deadline_ms=now_ms + 60_000,
        on_deadline=OnDeadline.LAPSE,
        fingerprint_hash=fingerprint.hash,
        record=Record(digests=name.encode().ljust(16), body=b"body"),
    )


async def test_an_idle_lenders_lease_is_renewed_by_the_link() -> None:
    """The engine takes no step here: nobody takes orders. What it is to keep later is one thing for each lease."""
    clock = SystemClock()
    registry = RegistrySettings(listen="127.0.0.1:0", metrics_listen=NO_METRICS)
    async with RegistryServer(registry) as server, RegistryClient(server.endpoint) as client:
        settings = ConnectorSettings.load({"registry": server.endpoint})
        probe = LenderProbe(NoSideChannel(), clock, settings.probe_ms)
        link = Link(settings, clock, Journal(configure_tracing("test")), probe)
        link.renew = lambda lease_id, ttl_ms: (
            clock.now_ms() + ttl_ms if lease_id == "promised" else RenewStatus.DISABLED
        )
        link.start()
        try:
            link.lend_as(ENGINE)
            for name in ("promised", "refused"):
                made = lease(name, OLD, clock.now_ms())
                link.call(link.with_session, lambda session, made=made: session.publish(made))

            async def held() -> bool:
                return len((await client.list_leases()).leases) == 2

            await eventually(held, "both leases")
            for ttl_ms in (100_000, 200_000):
                renewed = await client.renew(DEFAULT_TENANT, LeaseId("promised"), ttl_ms=ttl_ms)
                assert renewed.status is RenewStatus.RENEWED
                assert abs(renewed.remaining_ms - ttl_ms) < 5_000  # by two clocks
            refused = await client.renew(DEFAULT_TENANT, LeaseId("refused"))
            assert refused.status is RenewStatus.DISABLED
            assert [(lease_id, ttl_ms) for lease_id, (ttl_ms, _) in link.renewals.items()] == [("promised", 200_000)]
        finally:
            link.close()


async def test_a_lender_that_terminates_ends_all_its_leases_without_a_step() -> None:
    clock = SystemClock()
    registry = RegistrySettings(listen="127.0.0.1:0", metrics_listen=NO_METRICS)
    async with RegistryServer(registry) as server, RegistryClient(server.endpoint) as client:
        settings = ConnectorSettings.load({"registry": server.endpoint})
        probe = LenderProbe(NoSideChannel(), clock, settings.probe_ms)
        link = Link(settings, clock, Journal(configure_tracing("test")), probe)
        broken: list[bool] = []
        link.break_all = lambda: broken.append(True)
        link.start()
        try:
            link.lend_as(ENGINE)
            for number in range(300):
                made = lease(f"lease-{number}", OLD, clock.now_ms(), conversation=f"c{number}")
                link.call(link.with_session, lambda session, made=made: session.publish(made))

            async def held(count: int) -> bool:
                return len((await client.list_leases()).leases) == count

            await eventually(lambda: held(300), "all leases")
            await asyncio.to_thread(link.end_all)
            assert await held(0), "the registry had not heard of it"
            assert broken == [True]
        finally:
            link.close()


async def test_a_lender_with_new_weights_says_so_and_goes_on_lending() -> None:
    clock = SystemClock()
    registry = RegistrySettings(listen="127.0.0.1:0", metrics_listen=NO_METRICS)
    async with RegistryServer(registry) as server, RegistryClient(server.endpoint) as client:
        settings = ConnectorSettings.load({"registry": server.endpoint})
        probe = LenderProbe(NoSideChannel(), clock, settings.probe_ms)
        link = Link(settings, clock, Journal(configure_tracing("test")), probe)

        def tell(action: Callable[[LenderSession], None]) -> None:
            link.call(link.with_session, action)

        async def ask(fingerprint: Fingerprint) -> Hit | Miss:
            return await client.resolve(
                ResolveQuery(
                    tenant=DEFAULT_TENANT, conversation=ConversationId("c"), fingerprint_hash=fingerprint.hash
                ),
                timeout_ms=5_000,
            )

        async def found(fingerprint: Fingerprint, name: str) -> bool:
            answer = await ask(fingerprint)
            return isinstance(answer, Hit) and answer.lease_id == name

        link.start()
        try:
            link.lend_as(ENGINE)
            tell(lambda session: session.publish(lease("before", OLD, clock.now_ms())))
            await eventually(lambda: found(OLD, "before"), "the first lease")
            tell(lambda session: session.ended(LeaseId("before"), EndReason.WEIGHTS_CHANGED))
            link.lend_as(dataclasses.replace(ENGINE, fingerprint=NEW))
            tell(lambda session: session.publish(lease("after", NEW, clock.now_ms())))
            await eventually(lambda: found(NEW, "after"), "the lease under the new fingerprint")
            miss = await ask(OLD)
            assert isinstance(miss, Miss)
            assert miss.reason is MissReason.FINGERPRINT
            assert miss.lender_fingerprint is not None
            assert miss.lender_fingerprint.differences(OLD) == ("weights_version",)
            assert [status.engine.fingerprint for status in await client.list_engines()] == [NEW]
        finally:
            link.close()


class SlowProbe(LenderProbe):
    """Takes a while to open, as anything may on a busy machine."""

    async def __aenter__(self) -> Self:
        await asyncio.sleep(0.3)
        return await super().__aenter__()


async def test_what_is_lent_while_the_link_still_opens_is_published() -> None:
    clock = SystemClock()
    registry = RegistrySettings(listen="127.0.0.1:0", metrics_listen=NO_METRICS)
    async with RegistryServer(registry) as server, RegistryClient(server.endpoint) as client:
        settings = ConnectorSettings.load({"registry": server.endpoint})
        probe = SlowProbe(NoSideChannel(), clock, settings.probe_ms)
        link = Link(settings, clock, Journal(configure_tracing("test")), probe)
        link.start()
        try:
            link.lend_as(ENGINE)
            for name in ("first", "second"):
                made = lease(name, OLD, clock.now_ms(), conversation=name)
                link.call(link.with_session, lambda session, made=made: session.publish(made))
            link.call(link.with_session, lambda session: session.ended(LeaseId("first"), EndReason.REUSED))

            async def published() -> bool:
                return [x.lease_id for x in (await client.list_leases()).leases] == ["second"]

            await eventually(published, "what is still held")
        finally:
            link.close()
