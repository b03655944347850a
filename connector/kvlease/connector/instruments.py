"""The connector's metrics, and their endpoint. Named as registry/kvlease/registry/metrics.py's rules say.

Instruments are incremented from the engine's thread: each costs about a microsecond, none takes part in a decision.
"""

from __future__ import annotations

from typing import Final

from kvlease.registry.metrics import Metric
from prometheus_client import CollectorRegistry

LOANS: Final = Metric(name="kvlease_connector_leases_published_total", text="Finished turns lent")
NOT_LENT: Final = Metric(
    name="kvlease_connector_turns_not_lent_total", text="Finished turns not lent, by reason", labels=("reason",)
)
ENDS: Final = Metric(
    name="kvlease_connector_leases_ended_total", text="Leases ended on this lender, by reason", labels=("reason",)
)
HELD: Final = Metric(name="kvlease_connector_leases", text="Leases held now, by state", labels=("state",))
PINNED: Final = Metric(name="kvlease_connector_leased_blocks", text="References that live leases hold on blocks")
PINNED_BYTES: Final = Metric(name="kvlease_connector_leased_bytes", text="KV bytes that live leases hold")
BORROWS: Final = Metric(name="kvlease_connector_borrows_total", text="Prompts that used a lease")
COMPUTED: Final = Metric(
    name="kvlease_connector_misses_total", text="Prompts that might have used a lease, by reason", labels=("reason",)
)
REUSED_TOKENS: Final = Metric(name="kvlease_connector_reused_tokens_total", text="Tokens not computed again")
READ_BYTES: Final = Metric(name="kvlease_connector_read_bytes_total", text="KV bytes read from lenders")
READ_SECONDS: Final = Metric(name="kvlease_connector_read_seconds", text="From the offer of a READ to its last block")
PROVE_SECONDS: Final = Metric(name="kvlease_connector_prove_seconds", text="From the last block to the seals' verdict")
READS_FAILED: Final = Metric(name="kvlease_connector_reads_failed_total", text="READs that NIXL gave up")
READS_REFUSED: Final = Metric(
    name="kvlease_connector_reads_refused_total", text="READs whose seals did not prove them", labels=("reason",)
)
READS_LATE: Final = Metric(name="kvlease_connector_reads_late_total", text="READs past their limit")
QUARANTINED: Final = Metric(name="kvlease_connector_quarantined_blocks", text="Local blocks kept for late READs")
FAULTS: Final = Metric(
    name="kvlease_connector_faults_total",
    text="Errors inside the connector that cost a lease or a borrow; see the log",
    labels=("hook",),
)


class Instruments:
    """All metrics of one engine, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.loans = LOANS.counter(self.registry)
        self.not_lent = NOT_LENT.counter(self.registry)
        self.ends = ENDS.counter(self.registry)
        self.held = HELD.gauge(self.registry)
        self.pinned = PINNED.gauge(self.registry)
        self.pinned_bytes = PINNED_BYTES.gauge(self.registry)
        self.borrows = BORROWS.counter(self.registry)
        self.computed = COMPUTED.counter(self.registry)
        self.reused_tokens = REUSED_TOKENS.counter(self.registry)
        self.read_bytes = READ_BYTES.counter(self.registry)
        self.read_seconds = READ_SECONDS.histogram(self.registry)
        self.prove_seconds = PROVE_SECONDS.histogram(self.registry)
        self.reads_failed = READS_FAILED.counter(self.registry)
        self.reads_refused = READS_REFUSED.counter(self.registry)
        self.reads_late = READS_LATE.counter(self.registry)
        self.quarantined = QUARANTINED.gauge(self.registry)
        self.faults = FAULTS.counter(self.registry)
