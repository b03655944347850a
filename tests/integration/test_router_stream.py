"""Streams through a router: nothing held back, nothing changed, and a client that leaves stops the engines' work.

An engine makes its next chunk only when the client has the one before: what is held back would stop the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from kvlease.router.routes import Role

from tests.integration.router_peers import (
    DONE,
    LIMIT_S,
    Call,
    Engine,
    chunk,
    fleet,
    full_listener,
    routing,
    sample,
    until,
    url,
)

BODY: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


async def next_chunk(content: aiohttp.StreamReader) -> bytes:
    """One whole HTTP chunk, as the router cut it."""
    held = b""
    async with asyncio.timeout(LIMIT_S):
        while True:
            data, ended = await content.readchunk()
            held += data
            if ended or (not data and not ended):
                return held


async def test_each_chunk_arrives_before_the_next_is_made_and_uncut() -> None:
    events = chunk({"content": "a"}) + chunk({"content": "b"})
    writes = [
        chunk({"role": "assistant", "content": ""}),
        events,  # two events in one write stay one
        events[:30],  # and an event cut in the middle stays cut
        events[30:],
        chunk({"content": "x" * 100_000}),  # larger than a read of a socket
        b": a comment\r\n\r\n",
        DONE,
    ]
    turn = asyncio.Semaphore(0)

    async def script(call: Call) -> web.StreamResponse:
        response = await call.stream()
        for data in writes:
            await turn.acquire()
            await response.write(data)
        return response

    prefill, decode = Engine(), Engine()
    decode.script = script
    async with fleet([prefill], [decode]) as (router, http):
        turn.release()  # the head of an answer travels with its first chunk
        async with http.post(url(router), json=BODY) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert answer.headers["X-Engine"] == "d"
            seen = []
            for _ in writes:
                seen.append(await next_chunk(answer.content))
                turn.release()
            assert await next_chunk(answer.content) == b""
    assert seen == writes


async def test_a_chunk_that_arrives_in_parts_goes_on_as_one() -> None:
    whole = chunk({"content": "x" * 1000})

    async def script(call: Call) -> web.StreamResponse:
        response = await call.stream()
        transport = call.request.transport
        assert transport is not None
        transport.write(b"%x\r\n" % len(whole) + whole[:500])
        for _ in range(50):  # all parties share this loop: the router has read the first part by then
            await asyncio.sleep(0)
        transport.write(whole[500:] + b"\r\n")
        return response

    prefill, decode = Engine(), Engine()
    decode.script = script
    async with fleet([prefill], [decode]) as (router, http), http.post(url(router), json=BODY) as answer:
        assert await next_chunk(answer.content) == whole


async def test_the_head_is_not_sent_before_the_first_byte() -> None:
    """So that an engine that fails before it can still be replaced."""
    hold = asyncio.Event()

    async def script(call: Call) -> web.StreamResponse:
        response = await call.stream()
        await hold.wait()
        await response.write(DONE)
        return response

    prefill, decode = Engine(), Engine()
    decode.script = script
    async with fleet([prefill], [decode]) as (router, http):
        posted = asyncio.create_task(http.post(url(router), json=BODY).__aenter__())
        await decode.received(1)
        assert not posted.done()
        hold.set()
        async with asyncio.timeout(LIMIT_S):
            answer = await posted
            assert await answer.read() == DONE


async def test_a_turn_goes_from_prefill_to_decode_with_what_was_handed_off() -> None:
    prefill, decode = Engine(), Engine()
    async with fleet([prefill], [decode]) as (router, http):
        async with http.post(url(router), json={**BODY, "max_tokens": 5, "odd": [1]}) as answer:
            await answer.read()
        assert answer.headers["x-kvlease-conversation"]
    [first], [second] = prefill.calls, decode.calls
    assert first.body["max_tokens"] == 1
    assert first.body["stream"] is False
    assert first.body["odd"] == [1]
    assert first.params["do_remote_decode"] is True
    assert second.body == {**BODY, "max_tokens": 5, "odd": [1], "kv_transfer_params": prefill.handoff(1)}
    for call in (first, second):
        assert call.request.headers["X-Request-Id"] == answer.headers["X-Request-Id"]


async def leave(http: aiohttp.ClientSession, target: str, when: asyncio.Event, **body: object) -> None:
    """Posts a turn and breaks the connection at `when`."""
    async with asyncio.timeout(LIMIT_S):
        task = asyncio.create_task(http.post(target, json={**BODY, **body}).__aenter__())
        await when.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await task).close()


async def test_a_client_that_leaves_during_prefill_aborts_it() -> None:
    there = asyncio.Event()

    async def script(_: Call) -> web.StreamResponse:
        there.set()
        await asyncio.Event().wait()
        raise AssertionError

    prefill, decode = Engine(), Engine()
    prefill.script = script
    async with fleet([prefill], [decode]) as (router, http):
        await leave(http, url(router), there)
        async with asyncio.timeout(LIMIT_S):
            await prefill.calls[0].cancelled.wait()
        await until(lambda: sample(router, "kvlease_router_turns_total", outcome="client_gone") == 1)
        assert not decode.calls
        assert all(router.routes.outstanding(target) == 0 for target in router.routes.targets())


async def test_a_client_that_leaves_as_its_prefill_ends_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router has not read yet what was handed off."""
    monkeypatch.setattr("kvlease.router.legs._LATE_S", LIMIT_S)  # however slow this machine is
    gone = asyncio.Event()
    prefill, decode = Engine(), Engine()

    async def script(_: Call) -> web.StreamResponse:
        await gone.wait()
        return prefill.prefilled()

    prefill.script = script
    async with fleet([prefill], [decode]) as (router, http):
        posted = asyncio.create_task(http.post(url(router), json=BODY).__aenter__())
        await prefill.received(1)
        posted.cancel()
        await until(lambda: sample(router, "kvlease_router_turns_total", outcome="client_gone") == 1)
        gone.set()
        release = await decode.received(1)
        assert release.body["model"] == "kvlease.release"
        assert release.params == prefill.handoff(1)
        await until(lambda: sample(router, "kvlease_router_released_prefills_total") == 1)


async def test_a_client_that_leaves_before_the_first_byte_or_later_aborts_decoding() -> None:
    for head_first in (False, True):
        there = asyncio.Event()

        async def script(call: Call, there: asyncio.Event = there, head_first: bool = head_first) -> web.StreamResponse:
            if head_first:
                response = await call.stream()
                await response.write(chunk({"content": "a"}))
            there.set()
            await asyncio.Event().wait()
            raise AssertionError

        prefill, decode = Engine(), Engine()
        decode.script = script
        async with fleet([prefill], [decode]) as (router, http):
            await leave(http, url(router), there)
            async with asyncio.timeout(LIMIT_S):
                await decode.calls[0].cancelled.wait()
            await until(lambda router=router: sample(router, "kvlease_router_turns_total", outcome="client_gone") == 1)  # type: ignore[misc]
            assert all(router.routes.outstanding(target) == 0 for target in router.routes.targets())


async def test_a_client_that_leaves_between_the_two_gives_the_prefill_back() -> None:
    """The decode engine cannot be connected to at first: its accept queue is full. Then the client leaves."""
    prefill = Engine()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(full_listener())
        stalled = f"http://127.0.0.1:{listener.getsockname()[1]}"
        flags = ("--connect-timeout-ms", "60000", "--health-interval-ms", "60000", "--health-timeout-ms", "60000")
        async with fleet([prefill], [stalled], *flags) as (router, http):
            [target] = router.routes.targets(Role.DECODE)
            posted = asyncio.create_task(http.post(url(router), json=BODY).__aenter__())
            await until(lambda: router.routes.outstanding(target) == 1)
            posted.cancel()
            await until(lambda: sample(router, "kvlease_router_released_prefills_total") == 1)
            sent = json.loads(await first_body(listener))
    assert sent["model"] == "kvlease.release"
    assert sent["kv_transfer_params"] == prefill.handoff(1)
    assert "messages" not in sent


async def test_an_engine_that_does_not_take_connections_is_unreachable() -> None:
    prefill = Engine()
    with full_listener() as listener:
        stalled = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with (
            fleet([prefill], [stalled], "--connect-timeout-ms", "50") as (router, http),
            http.post(url(router), json=BODY) as answer,
        ):
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "engine_unreachable"


async def first_body(listener: socket.socket) -> bytes:
    """Accepts connections until one of them brings a request with a body."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[bytes] = loop.create_future()

    async def read(connection: socket.socket) -> None:
        received = b""
        with connection:
            while piece := await loop.sock_recv(connection, 65_536):
                received += piece
                head, _, body = received.partition(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
                if length and len(body) == length and not found.done():
                    found.set_result(body)

    async def accept(group: asyncio.TaskGroup) -> None:
        while True:
            connection, _ = await loop.sock_accept(listener)
            group.create_task(read(connection))

    class Found(Exception):
        pass

    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            group.create_task(accept(group))
            await found
            raise Found
    except* Found:
        pass
    return found.result()


async def test_a_client_that_takes_nothing_in_is_gone_after_its_time() -> None:
    async def script(call: Call) -> web.StreamResponse:
        response = await call.stream()
        while True:
            await response.write(chunk({"content": "x" * 100_000}))

    prefill, decode = Engine(), Engine()
    decode.script = script
    async with fleet([prefill], [decode], "--client-timeout-ms", "50") as (router, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        raw = json.dumps(BODY).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        async with asyncio.timeout(LIMIT_S):
            await (await decode.received(1)).cancelled.wait()
        await until(lambda: sample(router, "kvlease_router_turns_total", outcome="client_gone") == 1)
        writer.transport.abort()
        del reader


async def test_a_body_that_does_not_arrive_is_refused() -> None:
    engine = Engine()
    async with fleet([engine], [engine], "--client-timeout-ms", "50") as (router, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        async with asyncio.timeout(LIMIT_S):
            head = await reader.readuntil(b"\r\n")
        assert head == b"HTTP/1.1 408 Request Timeout\r\n"
        writer.close()


async def test_an_unmodified_openai_client_streams() -> None:
    prefill, decode = Engine(), Engine()
    patient = ("--health-timeout-ms", "60000", "--connect-timeout-ms", "60000")  # the client is slow to load
    async with prefill.serve(), decode.serve(), routing([prefill], [decode], *patient) as router:
        client = openai.AsyncOpenAI(base_url=url(router, "/v1"), api_key="secret", max_retries=0)
        async with client:
            messages: Any = [{"role": "user", "content": "hi"}]
            plain = await client.chat.completions.create(model="m", messages=messages, stream=True)
            text = "".join([part.choices[0].delta.content or "" async for part in plain])
            assert text == "Hello there"
            counted = await client.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            parts = [part async for part in counted]
            assert parts[-1].usage is not None
            assert parts[-1].usage.completion_tokens == 2
            whole = await client.chat.completions.create(model="m", messages=messages)
            assert whole.choices[0].message.content == "Hello there"
            completion = await client.completions.create(model="m", prompt="hi")
            assert completion.choices[0].text == "Hello there"
            assert [model.id async for model in client.models.list()] == ["m"]
    assert "stream_options" not in prefill.calls[1].body
    assert decode.calls[1].body["stream_options"] == {"include_usage": True}
