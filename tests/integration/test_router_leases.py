"""Turns that continue each other, through routers that share a real registry: recognised, located, and sent to the
lender; and served all the same when the registry is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kvlease.registry.server import RegistryServer
from kvlease.registry.values import DEFAULT_TENANT
from kvlease.router.leases import LocatedBy
from kvlease.router.server import RouterServer
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id, format_trace_id
from yarl import URL

from tests.integration.router_lender import lending, registry
from tests.integration.router_peers import (
    LIMIT_S,
    Call,
    Engine,
    fleet,
    refused,
    routing,
    sample,
    until,
    unused_url,
    url,
)

ASK = {"role": "user", "content": "Hi?"}
ANSWER = {"role": "assistant", "content": "Hello there"}
MAX_BRANCHES = 8
"""Of a conversation, as a registry has it by default."""
MORE = {"role": "user", "content": "And?"}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


async def turn(http: aiohttp.ClientSession, router: RouterServer, fields: dict[str, Any], **headers: str) -> str:
    """Serves a turn; its conversation."""
    async with asyncio.timeout(LIMIT_S), http.post(url(router), json=fields, headers=headers) as answer:
        assert answer.status == 200
        await answer.read()
        return answer.headers["x-kvlease-conversation"]


def named(router: RouterServer) -> float:
    return sample(router, "kvlease_router_namings_total", outcome="named")


def locates(router: RouterServer, outcome: str) -> float:
    """Locates with this outcome, whoever answered."""
    return sum(sample(router, "kvlease_router_locates_total", outcome=outcome, by=by) for by in LocatedBy)


def flags(server: RegistryServer) -> tuple[str, ...]:
    # A busy machine must not turn a hit into a time-out.
    return ("--registry", server.endpoint, "--locate-timeout-ms", "5000")


@asynccontextmanager
async def two_routers() -> AsyncIterator[tuple[list[RouterServer], aiohttp.ClientSession, Engine, list[Engine]]]:
    """Two routers before one prefill and two decode engines; one registry."""
    prefill, decode = Engine(), [Engine(), Engine()]
    async with (
        registry() as server,
        fleet([prefill], decode, *flags(server)) as (first, http),
        routing([prefill], decode, *flags(server)) as second,
    ):
        yield [first, second], http, prefill, decode


@pytest.mark.parametrize("stream", [False, True])
async def test_another_router_recognises_the_next_turn(stream: bool) -> None:
    async with two_routers() as ([first, second], http, prefill, _):
        conversation = await turn(http, first, body(ASK, stream=stream))
        await until(lambda: named(first) == 1)
        assert await turn(http, second, body(ASK, ANSWER, MORE, stream=stream)) == conversation
        assert prefill.calls[1].params["kvlease"] == {"tenant": "default", "conversation": conversation}
        await until(lambda: named(second) == 1)
        assert await turn(http, first, body(ASK, ANSWER, MORE, ANSWER, ASK)) == conversation
        assert await turn(http, first, body(MORE, ANSWER, ASK)) != conversation


async def test_a_retry_a_new_answer_and_branches_stay_in_the_conversation() -> None:
    async with two_routers() as ([first, second], http, _, decode):
        conversation = await turn(http, first, body(ASK))
        await until(lambda: named(first) == 1)
        again = body(ASK, ANSWER, MORE)
        for router in (second, first, second):  # retried, regenerated with another outcome, retried
            decode[0].answers = decode[1].answers = [f"Answer of {router.port}"]
            assert await turn(http, router, again) == conversation
        for branch in ("a", "b", "c"):
            assert await turn(http, first, body(ASK, ANSWER, {"role": "user", "content": branch})) == conversation


@pytest.mark.parametrize("behind_two", [False, True])
async def test_chats_with_one_opener_and_one_first_answer_stay_apart(behind_two: bool) -> None:
    """Agents of one template: as many conversations as chats, however their turns interleave."""
    async with two_routers() as (routers, http, _, _):
        routers = routers if behind_two else routers[:1]
        began = [await turn(http, routers[i % len(routers)], body(ASK)) for i in range(20)]
        await until(lambda: sum(named(router) for router in routers) == 20)
        second = [
            await turn(http, routers[i % len(routers)], body(ASK, ANSWER, {"role": "user", "content": str(i)}))
            for i in range(20)
        ]
        assert len(set(began)) == 20
        assert set(second) == set(began)
        await until(lambda: sum(named(router) for router in routers) == 40)
        for i, conversation in enumerate(second):
            history = [ASK, ANSWER, {"role": "user", "content": str(i)}, ANSWER, MORE]
            assert await turn(http, routers[(i + 1) % len(routers)], body(*history)) == conversation


async def test_more_branches_than_live_side_by_side_begin_conversations_of_their_own() -> None:
    """Seen by a router that did not name the conversation: it has to remember that others went on with it."""
    async with two_routers() as ([first, second], http, _, _):
        conversation = await turn(http, first, body(ASK))
        await until(lambda: named(first) == 1)
        branches = [
            await turn(http, second, body(ASK, ANSWER, {"role": "user", "content": str(i)}))
            for i in range(MAX_BRANCHES + 2)
        ]
        assert branches[:MAX_BRANCHES] == [conversation] * MAX_BRANCHES
        assert len({conversation, *branches[MAX_BRANCHES:]}) == 3


async def test_a_turn_that_failed_leaves_its_conversation_to_the_retry() -> None:
    prefill, decode = Engine(), Engine()

    async def full(_: Call) -> web.StreamResponse:
        return refused(429, "later")

    async with registry() as server, fleet([prefill], [decode], *flags(server)) as (router, http):
        began = [await turn(http, router, body(ASK)) for _ in range(2)]
        await until(lambda: named(router) == 2)
        decode.script = full
        for _ in range(2):
            async with http.post(url(router), json=body(ASK, ANSWER, MORE)) as answer:
                assert answer.status == 429
        decode.script = None
        again = [await turn(http, router, body(ASK, ANSWER, MORE)) for _ in range(2)]
        assert set(again) == set(began)


async def test_the_answer_of_each_branch_is_named() -> None:
    prefill, decode = Engine(), Engine()

    async def two(_: Call) -> web.StreamResponse:
        choices = [
            {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            for i, text in enumerate("ab")
        ]
        return web.json_response({"choices": choices})

    async with registry() as server, fleet([prefill], [decode], *flags(server)) as (router, http):
        decode.script = two
        conversation = await turn(http, router, body(ASK, n=2))
        decode.script = None
        await until(lambda: named(router) == 1)
        for text in "ab":
            said = {"role": "assistant", "content": text}
            assert await turn(http, router, body(ASK, said, MORE)) == conversation
        [call] = [call for call in decode.calls if call.body.get("n")]
        assert call.params["do_remote_prefill"] is False  # several sequences cannot share one handoff
        assert call.params["kvlease"]["conversation"] == conversation


async def test_a_located_turn_goes_to_its_lender_and_names_the_lease() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    prefill, decode = Engine(), [Engine(), Engine(), Engine()]
    tracer = provider.get_tracer("t")
    async with (
        registry() as server,
        fleet([prefill], decode, *flags(server), tracer=tracer) as (router, http),
        lending(server, decode[2].url + "/v1") as lender,
    ):
        lease_id = await lender.lend("c-1")
        for number in range(3):
            await turn(http, router, body(ASK, conversation_id="c-1"))
            assert len(decode[2].calls) == number + 1
        terms = {"tenant": "default", "conversation": "c-1", "lease_id": lease_id}
        told = prefill.calls[0].params["kvlease"]
        traceparent = told["traceparent"]
        assert told == {**terms, "traceparent": traceparent}
        assert decode[2].calls[0].params == {**prefill.handoff(1), "kvlease": told}
        assert "conversation_id" not in decode[2].calls[0].body
        assert locates(router, "hit") == 3
        assert await turn(http, router, body(ASK), **{"x-kvlease-conversation": "c-2"}) == "c-2"
        assert sample(router, "kvlease_router_misses_total", reason="unknown") == 1
    spans = [span for span in exporter.get_finished_spans() if span.name == "turn"]
    assert spans[0].attributes is not None
    assert spans[0].attributes["kvlease.lease_id"] == lease_id
    assert spans[0].context is not None
    assert traceparent.split("-")[1:3] == [
        format_trace_id(spans[0].context.trace_id),
        format_span_id(spans[0].context.span_id),
    ]
    assert [format_span_id(link.context.span_id) for link in spans[0].links] == ["00f067aa0ba902b7"]
    located = next(span for span in exporter.get_finished_spans() if span.name == "locate")
    assert located.attributes is not None
    assert located.attributes["kvlease.tokens"] == 128


async def test_a_lender_known_under_another_url_is_found_by_its_id() -> None:
    prefill, other, decode = Engine(), Engine(), Engine()
    async with prefill.serve(), other.serve(), decode.serve(), registry() as server, aiohttp.ClientSession() as http:
        targets: list[Engine | str] = [other, f"d-7@{decode.url}"]
        async with (
            routing([prefill], targets, *flags(server)) as router,
            lending(server, "http://10.1.2.3:8000", "d-7") as lender,
        ):
            await lender.lend("c")
            for _ in range(2):
                await turn(http, router, body(ASK, conversation_id="c"))
            assert (len(decode.calls), len(other.calls)) == (2, 0)


async def test_an_override_of_the_threshold_reaches_both_engines() -> None:
    prefill, decode = Engine(), Engine()
    async with (
        registry() as server,
        fleet([prefill], [decode], *flags(server), "--recompute-threshold", "32") as (r, http),
    ):
        await turn(http, r, body(ASK))
        for call in (*prefill.calls, *decode.calls):
            assert call.params["kvlease"]["recompute_threshold"] == 32


async def test_without_a_registry_turns_are_served_without_reuse() -> None:
    prefill, decode = Engine(), Engine()
    gone = unused_url().removeprefix("http://")
    async with fleet([prefill], [decode], "--registry", gone) as (router, http):
        assert await turn(http, router, body(ASK, ANSWER, MORE))
        assert locates(router, "failed") == 1
        assert decode.calls[0].params["do_remote_prefill"] is True
        async with http.delete(url(router, "/v1/conversations/c")) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "registry_unavailable"
        async with http.get(url(router, "/health")) as answer:
            assert (await answer.json())["registry"] == "down"


@pytest.mark.parametrize(("conversation", "path"), [("c", "c"), ("a/b:1", "a/b:1"), ("a/b:1", "a%2Fb%3A1")])
async def test_ending_a_conversation_ends_its_leases(conversation: str, path: str) -> None:
    prefill, decode = Engine(), Engine()
    async with (
        registry() as server,
        fleet([prefill], [decode], *flags(server)) as (router, http),
        lending(server, decode.url) as lender,
    ):
        lease_id = await lender.lend(conversation)
        for count in (1, 0):
            async with http.delete(URL(url(router, f"/v1/conversations/{path}"), encoded=True)) as answer:
                assert answer.status == 200
                found = {"id": conversation, "object": "conversation.deleted", "deleted": True, "leases_ended": count}
                assert await answer.json() == found
        await until(lambda: lender.ended == [(lease_id, "released")] and not len(router.copy))
        await turn(http, router, body(ASK, conversation_id=conversation))
        assert "lease_id" not in prefill.calls[0].params["kvlease"]


async def test_decode_engines_that_do_not_lend_are_named_with_advice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvlease.router.health")
    prefill, lends, stock = Engine(), Engine(), Engine()
    async with (
        registry() as server,
        fleet([prefill], [lends, stock], *flags(server), "--health-interval-ms", "10") as (router, http),
    ):

        async def known() -> dict[str, tuple[bool | None, bool]]:
            async with http.get(url(router, "/health")) as answer:
                decode = (await answer.json())["decode"]
                return {engine["url"]: (engine["lends"], "advice" in engine) for engine in decode}

        async def becomes(lending_engine: tuple[bool | None, bool]) -> None:
            async with asyncio.timeout(LIMIT_S):
                while await known() != {lends.url: lending_engine, stock.url: (False, True)}:
                    pass

        await becomes((False, True))
        async with lending(server, lends.url):
            await becomes((True, False))
            up = {engine: sample(router, "kvlease_router_engine_lends", target=engine.url) for engine in (lends, stock)}
            assert up == {lends: 1, stock: 0}
        await until(lambda: f"decode engine {lends.url} lends" in caplog.text)
    warned = [r.getMessage() for r in caplog.records if "does not lend" in r.getMessage()]
    assert sorted(line.split()[2] for line in warned) == sorted([lends.url, stock.url]), "once each"
    assert all("kv_connector_module_path" in line for line in warned)


@pytest.mark.parametrize("on", [True, False])
async def test_a_lease_is_renewed_while_its_turn_waits_for_prefill_if_so_set(on: bool) -> None:
    hold = asyncio.Event()
    prefill, decode = Engine(), Engine()

    async def script(_: Call) -> web.StreamResponse:
        await hold.wait()
        return prefill.prefilled()

    def renewed() -> float:
        return sample(router, "kvlease_router_renewals_total", status="renewed")

    prefill.script = script
    async with (
        registry() as server,
        fleet([prefill], [decode], *flags(server), "--renew" if on else "--no-renew") as (router, http),
        lending(server, decode.url) as lender,
    ):
        lease_id = await lender.lend("c")
        waiting = asyncio.create_task(turn(http, router, body(ASK, conversation_id="c")))
        await prefill.received(1)
        if on:
            await until(lambda: renewed() == 1)
            assert lender.renewals == [lease_id]
        else:
            for _ in range(3):  # as long as a renewal of the router's would have taken, three times
                await lender.client.renew(DEFAULT_TENANT, lease_id)
            assert renewed() == 0
        hold.set()
        await waiting
