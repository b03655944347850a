"""What a client of the registry is to say of itself in Prometheus: which replica it uses, and how often that changed.

Reads the client when scraped, from the thread that serves metrics; changes nothing. Named in `metrics.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kvlease.registry.client import RegistryClient
from kvlease.registry.metrics import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector


class ClientCollector(Collector):
    """Of one client, which may not be there yet."""

    def __init__(self, client: Callable[[], RegistryClient | None], *, moves: Metric, place: Metric) -> None:
        self._client: Final = client
        self._moves: Final = moves
        self._place: Final = place

    def collect(self) -> Iterable[Family]:
        client = self._client()
        moves = 0 if client is None else client.moves
        yield CounterMetricFamily(self._moves.name, self._moves.text, value=moves)
        place = GaugeMetricFamily(self._place.name, self._place.text)
        place.add_metric([], -1 if client is None else client.place)
        yield place
