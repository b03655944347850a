"""The connector's metrics, and their endpoint. Their names are in the registry's metrics.py, with all others.

Instruments are incremented from the engine's thread: each costs about a microsecond, none takes part in a decision.
"""

from __future__ import annotations

from collections.abc import Callable

from kvlease.registry import metrics
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_metrics import ClientCollector
from prometheus_client import CollectorRegistry


class Instruments:
    """All metrics of one engine, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.loans = metrics.LENDER_PUBLISHES.counter(self.registry)
        self.not_lent = metrics.LENDER_NOT_LENT.counter(self.registry)
        self.ends = metrics.LENDER_ENDS.counter(self.registry)
        self.held = metrics.LENDER_LEASES.gauge(self.registry)
        self.pinned = metrics.LENDER_LEASED_BLOCKS.gauge(self.registry)
        self.pinned_bytes = metrics.LENDER_LEASED_BYTES.gauge(self.registry)
        self.borrows = metrics.BORROWER_BORROWS.counter(self.registry)
        self.computed = metrics.BORROWER_MISSES.counter(self.registry)
        self.reused_tokens = metrics.BORROWER_REUSED_TOKENS.counter(self.registry)
        self.read_bytes = metrics.BORROWER_READ_BYTES.counter(self.registry)
        self.read_seconds = metrics.BORROWER_READ_SECONDS.histogram(self.registry)
        self.prove_seconds = metrics.BORROWER_PROVE_SECONDS.histogram(self.registry)
        self.reads_failed = metrics.BORROWER_FAILED_READS.counter(self.registry)
        self.reads_refused = metrics.BORROWER_UNPROVEN_READS.counter(self.registry)
        self.reads_late = metrics.BORROWER_LATE_READS.counter(self.registry)
        self.quarantined = metrics.BORROWER_QUARANTINED_BLOCKS.gauge(self.registry)
        self.faults = metrics.CONNECTOR_FAULTS.counter(self.registry)

    def follow(self, client: Callable[[], RegistryClient | None]) -> None:
        """Show which replica of the registry this client uses. Called once."""
        moves, place = metrics.CONNECTOR_REGISTRY_MOVES, metrics.CONNECTOR_REGISTRY_PLACE
        self.registry.register(ClientCollector(client, moves=moves, place=place))
