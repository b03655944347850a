"""The registry's metrics: wrappers around the service, the store and the calls that count, and the gauges of leases.

No decisions. Everything is named in `metrics.py`. Gauges are computed on the event loop and only read by the thread
that serves them.
Invariant: every miss is counted with its reason; an operation that failed is not counted as done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from kvlease.registry import metrics
from kvlease.registry.errors import Reason
from kvlease.registry.service import RegistryService, WrappedService
from kvlease.registry.shell import RegistryShell
from kvlease.registry.store import Followed, Store
from kvlease.registry.table_changes import EngineBeat, LeaseGone, SessionId, StoreChange
from kvlease.registry.table_search import Found
from kvlease.registry.values import (
    Alias,
    ConversationId,
    EndReason,
    EngineId,
    Incarnation,
    LeaseId,
    Located,
    Miss,
    MissReason,
    Publication,
    PublishResult,
    PublishStatus,
    RenewResult,
    RenewStatus,
    ResolveQuery,
    TenantId,
)
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ReadCounts(Collector):
    """Resolves, locates and their misses, as plain numbers: a resolve must not pay for a lock.

    Written on the event loop only; the thread that serves metrics reads each number as it happens to be.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.resolve_hits = 0
        self.resolve_misses = 0
        self.locate_hits = 0
        self.locate_misses = 0
        self.misses: Final = dict.fromkeys(MissReason, 0)
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Every series is there from the start."""
        counted = (
            (metrics.REGISTRY_RESOLVES, {"hit": self.resolve_hits, "miss": self.resolve_misses}),
            (metrics.REGISTRY_LOCATES, {"hit": self.locate_hits, "miss": self.locate_misses}),
            (metrics.REGISTRY_MISSES, self.misses),
        )
        for metric, values in counted:
            family = CounterMetricFamily(metric.name, metric.text, labels=metric.labels)
            for label, value in values.items():
                family.add_metric((str(label),), value)
            yield family


class CountingService(WrappedService):
    """Counts what was answered."""

    def __init__(self, inner: RegistryService, registry: CollectorRegistry) -> None:
        super().__init__(inner)
        self._reads: Final = ReadCounts(registry)
        publishes, renewals = metrics.REGISTRY_PUBLISHES.counter(registry), metrics.REGISTRY_RENEWALS.counter(registry)
        # Children are made at once: every series is there from the start, and counting is one call.
        self._publishes = {status: publishes.labels(status.value) for status in PublishStatus}
        self._renewals = {status: renewals.labels(status.value) for status in RenewStatus}

    def resolve(self, queries: Sequence[ResolveQuery]) -> list[Found | Miss]:
        answers = self.inner.resolve(queries)
        missed = [answer.reason for answer in answers if isinstance(answer, Miss)]
        self._reads.resolve_hits += len(answers) - len(missed)
        self._reads.resolve_misses += len(missed)
        for reason in missed:
            self._reads.misses[reason] += 1
        return answers

    def locate(self, tenant: TenantId, conversation: ConversationId | None, aliases: Sequence[Alias]) -> Located:
        located = self.inner.locate(tenant, conversation, aliases)
        if located.reason is None:
            self._reads.locate_hits += 1
        else:
            self._reads.locate_misses += 1
            self._reads.misses[located.reason] += 1
        return located

    async def publish(
        self, engine_id: EngineId, incarnation: Incarnation, publications: Sequence[Publication]
    ) -> list[PublishResult]:
        return self._count(await self.inner.publish(engine_id, incarnation, publications))

    async def publish_in(self, session: SessionId, publications: Sequence[Publication]) -> list[PublishResult]:
        return self._count(await self.inner.publish_in(session, publications))

    async def snapshot(
        self, session: SessionId, publications: Sequence[Publication], *, last: bool
    ) -> list[PublishResult]:
        return self._count(await self.inner.snapshot(session, publications, last=last))

    async def renew(self, tenant: TenantId, lease_id: LeaseId, ttl_ms: int) -> RenewResult:
        result = await self.inner.renew(tenant, lease_id, ttl_ms)
        self._renewals[result.status].inc()
        return result

    def shed(self, resolves: int) -> None:
        """So many resolves were answered `overloaded` without being looked at."""
        self._reads.resolve_misses += resolves
        self._reads.misses[MissReason.OVERLOADED] += resolves

    def _count(self, results: list[PublishResult]) -> list[PublishResult]:
        for result in results:
            self._publishes[result.status].inc()
        return results


class CountingStore:
    """Counts ends by reason, whoever brought them about, once they are stored."""

    def __init__(self, inner: Store, registry: CollectorRegistry) -> None:
        self._inner: Final = inner
        ends = metrics.REGISTRY_ENDS.counter(registry)
        self._ends = {reason: ends.labels(reason.value) for reason in EndReason}

    @property
    def shared(self) -> bool:
        return self._inner.shared

    async def commit(self, changes: Sequence[StoreChange]) -> None:
        await self._inner.commit(changes)
        for change in changes:
            if isinstance(change, LeaseGone):
                self._ends[change.reason].inc()

    async def beat(self, number: int, beats: Sequence[EngineBeat]) -> None:
        await self._inner.beat(number, beats)

    def follow(self) -> AbstractAsyncContextManager[Followed]:
        return self._inner.follow()


class CallMetrics:
    """A `CallObserver`: unary calls by duration, all calls by the error that ended them."""

    _STREAMS: Final = frozenset({"Session", "ResolveStream", "Watch"})

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = metrics.REGISTRY_RPC_SECONDS.histogram(registry)
        self._observe: dict[str, Callable[[float], None]] = {}
        self._errors = metrics.REGISTRY_ERRORS.counter(registry)

    def finished(self, rpc: str, seconds: float, reason: Reason | None) -> None:
        if rpc not in self._STREAMS:
            observe = self._observe.get(rpc)
            if observe is None:  # a child is looked up under a lock: once for each rpc is enough
                observe = self._observe[rpc] = self._seconds.labels(rpc).observe
            observe(seconds)
        if reason is not None:
            self._errors.labels(rpc, reason.value).inc()


class LeaseGauges(Collector):
    """How things stand, as of the last `refresh`."""

    def __init__(self, shell: RegistryShell, registry: CollectorRegistry) -> None:
        self._shell: Final = shell
        self._families: tuple[Metric, ...] = ()
        self.refresh()
        registry.register(self)

    def refresh(self) -> None:
        """On the event loop: O(engines x tenants), not O(leases)."""
        leases, blocks, size = (
            _family(metric)
            for metric in (metrics.REGISTRY_LEASES, metrics.REGISTRY_LEASED_BLOCKS, metrics.REGISTRY_LEASED_BYTES)
        )
        for engine_id, tenant, tally in self._shell.tallies():
            leases.add_metric(("live", engine_id, tenant), tally.live)
            leases.add_metric(("lapsed", engine_id, tenant), tally.lapsed)
            blocks.add_metric((engine_id, tenant), tally.live_blocks)
            size.add_metric((engine_id, tenant), tally.live_bytes)
        plain = (
            (metrics.REGISTRY_SESSIONS, self._shell.sessions),
            (metrics.REGISTRY_WATCHERS, self._shell.watchers),
            (metrics.REGISTRY_SUSPECTS, self._shell.suspects),
            (metrics.REGISTRY_STALENESS, _seconds(self._shell.staleness_ms)),
        )
        families: list[Metric] = [leases, blocks, size]
        for metric, value in plain:
            family = _family(metric)
            family.add_metric((), value)
            families.append(family)
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        """On the thread that serves metrics."""
        return self._families


def _seconds(staleness_ms: int | None) -> float:
    return math.inf if staleness_ms is None else staleness_ms / 1000


def _family(metric: metrics.Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.text, labels=metric.labels)
