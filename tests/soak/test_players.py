"""The soak's clients against a server that knows the answers: what they send, and that nothing begins at a closed gate.

No engines: the server is real, its answers are those of the recorded turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from dataclasses import replace
from typing import Any

from aiohttp import web

from tests.soak.answers import Choice
from tests.soak.chats import CHAT, Kind, Step
from tests.soak.judge import Judge
from tests.soak.players import Gate, Players

ENOUGH = 300
"""Requests: each habit of a client is seen many times."""


def turn(number: int) -> Step:
    answer = Choice(text=f" {number}", tokens=(f" {number}",), logprobs=(-1.0,), finish_reason="stop")
    messages = [{"role": "user", "content": f"turn {number}"}]
    body = {"model": "m", "messages": messages, "max_tokens": 4, "stop": [" x"]}
    return Step(kind=Kind.STOP, path=CHAT, body=body, prompt_tokens=5, choices=(answer,))


def answer_to(step: Step, body: dict[str, Any]) -> web.Response:
    """The recorded answer, if what was recorded is asked for."""
    streamed = bool(body.get("stream"))
    same = (body["max_tokens"], body["stop"]) == (step.body["max_tokens"], step.body["stop"])
    said = step.choices[0] if same else replace(step.choices[0], text=" another")
    logprobs = {"content": [{"token": said.tokens[0], "logprob": said.logprobs[0]}]}
    message = {"role": "assistant", "content": said.text}
    choice: dict[str, Any] = {"index": 0, "finish_reason": said.finish_reason, "logprobs": logprobs}
    choice |= {"delta": message} if streamed else {"message": message}
    said_body = {"choices": [choice], "usage": {"prompt_tokens": step.prompt_tokens}}
    if not streamed:
        return web.json_response(said_body)
    return web.Response(text=f"data: {json.dumps(said_body)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")


async def test_clients_send_what_was_recorded_and_nothing_through_a_closed_gate() -> None:
    chats = [[turn(number) for number in range(3)] for _ in range(2)]
    untouched = copy.deepcopy(chats)
    known = {json.dumps(step.body["messages"]): step for step in chats[0]}
    seen: list[dict[str, Any]] = []
    enough = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body)
        if len(seen) >= ENOUGH:
            enough.set()
        step = known.get(json.dumps(body.get("messages")))
        return web.Response(status=400) if step is None else answer_to(step, body)

    app = web.Application()
    app.router.add_post("/v1/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    judge, gate = Judge(), Gate()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    players = Players(url=url, chats=chats, judge=judge, gate=gate, seed=1, count=8, rate=4_000)
    playing = asyncio.create_task(players.run())
    try:
        await asyncio.wait_for(enough.wait(), 60)
        async with gate.closed():
            counted = len(seen)
            assert gate.under_way == 0
            await asyncio.sleep(0.2)
            assert len(seen) == counted
    finally:
        playing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await playing
        await runner.cleanup()
    assert not judge.faults
    assert chats == untouched, "a client changed a recorded turn"
    for number in ("turns", "bad requests", "clients that left", "regenerated"):
        assert judge.counts[number], number
    assert any(body.get("stream") for body in seen)
    assert any("conversation_id" in body for body in seen)
    assert len({body.get("cache_salt") for body in seen}) > 4
