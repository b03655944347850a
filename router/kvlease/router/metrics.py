"""What a router counts: its Prometheus metrics, in a registry of their own.

Names shared with dashboards come from `kvlease.registry.metrics`; the few that only a router has are here. Label values
come from closed lists or are configured engine URLs, never anything a client sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvlease.registry.metrics import (
    ROUTER_FALLBACKS,
    ROUTER_FIRST_BYTE_SECONDS,
    ROUTER_LOCATES,
    ROUTER_MISSES,
    ROUTER_OUTSTANDING,
    ROUTER_STRIPPED,
    ROUTER_TURNS,
    Metric,
)
from kvlease.router.routes import Health, Routes
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
ROUTER_NAMINGS: Final = Metric(
    name="kvlease_router_namings_total", text="Continuations named in the registry, by outcome", labels=("outcome",)
)
ROUTER_RENEWALS: Final = Metric(
    name="kvlease_router_renewals_total", text="Renewals this router asked for, by answer", labels=("status",)
)
ROUTER_RELEASES: Final = Metric(
    name="kvlease_router_released_prefills_total", text="Prefills given back because the client left before decoding"
)
ROUTER_ENGINE_UP: Final = Metric(
    name="kvlease_router_engine_up", text="1 if the last health probe succeeded", labels=("target", "role")
)
_FIRST_BYTE_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
"""Seconds: from a borrowed turn on a small model to a long queue."""


class RouterMetrics:
    """All metrics of one router."""

    def __init__(self, routes: Routes) -> None:
        self.registry = CollectorRegistry()
        self.turns = ROUTER_TURNS.counter(self.registry)
        self.locates = ROUTER_LOCATES.counter(self.registry)
        self.misses = ROUTER_MISSES.counter(self.registry)
        self.first_byte_seconds = ROUTER_FIRST_BYTE_SECONDS.histogram(self.registry, _FIRST_BYTE_BUCKETS)
        self.stripped = ROUTER_STRIPPED.counter(self.registry)
        self.fallbacks = ROUTER_FALLBACKS.counter(self.registry)
        self.namings = ROUTER_NAMINGS.counter(self.registry)
        self.renewals = ROUTER_RENEWALS.counter(self.registry)
        self.releases = ROUTER_RELEASES.counter(self.registry)
        self.registry.register(_RoutesCollector(routes))

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class _RoutesCollector(Collector):
    """Reads the route table when scraped, so that nothing has to be kept in step with it."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    def collect(self) -> Iterable[Family]:
        outstanding, up = (
            GaugeMetricFamily(metric.name, metric.text, labels=metric.labels)
            for metric in (ROUTER_OUTSTANDING, ROUTER_ENGINE_UP)
        )
        for target in self._routes.targets():
            outstanding.add_metric([target.url, target.role], self._routes.outstanding(target))
            up.add_metric([target.url, target.role], float(self._routes.health(target) is Health.UP))
        yield outstanding
        yield up
