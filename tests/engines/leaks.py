"""The judge of leaks on real engines: once every lease has ended, every block of every engine is free.

A `Fleet` that closes in good order is judged, if `ON` says so: tests do, the demo does not. Engines that are gone have
no blocks to leak. Blocks of late READs count, so they must have been given back as well.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Final

from kvlease.registry.client import RegistryClient

from tests.engines.openai_client import OpenAIClient

if TYPE_CHECKING:
    from tests.engines.fleet import Fleet

ON = False
WAIT_S: Final = 45.0
"""A prefill that nobody fetched is kept for stock's own 30 s."""
_USAGE: Final = re.compile(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", re.MULTILINE)


async def judge(fleet: Fleet) -> None:
    """Raises AssertionError if an engine holds blocks though nothing uses them."""
    alive = [engine_id for engine_id in fleet.engine_ids if fleet.child(engine_id).returncode is None]
    if fleet.registry_endpoint is not None:
        async with RegistryClient(fleet.registry_endpoint) as registry:
            for status in await registry.list_engines():
                await registry.end_engine(status.engine.engine_id)
    deadline = time.monotonic() + WAIT_S
    held = dict.fromkeys(alive, 1.0)
    while held and time.monotonic() < deadline:
        for engine_id in list(held):
            async with OpenAIClient(fleet.engine_url(engine_id)) as engine:
                await engine.complete("one two", max_tokens=2, logprobs=False)  # a step, in which blocks are given back
                _, text = await engine.get("/metrics")
            held[engine_id] = max(map(float, _USAGE.findall(text)), default=0.0)
            if not held[engine_id]:
                del held[engine_id]
        if held:
            await asyncio.sleep(0.5)
    assert not held, f"blocks are held though nothing uses them (share of the pool by engine): {held}"
