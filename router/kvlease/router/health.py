"""Who is alive: probes of engines and registry, and the answer to "is this router ready".

A probe tells the route table what it saw and nothing else; failures of turns are told by the turns.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvlease.router.body import Json, JsonObject
from kvlease.router.leases import Leases
from kvlease.router.routes import Health, Role, Routes, Target
from kvlease.router.upstream import EngineFailure, Upstream

_LOG: Final = logging.getLogger(__name__)
_ADVICE: Final = (
    'start it with "kv_connector_module_path": "kvlease.connector" and with this URL as its api_url, '
    "or name it to the router as ENGINE_ID@URL"
)


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
        self._told: set[Target] = set()
        """Decode engines of which it was said that they do not lend."""

    async def run(self) -> None:
        """Probes until cancelled."""
        async with asyncio.TaskGroup() as group:
            for target in self._routes.targets():
                group.create_task(self._watch(target))
            if self._leases.on:
                group.create_task(self._watch_registry())

    def report(self) -> JsonObject:
        """What is known, for /health. `lends`: whether the registry knows a decode engine as a lender (null: unknown).
        One that is up and does not lend has `advice`."""
        prefill = [self._engine(target) for target in self._routes.targets(Role.PREFILL)]
        decode: list[Json] = []
        for target in self._routes.targets(Role.DECODE):
            entry: JsonObject = {**self._engine(target), "lends": self._routes.lends(target)}
            if self._is_stock(target):
                entry["advice"] = _ADVICE
            decode.append(entry)
        report: JsonObject = {"registry": self._leases.state.value, "prefill": list(prefill), "decode": decode}
        copy = self._leases.copy_report()
        if copy is not None:
            report["copy"] = {"leases": copy.leases, "staleness_ms": copy.staleness_ms}
        return report

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
            self._routes.registered(None if engines is None else [status.engine for status in engines])
            self._tell()
            await asyncio.sleep(self._interval_ms / 1000)

    def _is_stock(self, target: Target) -> bool:
        """Up, and not known to the registry: most likely it runs without our connector, which is silent."""
        return self._routes.lends(target) is False and self._routes.health(target) is Health.UP

    def _tell(self) -> None:
        """Says once of each decode engine that it does not lend, and when it does."""
        for target in self._routes.targets(Role.DECODE):
            if self._is_stock(target) and target not in self._told:
                self._told.add(target)
                _LOG.warning("decode engine %s does not lend: the registry does not know it; %s", target.url, _ADVICE)
            elif target in self._told and self._routes.lends(target):
                self._told.discard(target)
                _LOG.info("decode engine %s lends", target.url)
