"""A good caller beside the fuzz, in a process of its own: `python -m tests.fuzz.honest_caller PORT`.

Lends one lease and resolves it all the while. Says the milliseconds of its resolves in rounds; a resolve that does not
find the lease ends it with an error, since nothing that others send may take it away.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Final

from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.values import Hit, ResolveQuery, TenantId

from tests.bench.lenders import Lender
from tests.bench.payloads import Turns, engine
from tests.bench.served import say, until_left

TENANT: Final = TenantId("honest")
ROUND: Final = 200
PAUSE_S: Final = 0.001
RESOLVE_MS: Final = 5_000


class LeaseLost(RuntimeError):
    """What others sent took a lease away that was none of theirs."""


async def run(port: int) -> None:
    async with RegistryClient(f"127.0.0.1:{port}") as client, Lender(client, engine("honest", seed=1)) as lender:
        deadline_ms = SystemClock().now_ms() + 3_600_000
        turn = Turns(lender.engine, seed=1, deadline_ms=deadline_ms, tenant=TENANT).make(1_024)
        await lender.publish([turn.publication])
        while True:
            say(await _round(client, turn.query))


async def main(port: int) -> None:
    """Until whoever started it leaves."""
    tasks = {asyncio.create_task(run(port)), asyncio.create_task(until_left())}
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    for task in done:
        task.result()


async def _round(client: RegistryClient, query: ResolveQuery) -> list[float]:
    samples: list[float] = []
    for _ in range(ROUND):
        began = time.perf_counter()
        answer = await client.resolve(query, timeout_ms=RESOLVE_MS)
        samples.append((time.perf_counter() - began) * 1e3)
        if not isinstance(answer, Hit):
            raise LeaseLost(f"the honest lease is not found: {answer}")
        await asyncio.sleep(PAUSE_S)
    return samples


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
