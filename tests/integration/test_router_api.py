"""The router's own surface: what it refuses, what it says of itself, and what it never repeats.

Each error is checked for its shape as well as its status: a client library reads both.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kvlease.router.server import RouterServer
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id, format_trace_id

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

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/chat/completions", b"{", 400, "invalid_request"),
        ("POST", "/v1/chat/completions", b'{"messages":[]}', 400, "invalid_request"),
        ("POST", "/v1/chat/completions", b'{"messages":[{}],"temperature":1e999}', 400, "invalid_request"),
        ("POST", "/v1/chat/completions", b'{"messages":[{},{},{}]}', 400, "invalid_request"),
        ("POST", "/v1/chat/completions", b" " * 5000, 413, "body_too_large"),
        ("POST", "/v1/chat/completions", b"null", 400, "invalid_request"),
        ("POST", "/v1/chat/completions", b"\x1f\x8b\x08", 400, "invalid_request"),
        ("GET", "/v1/chat/completions", b"", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", b"{}", 404, "not_found"),
        ("POST", "/tokenize", b"{}", 404, "not_found"),
        ("DELETE", "/v1/conversations/not%20one", b"", 400, "invalid_request"),
        ("DELETE", "/v1/conversations/c", b"", 404, "not_found"),
        ("DELETE", "/v1/conversations/%C3%A9", b"", 400, "invalid_request"),
        ("DELETE", "/v1/conversations/" + "c" * 129, b"", 400, "invalid_request"),
    ],
)
async def test_what_is_refused_is_refused_the_openai_way(
    method: str, path: str, body: bytes, status: int, code: str
) -> None:
    engine = Engine()
    flags = ("--max-body-bytes", "4096", "--max-messages", "2")
    async with fleet([engine], [engine], *flags) as (router, http):
        async with http.request(method, url(router, path), data=body) as answer:
            assert answer.status == status
            error = (await answer.json())["error"]
            assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, code)
        assert not engine.calls


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("Content-Encoding: gzip\r\nContent-Length: 13", b"not gzip, no!"),
        ("Content-Encoding: deflate\r\nContent-Length: 13", b"not zlib, no!"),
    ],
)
async def test_a_body_that_is_not_what_its_headers_say_is_refused(header: str, body: bytes) -> None:
    engine = Engine()
    async with fleet([engine], [engine]) as (router, _):
        head, error = await exchange(router, f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{header}", body)
        assert head.startswith("HTTP/1.1 400 ")
        assert error["code"] == "invalid_request"
        assert sample(router, "kvlease_router_turns_total", outcome="invalid") == 1
        assert not engine.calls


LONG = "Authorization: Bearer " + "Xyzzy-token" * 8_000
TURN = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (TURN + "Content-Length: 12\r\nContent-Encoding: br", b"Xyzzy-prompt", 400),
        (TURN + LONG, b"", 400),
        (TURN + "Content-Length: 1\r\nContent-Length: 2", b"{}", 400),
        (TURN + "Transfer-Encoding: chunked", b"Xyzzy-prompt\r\n", 400),
        (TURN + "X-Xyzzy Header: 1", b"", 400),
        (TURN.replace("POST", "XYZZY"), b"", 400),
        (TURN.removesuffix("Host: x\r\n") + "Content-Length: 2", b"{}", 400),
        ("Xyzzy-prompt", b"", 400),
        (TURN + "Expect: Xyzzy\r\nContent-Length: 2", b"{}", 417),
    ],
    ids=["encoding", "long header", "two lengths", "chunk", "header", "method", "host", "not HTTP", "expectation"],
)
async def test_what_is_not_http_is_refused_the_openai_way_and_not_quoted(head: str, body: bytes, status: int) -> None:
    engine = Engine()
    async with fleet([engine], [engine]) as (router, _):
        answer, error = await exchange(router, head, body)
        assert f" {status} " in answer.split("\r\n")[0]
        assert "Content-Type: application/json" in answer
        assert error["type"] == "invalid_request_error"
        assert "xyzzy" not in (answer + str(error)).lower()
        assert not engine.calls


async def test_a_body_that_waits_to_be_asked_for_is_asked_for() -> None:
    engine = Engine()
    async with (
        fleet([engine], [engine]) as (router, http),
        http.post(url(router), json=BODY, expect100=True) as answer,
    ):
        assert answer.status == 200


async def exchange(router: RouterServer, head: str, body: bytes) -> tuple[str, Any]:
    """The head of the answer to these bytes, and the error object in it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
    async with asyncio.timeout(LIMIT_S):
        answer_head = (await reader.readuntil(b"\r\n\r\n")).decode()
        error = json.loads(await reader.readuntil(b"}}"))["error"]
    writer.close()
    assert set(error) == {"message", "type", "param", "code"}
    return answer_head, error


async def test_an_illegal_conversation_header_is_refused() -> None:
    engine = Engine()
    async with fleet([engine], [engine]) as (router, http):
        async with http.post(url(router), json=BODY, headers={"x-kvlease-conversation": "a b"}) as answer:
            assert answer.status == 400
        async with http.post(url(router), json=BODY, headers={"x-kvlease-conversation": "a-b"}) as answer:
            assert answer.status == 200
            assert answer.headers["x-kvlease-conversation"] == "a-b"


async def test_a_large_body_goes_on_as_it_came_and_a_larger_one_is_refused_however_it_comes() -> None:
    """A picture in a message; and a body that does not say how long it is."""
    prefill, decode = Engine(), Engine()
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "x" * 3_000_000}}
    body = {**BODY, "messages": [{"role": "user", "content": [picture]}]}

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * 1_000_000

    async with fleet([prefill], [decode], "--max-body-bytes", "4000000") as (router, http):
        async with http.post(url(router), json=body) as answer:
            assert answer.status == 200
        for engine in (prefill, decode):
            [call] = engine.calls
            assert call.body["messages"] == body["messages"]
        async with http.post(url(router), data=pieces()) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (413, "body_too_large")
        assert len(prefill.calls) == 1


async def test_a_large_header_is_no_error() -> None:
    engine = Engine()
    headers = {"Authorization": "Bearer " + "t" * 30_000}
    async with (
        fleet([engine], [engine], "--no-forward-authorization", headers=headers) as (router, http),
        http.post(url(router), json=BODY) as answer,
    ):
        assert answer.status == 200


async def test_the_body_names_the_conversation_before_a_header_does() -> None:
    engine = Engine()
    async with fleet([engine], [engine]) as (router, http):
        for headers, expected in (
            ({"x-kvlease-conversation": "own", "x-conversation-id": "foreign"}, "body"),
            ({"x-conversation-id": "gespr\u00e4ch"}, "body"),
        ):
            async with http.post(url(router), json={**BODY, "conversation_id": "body"}, headers=headers) as answer:
                assert (answer.status, answer.headers["x-kvlease-conversation"]) == (200, expected)
        assert not any("conversation_id" in call.body for call in engine.calls), "it is no field of an engine's"
        for foreign in ("gespr\u00e4ch", "c" * 129):  # of a gateway that knows nothing of ours: no error
            async with http.post(url(router), json=BODY, headers={"x-conversation-id": foreign}) as answer:
                assert (answer.status, len(answer.headers["x-kvlease-conversation"])) == (200, 32)


@pytest.mark.parametrize("leases", [False, True])
async def test_no_depth_of_nesting_is_an_internal_error(leases: bool) -> None:
    """Around the depth at which JSON can just be read, or just not be written again."""
    prefill, decode = Engine(), Engine()
    registry = ("--registry", unused_url().removeprefix("http://"), "--locate-timeout-ms", "1") if leases else ()
    seen = set()
    async with fleet([prefill], [decode], *registry) as (router, http):
        for depth in range(900, 1_000):
            body = b'{"messages":[{"role":"user","content":' + b"[" * depth + b"]" * depth + b"}]}"
            async with http.post(url(router), data=body) as answer:
                seen.add((answer.status, (await answer.json()).get("error", {}).get("code")))
    assert seen == {(200, None), (400, "invalid_request")}


async def test_more_turns_than_allowed_are_refused_with_a_hint() -> None:
    hold = asyncio.Event()
    engine = Engine()

    async def script(call: Call) -> web.StreamResponse:
        await hold.wait()
        return await engine.default(call)

    engine.script = script
    async with fleet([engine], [engine], "--max-turns", "1") as (router, http):
        first = asyncio.create_task(http.post(url(router), json=BODY).__aenter__())
        await engine.received(1)
        async with http.post(url(router), json=BODY) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert (await answer.json())["error"]["code"] == "overloaded"
        hold.set()
        assert (await first).status == 200
        async with http.post(url(router), json=BODY) as answer:
            assert answer.status == 200


async def test_health_tells_who_is_missing() -> None:
    prefill, decode = Engine(), Engine()
    async with fleet([prefill], [decode], "--health-interval-ms", "10") as (router, http):

        async def health() -> tuple[int, Any]:
            async with http.get(url(router, "/health")) as answer:
                return answer.status, await answer.json()

        await until(router.routes.ready)
        status, report = await health()
        assert (status, report["status"], report["registry"]) == (200, "ready", "off")
        assert report["prefill"] == [{"url": prefill.url, "health": "up", "outstanding": 0}]
        decode.healthy = False
        await until(lambda: not router.routes.ready())
        status, report = await health()
        assert (status, report["status"]) == (503, "not_ready")
        assert report["decode"][0]["health"] == "down"
        async with http.get(url(router, "/livez")) as answer:
            assert answer.status == 200
        async with http.get(url(router, "/metrics")) as answer:
            page = await answer.text()
        assert f'kvlease_router_engine_up{{role="decode",target="{decode.url}"}} 0.0' in page
        decode.healthy = True
        await until(router.routes.ready)


async def test_authorization_is_forwarded_unless_switched_off() -> None:
    engine = Engine()
    headers = {"Authorization": "Bearer secret", "Cookie": "c=1", "X-Session-ID": "s"}
    async with engine.serve(), aiohttp.ClientSession() as http:
        async with routing([engine], [engine]) as router, http.post(url(router), json=BODY, headers=headers) as answer:
            assert answer.status == 200
        for call in engine.calls:
            assert call.request.headers["Authorization"] == "Bearer secret"
            assert call.request.headers["X-Session-ID"] == "s"
            assert "Cookie" not in call.request.headers
        engine.calls.clear()
        async with (
            routing([engine], [engine], "--no-forward-authorization") as router,
            http.post(url(router), json=BODY, headers=headers) as answer,
        ):
            assert answer.status == 200
        assert not any("Authorization" in call.request.headers for call in engine.calls)


async def test_a_request_id_used_twice_is_two_requests_to_the_engines() -> None:
    """Engines take the header for a request's id, before the body's: the router's own, each turn another."""
    prefill, decode = Engine(), Engine()
    headers = {"X-Request-Id": "mine"}
    async with fleet([prefill], [decode], headers=headers) as (router, http):
        for _ in range(2):
            async with http.post(url(router), json={**BODY, "request_id": "mine"}) as answer:
                assert answer.status == 200
    told = [call.request.headers["X-Request-Id"] for call in prefill.calls]
    assert told == [call.request.headers["X-Request-Id"] for call in decode.calls]
    assert len({*told, "mine"}) == 3
    assert {call.body["request_id"] for call in (*prefill.calls, *decode.calls)} == {"mine"}


async def test_client_parameters_are_stripped_and_counted() -> None:
    engine = Engine()
    sent = {**BODY, "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[666]]}}
    async with fleet([engine], [engine]) as (router, http):
        async with http.post(url(router), json=sent) as answer:
            assert answer.status == 200
        assert not any(b"666" in call.raw for call in engine.calls)
        assert sample(router, "kvlease_router_stripped_params_total") == 1


async def test_several_sequences_are_not_handed_off() -> None:
    engine = Engine()
    async with fleet([engine], [engine]) as (router, http):
        async with http.post(url(router), json={**BODY, "n": 4}) as answer:
            assert answer.status == 200
        [call] = engine.calls
        assert call.body == {**BODY, "n": 4}
        assert sample(router, "kvlease_router_fallbacks_total", reason="several_sequences") == 1


async def test_one_trace_from_the_client_to_the_engines() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    prefill, decode = Engine(), Engine()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with fleet([prefill], [decode], tracer=provider.get_tracer("t")) as (router, http):
        async with http.post(url(router), json=BODY, headers={"traceparent": parent}) as answer:
            await answer.read()
        await until(lambda: len(exporter.get_finished_spans()) == 3)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"turn", "prefill", "decode"}
    turn = spans["turn"]
    assert turn.parent is not None
    assert format_span_id(turn.parent.span_id) == parent[36:52]
    assert turn.attributes is not None
    assert turn.attributes["kvlease.outcome"] == "served"
    assert turn.attributes["kvlease.conversation"] == answer.headers["x-kvlease-conversation"]
    for name, engine in (("prefill", prefill), ("decode", decode)):
        span = spans[name]
        assert span.context is not None
        assert format_trace_id(span.context.trace_id) == parent[3:35]
        assert span.parent == turn.context
        assert engine.calls[0].request.headers["traceparent"].split("-")[2] == format_span_id(span.context.span_id)


SECRETS = ("Xyzzy-prompt", "Xyzzy-answer", "Xyzzy-token", "Xyzzy-said", "Xyzzy-param")


@pytest.mark.parametrize("fate", ["served", "refused", "failed", "invalid", "broken"])
async def test_nothing_said_is_in_logs_spans_or_metrics(fate: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = Engine()
    engine.answers = ["Xyzzy-answer"]

    async def script(call: Call) -> web.StreamResponse:
        if fate == "broken":
            assert call.request.transport is not None
            call.request.transport.abort()
        return refused(400 if fate == "refused" else 500, "no: Xyzzy-said")

    engine.script = None if fate == "served" else script
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Xyzzy-prompt"}],
        "kv_transfer_params": "Xyzzy-param",
    }
    raw = json.dumps(body)[: -1 if fate == "invalid" else None]
    headers = {"Authorization": "Bearer Xyzzy-token"}
    async with fleet([engine], [engine], "--log-level", "debug", tracer=provider.get_tracer("t"), headers=headers) as (
        router,
        http,
    ):
        async with http.post(url(router), data=raw) as answer:
            await answer.read()
        async with http.get(url(router, "/metrics")) as answer:
            page = await answer.text()
    assert not any(span.events for span in exporter.get_finished_spans())  # an exception could quote anything
    told = caplog.text + page + "".join(span.to_json() for span in exporter.get_finished_spans())
    assert "kvlease_router_turns_total" in told
    for secret in SECRETS:
        assert secret not in told
