"""Turns located in the router's own copy of the leases: with one router and with three, with the registry away, with
lenders that fall silent. The registry is real, and so is every socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import aiohttp
import pytest
from kvlease.registry.values import ConversationId, TenantId
from kvlease.router.leases import LocatedBy
from kvlease.router.server import RouterServer
from kvlease.router.settings import load
from kvlease.v1 import registry_pb2 as pb

from tests.integration.raw_session import LENDER_NOW_MS, HandClock, RawSession, lease, raw_stub
from tests.integration.raw_session import engine as raw_engine
from tests.integration.router_lender import lending, registry
from tests.integration.router_peers import LIMIT_S, Engine, fleet, routing, sample, until, url

ANSWER = {"role": "assistant", "content": "Hello there"}
CHATS, TURNS = ("red", "green", "blue"), 4
PATIENT = ("--locate-timeout-ms", "5000")
"""A busy machine must not turn a hit into a time-out."""


async def turn(http: aiohttp.ClientSession, router: RouterServer, chat: str, number: int, **fields: object) -> str:
    """Turn `number` (from 0) of a chat that is told by its first message; its conversation."""
    messages: list[dict[str, str]] = [{"role": "user", "content": chat}]
    for _ in range(number):
        messages += [ANSWER, {"role": "user", "content": "more"}]
    body = {"model": "m", "messages": messages, **fields}
    async with asyncio.timeout(LIMIT_S), http.post(url(router), json=body) as answer:
        assert answer.status == 200
        await answer.read()
        return answer.headers["x-kvlease-conversation"]


def hits(routers: Sequence[RouterServer], *by: LocatedBy) -> float:
    return sum(sample(r, "kvlease_router_locates_total", outcome="hit", by=x) for r in routers for x in by or LocatedBy)


def named(routers: Sequence[RouterServer]) -> float:
    return sum(sample(r, "kvlease_router_namings_total", outcome="named") for r in routers)


@pytest.mark.parametrize("with_id", [False, True])
@pytest.mark.parametrize("count", [1, 3])
async def test_several_routers_find_what_one_finds(count: int, with_id: bool) -> None:
    prefill, decode = Engine(), [Engine(), Engine()]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(registry())
        flags = ("--registry", server.endpoint, *PATIENT)
        first, http = await stack.enter_async_context(fleet([prefill], decode, *flags))
        more = [await stack.enter_async_context(routing([prefill], decode, *flags)) for _ in range(count - 1)]
        routers = [first, *more]
        lender = await stack.enter_async_context(lending(server, decode[1].url))
        conversations: dict[str, str] = {}
        for number in range(TURNS):
            for chat in CHATS:
                router = routers[number % count]
                its_id = {"conversation_id": f"id-{chat}"} if with_id else {}
                conversation = await turn(http, router, chat, number, **its_id)
                assert conversations.setdefault(chat, conversation) == conversation
                if not with_id:
                    await until(lambda: named(routers) == len(prefill.calls))
                lease_id = await lender.lend(conversation, strides=number + 1)
                for each in routers:
                    await until(lambda: holds(each, lease_id))  # noqa: B023
        again = len(CHATS) * (TURNS - 1)
        assert hits(routers) == again
        assert [call.params["kvlease"].get("lease_id") is not None for call in prefill.calls] == (
            [False] * len(CHATS) + [True] * again
        )
        assert len(decode[1].calls) >= again, "a located turn goes to its lender"
        # The name of a chat without id is known to the router that served its last turn; the others ask for it.
        by_copy = again if with_id or count == 1 else 0
        assert (hits(routers, LocatedBy.COPY), hits(routers, LocatedBy.REGISTRY)) == (by_copy, again - by_copy)


async def test_a_router_that_knows_an_older_name_asks_for_the_newer_one() -> None:
    """Two chats begin alike; the one that another router took further is the one that the third turn continues."""
    prefill, decode = Engine(), Engine()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(registry())
        flags = ("--registry", server.endpoint, *PATIENT)
        first, http = await stack.enter_async_context(fleet([prefill], [decode], *flags))
        second = await stack.enter_async_context(routing([prefill], [decode], *flags))
        lender = await stack.enter_async_context(lending(server, decode.url))
        older = await turn(http, first, "same", 0)
        await until(lambda: named([first]) == 1)
        lease_id = await lender.lend(older)
        newer = await turn(http, second, "same", 0)
        await until(lambda: named([second]) == 1)
        assert await turn(http, second, "same", 1) == newer != older
        await until(lambda: named([second]) == 2 and holds(first, lease_id))
        assert await turn(http, first, "same", 2) == newer


async def test_a_lease_that_the_copy_has_not_heard_of_is_asked_for() -> None:
    prefill, decode = Engine(), Engine()
    async with (
        registry() as server,
        fleet([prefill], [decode], "--registry", server.endpoint, *PATIENT) as (router, http),
        lending(server, decode.url) as lender,
    ):
        for number in range(20):
            lease_id = await lender.lend(f"c-{number}")
            await turn(http, router, "x", 0, conversation_id=f"c-{number}")
            assert prefill.calls[-1].params["kvlease"]["lease_id"] == lease_id
        assert hits([router]) == 20


async def test_without_the_registry_the_copy_is_used_until_it_is_too_stale() -> None:
    prefill, decode, clock = Engine(), [Engine(), Engine(), Engine()], HandClock()
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        for engine in (prefill, *decode):
            await stack.enter_async_context(engine.serve())
        async with registry() as server, lending(server, decode[2].url) as lender:
            argv = ["--listen", "127.0.0.1:0", "--registry", server.endpoint, "--drain-timeout-ms", "500"]
            argv += ["--prefill", prefill.url, "--copy-staleness-ms", "10000"]
            for engine in decode:
                argv += ["--decode", engine.url]
            router = await stack.enter_async_context(RouterServer(load(argv), clock=clock))
            lease_id = await lender.lend("c")
            await until(lambda: holds(router, lease_id))
        for number in range(1, 4):
            await turn(http, router, "x", 0, conversation_id="c")
            assert len(decode[2].calls) == number
        assert hits([router], LocatedBy.COPY) == 3
        clock.time_ms += 10_001
        await turn(http, router, "x", 0, conversation_id="c")
        assert "lease_id" not in prefill.calls[-1].params["kvlease"]
        assert hits([router]) == 3
        assert sample(router, "kvlease_router_locates_total", outcome="failed", by="registry") == 1
        assert sample(router, "kvlease_router_copy_staleness_seconds") == 10.001
        async with http.get(url(router, "/health")) as answer:
            assert (await answer.json())["copy"] == {"leases": 1, "staleness_ms": 10_001}


async def test_a_silent_lender_is_not_located() -> None:
    prefill, decode, clock = Engine(), Engine(), HandClock()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(registry(clock=clock))
        stub = await stack.enter_async_context(raw_stub(server.endpoint))
        flags = ("--registry", server.endpoint, "--tenant", "acme", *PATIENT)
        router, http = await stack.enter_async_context(fleet([prefill], [decode], *flags))
        lender = RawSession(stub)
        await lender.start(who=raw_engine(), held=[lease("a", "xyz")])
        await until(lambda: located_id(router) == "a")
        clock.time_ms += 10_001
        await until(lambda: located_id(router) is None)
        await turn(http, router, "x", 0, conversation_id="chat")
        assert sample(router, "kvlease_router_misses_total", reason="suspect") == 1
        await lender.say(heartbeat=pb.Heartbeat(now_lender_ms=LENDER_NOW_MS + 10_001))
        await until(lambda: located_id(router) == "a")
        await turn(http, router, "x", 0, conversation_id="chat")
        assert hits([router], LocatedBy.COPY) == 1


async def test_without_a_copy_nothing_is_watched_and_the_registry_is_asked() -> None:
    prefill, decode = Engine(), Engine()
    async with (
        registry() as server,
        fleet([prefill], [decode], "--registry", server.endpoint, "--copy-staleness-ms", "0", *PATIENT) as (r, http),
        lending(server, decode.url) as lender,
    ):
        await lender.lend("c")
        await turn(http, r, "x", 0, conversation_id="c")
        assert hits([r], LocatedBy.REGISTRY) == 1
        assert r.copy.revision is None
        async with http.get(url(r, "/health")) as answer:
            assert "copy" not in await answer.json()


def holds(router: RouterServer, lease_id: str) -> bool:
    return any(x.lease_id == lease_id for x in router.copy.leases(now_ms=0))


def located_id(router: RouterServer) -> str | None:
    found = router.copy.locate(TenantId("acme"), ConversationId("chat"), now_ms=0).lease
    return found.lease_id if found is not None else None


async def test_a_router_moves_to_the_replica_that_is_left_and_copies_what_that_knows() -> None:
    prefill, decode = Engine(), [Engine(), Engine()]
    async with AsyncExitStack() as stack:
        second = await stack.enter_async_context(registry())
        there = await stack.enter_async_context(lending(second, decode[1].url))
        async with registry() as first:
            here = await stack.enter_async_context(lending(first, decode[0].url))
            flags = ("--registry", f"{first.endpoint},{second.endpoint}", *PATIENT)
            router, http = await stack.enter_async_context(fleet([prefill], decode, *flags))
            await until(lambda: sample(router, "kvlease_router_registry_replica") >= 0)
            at = int(sample(router, "kvlease_router_registry_replica"))  # clients begin with any of them
            known = await (here, there)[at].lend("before")
            await until(lambda: holds(router, known))
            kept = await there.lend("after")
        await until(lambda: holds(router, kept))
        assert sample(router, "kvlease_router_registry_replica") == 1
        assert sample(router, "kvlease_router_registry_moves_total") == 1 - at
        await turn(http, router, "x", 0, conversation_id="after")
        assert prefill.calls[-1].params["kvlease"]["lease_id"] == kept
