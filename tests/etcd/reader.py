"""What tests take from a watch: the next revisions that change something, and their keys.

Knows no cluster. Bounded: a revision that does not come is a TimeoutError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvlease.etcd import Changes, Watch


async def changes(watch: Watch, count: int, timeout_s: float = 20.0) -> list[Changes]:
    """The next `count` revisions that change something."""
    found: list[Changes] = []
    async with asyncio.timeout(timeout_s):
        while len(found) < count:
            item = await anext(watch)
            if isinstance(item, Changes):
                found.append(item)
    return found


def keys(found: Sequence[Changes]) -> list[bytes]:
    return [event.kv.key for one in found for event in one.events]
