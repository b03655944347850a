"""Engines that fail, at every point of a turn: the turn goes on if it can, and ends as the OpenAI API says if not.

The engines really fail: connections are broken, ports are closed, answers stay away.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from tests.integration.router_peers import (
    DONE,
    LIMIT_S,
    Call,
    Engine,
    chunk,
    fleet,
    full_listener,
    refused,
    routing,
    sample,
    until,
    unused_url,
    url,
    usage_chunk,
)

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
GIVEN_UP = ("prefill_failed", "no_prefill_engine")
"""The second if a probe found out first that the engine is not there."""
STREAM = {**BODY, "stream": True}


async def post(http: aiohttp.ClientSession, target: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with asyncio.timeout(LIMIT_S), http.post(target, json=body) as answer:
        return answer.status, await answer.read()


async def fails(_: Call) -> web.StreamResponse:
    return refused(500, "boom")


async def breaks(call: Call) -> web.StreamResponse:
    """The connection ends without an answer."""
    assert call.request.transport is not None
    call.request.transport.abort()
    return web.Response()


async def breaks_whole(call: Call) -> web.StreamResponse:
    """The connection ends within the body of an answer that is not streamed."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(call.request)
    await response.write(b'{"choices":')
    return await breaks(call)


async def breaks_late(call: Call) -> web.StreamResponse:
    """The connection ends within a stream."""
    response = await call.stream()
    await response.write(chunk({"content": "Hel"}))
    return await breaks(call)


async def hangs(_: Call) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def hangs_late(call: Call) -> web.StreamResponse:
    response = await call.stream()
    await response.write(chunk({"content": "Hel"}))
    return await hangs(call)


async def ends_at_once(call: Call) -> web.StreamResponse:
    return await call.stream()


# --- prefill ---


@pytest.mark.parametrize("script", [fails, breaks, breaks_whole])
async def test_another_prefill_engine_takes_over(script: Any) -> None:
    bad, good, decode = Engine(), Engine(), Engine()
    bad.script = script
    async with fleet([bad, good], [decode]) as (router, http):
        assert (await post(http, url(router), BODY))[0] == 200
        assert decode.calls[0].params == good.handoff(1)
        assert (await post(http, url(router), BODY))[0] == 200
        assert len(bad.calls) == 1  # avoided while it cools down


@pytest.mark.parametrize("script", [fails, breaks, breaks_whole, None])
async def test_without_prefill_the_decode_engine_does_it_all(script: Any) -> None:
    prefill, decode = Engine(), Engine()
    prefill.script = script
    async with fleet([prefill if script else unused_url()], [decode]) as (router, http):
        status, answer = await post(http, url(router), STREAM)
        assert status == 200
        assert answer.endswith(DONE)
        assert decode.calls[0].body == STREAM
        assert sum(sample(router, "kvlease_router_fallbacks_total", reason=reason) for reason in GIVEN_UP) == 1


async def test_a_prefill_engine_that_hangs_is_given_up() -> None:
    prefill, decode = Engine(), Engine()
    prefill.script = hangs
    async with fleet([prefill], [decode], "--prefill-timeout-ms", "50") as (router, http):
        assert (await post(http, url(router), BODY))[0] == 200
        assert sample(router, "kvlease_router_fallbacks_total", reason="prefill_timeout") == 1
        async with asyncio.timeout(LIMIT_S):
            await prefill.calls[0].cancelled.wait()


async def test_an_answer_without_parameters_is_not_handed_off() -> None:
    prefill, decode = Engine(), Engine()

    async def stock(_: Call) -> web.StreamResponse:
        return prefill.answered()

    prefill.script = stock
    async with fleet([prefill], [decode]) as (router, http):
        assert (await post(http, url(router), BODY))[0] == 200
        assert decode.calls[0].body == BODY
        assert sample(router, "kvlease_router_fallbacks_total", reason="no_params") == 1


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_refusal_passes_through_unchanged(status: int) -> None:
    prefill, decode = Engine(), Engine()

    async def script(_: Call) -> web.StreamResponse:
        return refused(status, "the prompt is too long")

    prefill.script = script
    async with fleet([prefill], [decode]) as (router, http):
        async with http.post(url(router), json=STREAM) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["message"] == "the prompt is too long"
            assert answer.headers["x-kvlease-conversation"]
        assert not decode.calls
        prefill.script = None
        decode.script = script
        async with http.post(url(router), json=STREAM) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["message"] == "the prompt is too long"
        assert sample(router, "kvlease_router_turns_total", outcome="refused") == 2


async def refuses_in_a_stream(call: Call) -> web.StreamResponse:
    response = await call.stream()
    await response.write(b'data: {"error":{"message":"x","code":400}}\n\n' + DONE)
    return response


@pytest.mark.parametrize("in_stream", [False, True])
async def test_what_only_the_decode_engine_refuses_gives_the_prefill_back(in_stream: bool) -> None:
    """The body of a prefill has fewer fields: a prefill engine takes what a decode engine refuses, and keeps blocks."""
    prefill, decode = Engine(), Engine()

    async def script(call: Call) -> web.StreamResponse:
        if call.body["model"] == "kvlease.release":
            return await decode.default(call)
        return await refuses_in_a_stream(call) if in_stream else refused(400, "min_tokens must be at most max_tokens")

    decode.script = script
    async with fleet([prefill], [decode]) as (router, http):
        assert (await post(http, url(router), STREAM))[0] == (200 if in_stream else 400)
        release = await decode.received(2)
        assert release.body["model"] == "kvlease.release"
        assert release.params == prefill.handoff(1)
        await until(lambda: sample(router, "kvlease_router_released_prefills_total") == 1)


# --- decode, before the first byte ---


async def test_an_unreachable_decode_engine_costs_no_second_prefill() -> None:
    """The blocks were not read, so the same handoff serves another engine."""
    prefill, good = Engine(), Engine()
    with full_listener() as listener:  # no connection, and no answer to a probe that would warn of it
        stalled = f"http://127.0.0.1:{listener.getsockname()[1]}"
        flags = ("--connect-timeout-ms", "50", "--health-timeout-ms", "60000")
        async with fleet([prefill], [stalled, good], *flags) as (router, http):
            assert (await post(http, url(router), STREAM))[0] == 200
            assert sample(router, "kvlease_router_fallbacks_total", reason="decode_unreachable") == 1
            assert [call.params for call in good.calls] == [prefill.handoff(1)]
            assert len(prefill.calls) == 1


@pytest.mark.parametrize(
    ("script", "body"),
    [(fails, STREAM), (breaks, STREAM), (ends_at_once, STREAM), (fails, BODY), (breaks, BODY), (breaks_whole, BODY)],
)
async def test_another_decode_engine_takes_over_with_a_new_prefill(script: Any, body: dict[str, Any]) -> None:
    """The first may have read the blocks, and reading frees them."""
    prefill, bad, good = Engine(), Engine(), Engine()
    bad.script = script
    async with fleet([prefill], [bad, good]) as (router, http):
        assert (await post(http, url(router), body))[0] == 200
        assert bad.calls[0].params == prefill.handoff(1)
        assert good.calls[0].params == prefill.handoff(2)


def error_of(answer: bytes) -> dict[str, Any]:
    error = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize("body", [STREAM, BODY])
@pytest.mark.parametrize(
    ("script", "status", "code"),
    [(None, 503, "engine_unreachable"), (breaks, 502, "engine_failed"), (fails, 500, 500)],
    ids=["unreachable", "broken", "said so"],
)
async def test_when_all_decode_engines_fail_the_client_hears_it_the_openai_way(
    script: Any, status: int, code: str | int, body: dict[str, Any]
) -> None:
    prefill, decode = Engine(), Engine()
    decode.script = script
    async with fleet([prefill], [decode if script else unused_url()]) as (router, http):
        heard, answer = await post(http, url(router), body)
        assert (heard, error_of(answer)["code"]) == (status, code)
        await until(lambda: sample(router, "kvlease_router_turns_total", outcome="failed") == 1)


@pytest.mark.parametrize(
    ("body", "flag"), [(STREAM, "--first-byte-timeout-ms"), (BODY, "--answer-timeout-ms")], ids=["stream", "whole"]
)
async def test_a_silent_decode_engine_is_given_up_and_not_tried_elsewhere(body: dict[str, Any], flag: str) -> None:
    prefill, decode, other = Engine(), Engine(), Engine()
    decode.script = other.script = hangs
    async with fleet([prefill], [decode, other], flag, "50") as (router, http):
        status, answer = await post(http, url(router), body)
        assert (status, error_of(answer)["code"]) == (504, "engine_timeout")
        assert len(decode.calls) + len(other.calls) == 1
        [call] = decode.calls + other.calls
        async with asyncio.timeout(LIMIT_S):
            await call.cancelled.wait()


async def test_an_answer_over_the_limit_is_an_error() -> None:
    prefill, decode = Engine(), Engine()
    decode.answers = ["x" * 4096]
    async with fleet([prefill], [decode], "--max-answer-bytes", "2048") as (router, http):
        status, answer = await post(http, url(router), BODY)
        assert (status, error_of(answer)["code"]) == (502, "engine_failed")


# --- decode, after the first byte ---


@pytest.mark.parametrize(("script", "code"), [(breaks_late, "engine_failed"), (hangs_late, "engine_timeout")])
async def test_a_stream_that_fails_ends_with_an_error_event(script: Any, code: str) -> None:
    prefill, decode, other = Engine(), Engine(), Engine()
    decode.script = other.script = script
    async with fleet([prefill], [decode, other], "--idle-timeout-ms", "50") as (router, http):
        status, answer = await post(http, url(router), STREAM)
        first, error, done, rest = answer.split(b"\n\n")
        assert status == 200
        assert first + b"\n\n" == chunk({"content": "Hel"})
        assert error_of(error.removeprefix(b"data: "))["code"] == code
        assert (done + b"\n\n", rest) == (DONE, b"")
        assert len(decode.calls) + len(other.calls) == 1  # what the client has seen cannot be taken back
        assert sample(router, "kvlease_router_turns_total", outcome="broken") == 1


async def stops_without_a_word(call: Call) -> web.StreamResponse:
    """The stream is whole HTTP, and half an answer."""
    response = await call.stream()
    await response.write(chunk({"content": "Hel"}))
    return response


async def closes_without_a_word(call: Call) -> web.StreamResponse:
    """A stream that only the end of its connection ends, in the middle of an event."""
    transport = call.request.transport
    assert isinstance(transport, asyncio.Transport)
    transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    transport.write(chunk({"content": "Hel"}) + chunk({}, finish="stop")[:40])
    transport.close()
    return web.Response()


@pytest.mark.parametrize("script", [stops_without_a_word, closes_without_a_word])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_that_ends_without_saying_so_is_no_whole_answer(script: Any, path: str) -> None:
    prefill, decode = Engine(), Engine()
    decode.script = script
    async with fleet([prefill], [decode]) as (router, http):
        status, answer = await post(http, url(router, path), {**STREAM, "prompt": "hi"})
        *_, error, done, rest = answer.split(b"\n\n")
        assert status == 200
        assert error_of(error.removeprefix(b"data: "))["code"] == "engine_failed"
        assert (done + b"\n\n", rest) == (DONE, b"")
        assert sample(router, "kvlease_router_turns_total", outcome="broken") == 1


async def finishes_without_done(call: Call) -> web.StreamResponse:
    response = await call.stream()
    await response.write(chunk({"content": "Hello"}) + chunk({}, finish="stop") + usage_chunk(1))
    return response


async def test_a_stream_that_has_finished_needs_no_more_than_that() -> None:
    prefill, decode = Engine(), Engine()
    decode.script = finishes_without_done
    async with fleet([prefill], [decode]) as (router, http):
        _, answer = await post(http, url(router), STREAM)
        assert answer == chunk({"content": "Hello"}) + chunk({}, finish="stop") + usage_chunk(1)
        await until(lambda: sample(router, "kvlease_router_turns_total", outcome="served") == 1)


async def test_an_event_that_was_cut_is_closed_before_the_error() -> None:
    prefill, decode = Engine(), Engine()

    async def script(call: Call) -> web.StreamResponse:
        response = await call.stream()
        await response.write(b'data: {"choi')
        return await breaks(call)

    decode.script = script
    async with fleet([prefill], [decode]) as (router, http):
        _, answer = await post(http, url(router), STREAM)
        cut, error, *_ = answer.split(b"\n\n")
        assert cut == b'data: {"choi'
        assert error_of(error.removeprefix(b"data: "))["code"] == "engine_failed"


async def test_the_openai_client_sees_a_broken_stream_as_an_error() -> None:
    prefill, decode = Engine(), Engine()
    decode.script = breaks_late
    async with prefill.serve(), decode.serve(), routing([prefill], [decode]) as router:
        client = openai.AsyncOpenAI(base_url=url(router, "/v1"), api_key="k", max_retries=0)
        async with client:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            parts = aiter(stream)
            assert (await anext(parts)).choices[0].delta.content == "Hel"
            with pytest.raises(openai.APIError, match="engine failed"):
                await anext(parts)


async def test_an_error_inside_a_stream_is_counted_as_one() -> None:
    prefill, decode = Engine(), Engine()
    events = chunk({"content": "a"}) + b'data: {"error":{"message":"x","code":500}}\n\n' + DONE

    async def script(call: Call) -> web.StreamResponse:
        response = await call.stream()
        await response.write(events)
        return response

    decode.script = script
    async with fleet([prefill], [decode]) as (router, http):
        assert await post(http, url(router), STREAM) == (200, events)
        await until(lambda: sample(router, "kvlease_router_turns_total", outcome="broken") == 1)
