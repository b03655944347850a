"""The real router, in a process of its own. `python -m tests.bench.router_server` and the flags of `kvlease router`.

Set up as `kvlease router` does; nothing of it is replaced or left out.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from kvlease.router.server import RouterServer
from kvlease.router.settings import load

from tests.bench.served import say, until_left


async def serve() -> None:
    async with RouterServer(load(["--listen", "127.0.0.1:0", *sys.argv[1:]])) as router:
        say({"port": router.port})
        await until_left()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
