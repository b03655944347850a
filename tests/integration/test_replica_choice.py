"""Which replica a client takes: by what they answer, by what a name stands for, and when to stay.

Hand-written registries for what real ones cannot be brought to answer on demand, real ones for the rest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_channel import ClientLimits
from kvlease.registry.client_metrics import ClientCollector
from kvlease.registry.errors import Compacted, DeadlineExceeded, LimitReached, RegistryUnavailable
from kvlease.registry.lease_copy import LeaseCopy
from kvlease.registry.lease_copy_feed import FeedLimits, LeaseCopyFeed
from kvlease.registry.metrics import CONNECTOR_REGISTRY_MOVES, CONNECTOR_REGISTRY_PLACE
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.values import DEFAULT_TENANT, ConversationId, Hit, LeaseFilter, Miss, MissReason, ResolveQuery
from kvlease.registry.wire_resolve import encode_answer
from kvlease.v1 import registry_pb2 as pb
from prometheus_client import CollectorRegistry

from tests.integration.certificates import Authority
from tests.integration.first_replica import ALONE, at_the_first
from tests.integration.lending_session import lending_by, open_session, publication
from tests.integration.raw_session import HandClock
from tests.integration.registry_peer import Peer, peer, soon, until
from tests.integration.router_lender import lending as lending_to
from tests.ports import free_port

LONG_MS = 9_000
QUERY = ResolveQuery(tenant=DEFAULT_TENANT, conversation=ConversationId("c"))
CUT_OFF = RegistryUnavailable("cut off from its store")


def settings(listen: str = "127.0.0.1:0", **more: object) -> RegistrySettings:
    return RegistrySettings.model_validate({"listen": listen, "metrics_listen": NO_METRICS, **more})


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Peer, Peer, str]]:
    async with peer() as first, peer() as second:
        yield first, second, f"{first.endpoint},{second.endpoint}"


async def answer(registry: Peer) -> None:
    """The next resolve on the next stream of `registry` is a miss."""
    stream = await registry.resolve_stream()
    asked = (await stream.next()).requests
    response = encode_answer(Miss(reason=MissReason.UNKNOWN))
    await stream.send(
        pb.ResolveStreamResponse(
            answers=[pb.CorrelatedAnswer(correlation_id=x.correlation_id, response=response) for x in asked]
        )
    )


async def refuse(registry: Peer) -> None:
    """Ends every stream that resolves come on, as long as it runs."""
    while True:
        stream = await registry.resolves.get()
        await stream.next()
        stream.end(CUT_OFF)


async def test_a_resolve_that_a_replica_cannot_answer_is_answered_by_the_next() -> None:
    async with two() as (first, second, both), at_the_first(both) as client:
        call = asyncio.create_task(client.resolve(QUERY, timeout_ms=LONG_MS))
        stream = await first.resolve_stream()
        await stream.next()
        stream.end(CUT_OFF)
        await answer(second)
        assert isinstance(await soon(call, "an answer"), Miss)
        assert (client.address, client.moves, client.place) == (second.endpoint, 1, 1)


async def test_a_move_shows_in_the_metrics() -> None:
    shown, before = CollectorRegistry(), CollectorRegistry()
    moves, place = CONNECTOR_REGISTRY_MOVES, CONNECTOR_REGISTRY_PLACE
    before.register(ClientCollector(lambda: None, moves=moves, place=place))
    assert (before.get_sample_value(moves.name), before.get_sample_value(place.name)) == (0, -1)
    async with two() as (first, second, both), at_the_first(both) as client:
        shown.register(ClientCollector(lambda: client, moves=moves, place=place))
        assert shown.get_sample_value(place.name) == -1
        first.answers = [CUT_OFF]
        second.answers = [pb.ListEnginesResponse()]
        await client.list_engines()
        assert (shown.get_sample_value(moves.name), shown.get_sample_value(place.name)) == (1, 1)


async def test_a_lender_that_is_not_taken_goes_to_the_next_and_presents_what_it_holds() -> None:
    async with two() as (first, second, both), lending_by(at_the_first(both)) as lender:
        lender.session.publish(publication("a"))
        stream = await first.session()
        await stream.next()
        stream.end(CUT_OFF)
        presented = await open_session(second)
        await lender.hears("connected")
        assert first.sessions.empty()
        await presented.next()


async def test_single_calls_are_answered_by_the_next() -> None:
    async with two() as (first, second, both), at_the_first(both) as client:
        first.answers = [CUT_OFF]
        second.answers = [pb.EndResponse(ended=2)]
        assert await client.end_conversation(DEFAULT_TENANT, ConversationId("c")) == 2
        assert (len(first.requests), len(second.requests)) == (1, 1)


async def test_a_reconnect_goes_elsewhere_at_once() -> None:
    async with two() as (first, second, both), lending_by(at_the_first(both)) as lender:
        stream = await open_session(first)
        await lender.hears("connected")
        await stream.send(pb.SessionResponse(reconnect=pb.Reconnect()))
        await open_session(second)
        assert first.sessions.empty(), "not back to the one that goes away"
        assert [x for x in lender.heard.events if x[0] != "refused"] == lender.heard.events


async def test_a_full_replica_is_left_for_the_next() -> None:
    async with two() as (first, second, both), at_the_first(both) as client:
        call = asyncio.create_task(client.resolve(QUERY, timeout_ms=LONG_MS))
        (await first.resolve_stream()).end(LimitReached("too many resolve streams", limit="max_resolve_streams"))
        await answer(second)
        assert isinstance(await soon(call, "an answer"), Miss)


async def test_when_no_replica_can_answer_resolves_fail_at_once_and_attempts_are_few() -> None:
    async with two() as (first, second, both), at_the_first(both) as client:
        refusing = [asyncio.create_task(refuse(x)) for x in (first, second)]
        with pytest.raises(RegistryUnavailable) as refused:
            await soon(client.resolve(QUERY, timeout_ms=600_000), "an error well before the resolve's own time")
        for registry in (first, second):
            assert f"{registry.endpoint}: cut off from its store" in refused.value.message
        loop = asyncio.get_running_loop()
        until_s, tries, slowest_s = loop.time() + 3, 0, 0.0
        while loop.time() < until_s:
            asked_s = loop.time()
            with pytest.raises(RegistryUnavailable):
                await client.resolve(QUERY, timeout_ms=LONG_MS)
            slowest_s = max(slowest_s, loop.time() - asked_s)
            tries += 1
            await asyncio.sleep(0.005)
        assert tries > 50
        assert client.moves < 30, f"{client.moves} moves in 3 s: a storm"
        for task in refusing:
            task.cancel()
        await asyncio.gather(*refusing, return_exceptions=True)

        async def answered() -> None:
            async with asyncio.TaskGroup() as group:
                answering = [group.create_task(answer(x)) for x in (first, second)]
                while True:
                    try:
                        await client.resolve(QUERY, timeout_ms=LONG_MS)
                        break
                    except RegistryUnavailable:
                        await asyncio.sleep(0.01)
                for task in answering:
                    task.cancel()

        began_s = loop.time()
        await soon(answered(), "an answer, once they can")
        assert loop.time() - began_s < 2.0


async def test_an_unreachable_registry_is_named() -> None:
    gone = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    async with RegistryClient(",".join(gone)) as client:
        with pytest.raises(RegistryUnavailable) as refused:
            await client.list_engines()
        for endpoint in gone:
            assert f"{endpoint}: Connection refused" in refused.value.message


async def test_a_slow_replica_that_lives_is_kept() -> None:
    limits = dataclasses.replace(ALONE, ping_timeout_ms=2_000, idle_ms=100, ping_pause_ms=20)
    async with two() as (first, _, both), at_the_first(both, limits=limits) as client:
        for _ in range(20):
            with pytest.raises(DeadlineExceeded):
                await client.resolve(QUERY, timeout_ms=20)
        stream = await first.resolve_stream()
        assert not stream.idle
        assert (client.address, client.moves) == (first.endpoint, 0)


async def test_the_only_replica_is_not_left_for_being_silent() -> None:
    limits = ClientLimits(ping_timeout_ms=1, idle_ms=20)
    async with peer() as registry, RegistryClient(registry.endpoint, limits=limits) as client:
        for _ in range(5):
            with pytest.raises(DeadlineExceeded):
                await client.resolve(QUERY, timeout_ms=20)
        await registry.resolve_stream()
        assert registry.resolves.empty(), "one stream all the time"


async def test_clients_begin_spread_over_the_replicas() -> None:
    fractions = itertools.cycle([0.9, 0.1, 0.2, 0.8])
    async with two() as (first, second, both):
        taken = []
        for _ in range(4):
            async with RegistryClient(both, fraction=lambda: next(fractions)) as client:
                taken.append((await soon(client.replicas.connected(), "a replica")).address.target)
    assert taken == [second.endpoint, first.endpoint] * 2


# -- names


class Hosts:
    """A hosts file that changes."""

    def __init__(self, **names: Sequence[str]) -> None:
        self.names = names

    async def __call__(self, host: str) -> Sequence[str]:
        return self.names[host.replace(".", "_")]


async def test_a_name_stands_for_all_replicas_and_is_looked_up_again() -> None:
    port = free_port()
    hosts = Hosts(pods_example=["127.0.0.1", "127.0.0.2"])
    async with (
        RegistryServer(settings(f"127.0.0.1:{port}")) as first,
        at_the_first(f"pods.example:{port}", lookup=hosts) as client,
    ):
        async with RegistryServer(settings(f"127.0.0.2:{port}", insecure=True)):
            await client.resolve(QUERY, timeout_ms=LONG_MS)
            assert client.address == first.endpoint
            await first.__aexit__(None, None, None)
            await client.resolve(QUERY, timeout_ms=LONG_MS)
            assert client.address == f"127.0.0.2:{port}"
        # Both are gone; a third one comes, where nobody has been.
        hosts.names["pods_example"] = ["127.0.0.3"]
        async with RegistryServer(settings(f"127.0.0.3:{port}", insecure=True)):
            # Not by a resolve: one that is asked before the end of the second is noticed fails with it, at once.
            await until(lambda: client.address == f"127.0.0.3:{port}", "the third to be found")
            assert isinstance(await client.resolve(QUERY, timeout_ms=LONG_MS), Miss)
            assert client.moves == 2


async def test_a_certificate_has_to_be_of_the_name_not_of_the_address(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    named = authority.issue("named", x509.DNSName("registry.example"))
    borrower = authority.client("b", "kvlease://borrower/b")
    hosts = Hosts(registry_example=["127.0.0.1"], other_example=["127.0.0.1"])
    files = {"tls_cert": str(named.cert), "tls_key": str(named.key), "tls_ca": str(named.ca)}
    async with RegistryServer(settings(**files)) as server:
        for name, answers in (("registry.example", True), ("other.example", False), ("127.0.0.1", False)):
            endpoint = f"{name}:{server.port}"
            async with RegistryClient(endpoint, credentials=borrower.credentials, lookup=hosts) as client:
                try:
                    await client.resolve_unary(QUERY)
                except RegistryUnavailable:
                    assert not answers, f"{name} is the certificate's name"
                else:
                    assert answers, f"{name} is not the certificate's name"


# -- watches


async def test_a_revision_is_resumed_on_no_other_replica() -> None:
    async with two() as (first, second, both), at_the_first(both) as client:
        first.answers = [pb.ListLeasesResponse(revision=7), CUT_OFF]
        listed = await client.list_leases()
        assert (listed.revision, listed.source) == (7, first.endpoint)
        second.answers = [pb.ListEnginesResponse()]
        await client.list_engines()
        assert client.address == second.endpoint
        async with aclosing(client.watch(from_revision=7, source=listed.source)) as watch:
            with pytest.raises(Compacted, match="revision 7 is of"):
                await soon(anext(watch), "a refusal")
        assert len(second.requests) == 1, "it was not even asked"


async def test_pages_of_a_list_are_of_one_replica() -> None:
    async with two() as (first, second, both), at_the_first(both) as client:
        first.answers = [pb.ListLeasesResponse(revision=7, next_page_token="p2"), CUT_OFF]
        second.answers = [pb.ListLeasesResponse(revision=3)]
        listed = await client.list_leases()
        assert (listed.revision, listed.source) == (3, second.endpoint)
        assert [getattr(x, "page_token", None) for x in second.requests] == [""], "from the first page again"


async def test_a_copy_that_moves_lists_again_and_says_what_the_other_replica_knows() -> None:
    copy, clock = LeaseCopy(limit=100), HandClock()
    quick = FeedLimits(backoff_first_ms=10, backoff_cap_ms=50)
    async with RegistryServer(settings()) as first, RegistryServer(settings()) as second:
        both = f"{first.endpoint},{second.endpoint}"
        async with (
            lending_to(first, "http://one") as one,
            lending_to(second, "http://two") as two_,
            at_the_first(both) as client,
            asyncio.TaskGroup() as group,
        ):
            here, there = await one.lend("here"), await two_.lend("there")
            feed = LeaseCopyFeed(client, copy, clock=clock, selection=LeaseFilter(), limits=quick)
            feeding = group.create_task(feed.run())

            def holds(lease_id: str) -> bool:
                return [x.lease_id for x in copy.leases(now_ms=0)] == [lease_id]

            await until(lambda: holds(here), "the copy of the first")
            await first.__aexit__(None, None, None)
            await until(lambda: holds(there), "the copy of the second")
            assert (copy.lists, client.moves) == (2, 1)
            more = await two_.lend("more")
            await until(lambda: more in {x.lease_id for x in copy.leases(now_ms=0)}, "news of the second")
            assert copy.lists == 2
            feeding.cancel()


async def test_hits_are_hits_whatever_the_replica() -> None:
    async with RegistryServer(settings()) as first, RegistryServer(settings()) as second:
        both = f"{first.endpoint},{second.endpoint}"
        async with lending_to(second, "http://two") as lender, RegistryClient(both, fraction=lambda: 0.0) as client:
            lease_id = await lender.lend("c")
            await client.resolve(QUERY, timeout_ms=LONG_MS)
            await first.__aexit__(None, None, None)
            found = await client.resolve(QUERY, timeout_ms=LONG_MS)
            assert isinstance(found, Hit)
            assert found.lease_id == lease_id
