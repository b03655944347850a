"""The real registry with its memory store, in a process of its own. `python -m tests.bench.registry_server [FLAGS]`.

Set up as `kvlease registry` does, without the metrics endpoint; nothing of it is replaced or left out. FLAGS are its
own, for more than what is measured here.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from kvlease.registry.heap import freeze_survivors
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, load

from tests.bench.served import say, until_left


async def serve(flags: list[str]) -> None:
    plain = ["--listen", "127.0.0.1:0", "--metrics-listen", NO_METRICS, "--log-level", "warning"]
    settings = load([*plain, *flags])
    async with RegistryServer(settings) as server:
        say({"port": server.port})
        await until_left()


if __name__ == "__main__":
    freeze_survivors()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1:]))
