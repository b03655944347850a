"""A lender that only has seals: `python -m tests.bench.seal_lender`, with UCX_TLS in the environment.

Says where one whole seal lies and how to reach its agent, then serves until it is left. Its agent's progress thread
waits for events instead of spinning as an engine's does: on two cores, spinning threads would measure the scheduler.
"""

from __future__ import annotations

import asyncio
import secrets

from kvlease.connector.seal import HASH_BYTES, slot_offset
from kvlease.connector.seal_table import SealTable, sweep

from tests.bench.served import say, until_left
from tests.nixl.agent import open_agent

SLOTS = 64


async def serve() -> None:
    sweep()
    table = SealTable.create(SLOTS)
    try:
        agent = open_agent("bench-lender", [(table.address, table.size, 0, "")])
        value, record_hash = secrets.randbits(63) | 1, secrets.token_bytes(HASH_BYTES)
        table.write_hash(0, record_hash)
        table.write_value(0, value)
        say(
            {
                "metadata": agent.get_agent_metadata().hex(),
                "address": table.address + slot_offset(0),
                "value": value,
                "record_hash": record_hash.hex(),
            }
        )
        await until_left()
    finally:
        table.close()


if __name__ == "__main__":
    asyncio.run(serve())
