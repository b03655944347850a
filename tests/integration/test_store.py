"""The stores, each held to the same suite (`store_conformance.py`).

Nothing store-specific is tested here; what is, belongs to a test of that store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvlease.registry.store import MemoryHub, MemoryStore, Store

from tests.integration.store_conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    @asynccontextmanager
    async def replicas(self) -> AsyncIterator[tuple[Store, Store]]:
        hub = MemoryHub()
        yield MemoryStore(hub), MemoryStore(hub)
