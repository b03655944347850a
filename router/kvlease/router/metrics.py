"""What a router counts: its Prometheus metrics, in a registry of their own.

Their names come from `kvlease.registry.metrics`, as all do. Label values come from closed lists or are configured
engine URLs, never anything a client sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvlease.registry.client import RegistryClient
from kvlease.registry.client_metrics import ClientCollector
from kvlease.registry.clock import Clock
from kvlease.registry.lease_copy import LeaseCopy
from kvlease.registry.metrics import (
    ROUTER_COPY_EVENTS,
    ROUTER_COPY_LEASES,
    ROUTER_COPY_LISTS,
    ROUTER_COPY_STALENESS,
    ROUTER_ENGINE_LENDS,
    ROUTER_ENGINE_UP,
    ROUTER_FALLBACKS,
    ROUTER_FIRST_BYTE_SECONDS,
    ROUTER_LOCATES,
    ROUTER_MISSES,
    ROUTER_NAMINGS,
    ROUTER_OUTSTANDING,
    ROUTER_REGISTRY_MOVES,
    ROUTER_REGISTRY_PLACE,
    ROUTER_RELEASES,
    ROUTER_RENEWALS,
    ROUTER_STRIPPED,
    ROUTER_TURNS,
    Metric,
)
from kvlease.router.routes import Health, Role, Routes
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_FIRST_BYTE_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
"""Seconds: from a borrowed turn on a small model to a long queue."""


class RouterMetrics:
    """All metrics of one router."""

    def __init__(self, routes: Routes, copy: LeaseCopy, clock: Clock) -> None:
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
        self.registry.register(_CopyCollector(copy, clock))

    def follow(self, client: RegistryClient) -> None:
        """Show which replica of the registry this client uses. Called once."""
        moves, place = ROUTER_REGISTRY_MOVES, ROUTER_REGISTRY_PLACE
        self.registry.register(ClientCollector(lambda: client, moves=moves, place=place))

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class _RoutesCollector(Collector):
    """Reads the route table when scraped, so that nothing has to be kept in step with it."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    def collect(self) -> Iterable[Family]:
        outstanding, up, lends = map(_gauge, (ROUTER_OUTSTANDING, ROUTER_ENGINE_UP, ROUTER_ENGINE_LENDS))
        for target in self._routes.targets():
            outstanding.add_metric([target.url, target.role], self._routes.outstanding(target))
            up.add_metric([target.url, target.role], float(self._routes.health(target) is Health.UP))
            if target.role is Role.DECODE and (lent := self._routes.lends(target)) is not None:
                lends.add_metric([target.url], float(lent))
        yield from (outstanding, up, lends)


class _CopyCollector(Collector):
    """Reads the copy of the leases when scraped."""

    def __init__(self, copy: LeaseCopy, clock: Clock) -> None:
        self._copy = copy
        self._clock = clock

    def collect(self) -> Iterable[Family]:
        leases, staleness = _gauge(ROUTER_COPY_LEASES), _gauge(ROUTER_COPY_STALENESS)
        leases.add_metric([], len(self._copy))
        staleness_ms = self._copy.staleness_ms(self._clock.now_ms())
        if staleness_ms is not None:
            staleness.add_metric([], staleness_ms / 1000)
        yield from (leases, staleness)
        for metric, value in ((ROUTER_COPY_LISTS, self._copy.lists), (ROUTER_COPY_EVENTS, self._copy.events)):
            yield CounterMetricFamily(metric.name, metric.text, value=value)


def _gauge(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.text, labels=metric.labels)
