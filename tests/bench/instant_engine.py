"""An engine that takes no time: `python -m tests.bench.instant_engine`. Prefills and decodes at once, over real HTTP.

It answers as vLLM does, in bytes made beforehand, so that what is measured through it is everything but an engine.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

import uvloop
from aiohttp import web

from tests.bench.served import say, until_left

_CHOICE: Final = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
PREFILLED: Final = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [_CHOICE],
        "usage": {"prompt_tokens": 1_000, "completion_tokens": 1, "total_tokens": 1_001},
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(63))],
            "remote_engine_id": "prefill-0",
            "remote_request_id": "chatcmpl-1",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        },
    }
).encode()


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    fields = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


FIRST: Final = _event({"role": "assistant", "content": ""})
REST: Final = _event({"content": "Hello"}) + _event({}, "stop") + b"data: [DONE]\n\n"


async def turn(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        return web.Response(body=PREFILLED, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    await response.write(FIRST)
    await response.write(REST)
    return response


async def health(_: web.Request) -> web.StreamResponse:
    return web.Response()


async def serve() -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", turn)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        say({"port": runner.addresses[0][1]})
        await until_left()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(serve())
