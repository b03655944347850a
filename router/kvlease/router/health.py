"""Who is alive: probes of engines and registry, and the answer to "is this router ready".

A probe tells the route table what it saw and nothing else; failures of turns are told by the turns.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvlease.router.body import Json, JsonObject
from kvlease.router.leases import Leases
from kvlease.router.routes import Health, Role, Routes, Target, base_url
from kvlease.router.upstream import EngineFailure, Upstream

_LOG: Final = logging.getLogger(__name__)


class Probes:
    """Asks each engine's /health, and the registry, once per interval."""

    def __init__(
        self, routes: Routes, upstream: Upstream, leases: Leases, *, interval_ms: int, timeout_ms: int
    ) -> None:
        self._routes = routes
        self._upstream = upstream
        self._leases = leases
        self._interval_ms = interval_ms
        self._timeout_ms = timeout_ms
        self._lenders: frozenset[Target] | None = None

    async def run(self) -> None:
        """Probes until cancelled."""
        async with asyncio.TaskGroup() as group:
            for target in self._routes.targets():
                group.create_task(self._watch(target))
            if self._leases.on:
                group.create_task(self._watch_registry())

    def report(self) -> JsonObject:
        """What is known, for /health. `lends`: whether the registry knows a decode engine as a lender (null: unknown);
        false for one that runs without kvlease's connector."""
        prefill = [self._engine(target) for target in self._routes.targets(Role.PREFILL)]
        decode: list[Json] = []
        for target in self._routes.targets(Role.DECODE):
            lends = None if self._lenders is None else target in self._lenders
            decode.append({**self._engine(target), "lends": lends})
        return {"registry": self._leases.state.value, "prefill": list(prefill), "decode": decode}

    def _engine(self, target: Target) -> JsonObject:
        return {
            "url": target.url,
            "health": self._routes.health(target).value,
            "outstanding": self._routes.outstanding(target),
        }

    async def _watch(self, target: Target) -> None:
        while True:
            try:
                answer = await self._upstream.get(target, "/health", {}, timeout_ms=self._timeout_ms)
                up = answer.status == 200
            except EngineFailure:
                up = False
            before = self._routes.health(target)
            self._routes.probed(target, up=up)
            if self._routes.health(target) is not before:
                level = logging.INFO if up else logging.WARNING
                _LOG.log(level, "%s engine %s is %s", target.role, target.url, self._routes.health(target))
            await asyncio.sleep(self._interval_ms / 1000)

    async def _watch_registry(self) -> None:
        while True:
            engines = await self._leases.engines()
            if engines is None:
                self._lenders = None
            else:
                ids = {status.engine.engine_id for status in engines}
                urls = {base_url(status.engine.api_url) for status in engines}
                found = [t for t in self._routes.targets(Role.DECODE) if t.engine_id in ids or t.url in urls]
                self._tell(frozenset(found))
            await asyncio.sleep(self._interval_ms / 1000)

    def _tell(self, lenders: frozenset[Target]) -> None:
        """Says once per change which healthy decode engines do not lend: a forgotten connector setting is silent."""
        if lenders != self._lenders:
            for target in self._routes.targets(Role.DECODE):
                if target not in lenders and self._routes.health(target) is Health.UP:
                    _LOG.warning("decode engine %s is not known to the registry: its KV is not lent", target.url)
        self._lenders = lenders
