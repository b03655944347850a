"""Names of all metrics of kvlease, with their help and labels: the one place where a metric is named.

No counting here: each part builds its instruments from these on a CollectorRegistry of its own.
Rules: names start with `kvlease_`, then the part; the unit is in the name; nouns are those of DESIGN.md, section 2.
Label values come from closed lists or are engine and tenant ids; never conversation, lease or request ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_SECONDS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Buckets for everything from a resolve to a READ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric's name, help and labels. One method per kind builds the instrument."""

    name: str
    text: str
    labels: tuple[str, ...] = ()

    def counter(self, registry: CollectorRegistry) -> Counter:
        return Counter(self.name, self.text, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self.name, self.text, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry, buckets: Sequence[float] = LATENCY_SECONDS) -> Histogram:
        return Histogram(self.name, self.text, self.labels, buckets=buckets, registry=registry)


# Registry
REGISTRY_LEASES: Final = Metric(
    name="kvlease_registry_leases", text="Leases now, by state", labels=("state", "engine", "tenant")
)
REGISTRY_LEASED_BLOCKS: Final = Metric(
    name="kvlease_registry_leased_blocks", text="Blocks that live leases pin", labels=("engine", "tenant")
)
REGISTRY_LEASED_BYTES: Final = Metric(
    name="kvlease_registry_leased_bytes", text="KV bytes that live leases pin", labels=("engine", "tenant")
)
REGISTRY_PUBLISHES: Final = Metric(
    name="kvlease_registry_publishes_total", text="Published leases, by answer", labels=("status",)
)
REGISTRY_RESOLVES: Final = Metric(
    name="kvlease_registry_resolves_total", text="Resolves, by outcome (hit or miss)", labels=("outcome",)
)
REGISTRY_LOCATES: Final = Metric(
    name="kvlease_registry_locates_total", text="Locates, by outcome (hit or miss)", labels=("outcome",)
)
REGISTRY_MISSES: Final = Metric(
    name="kvlease_registry_misses_total", text="Misses of resolve and locate, by reason", labels=("reason",)
)
REGISTRY_RENEWALS: Final = Metric(
    name="kvlease_registry_renewals_total", text="Renewals asked for, by answer", labels=("status",)
)
REGISTRY_ENDS: Final = Metric(name="kvlease_registry_ends_total", text="Leases ended, by reason", labels=("reason",))
REGISTRY_SESSIONS: Final = Metric(name="kvlease_registry_sessions", text="Open sessions of lenders")
REGISTRY_SUSPECTS: Final = Metric(name="kvlease_registry_suspect_engines", text="Lenders that are silent now")
REGISTRY_WATCHERS: Final = Metric(name="kvlease_registry_watchers", text="Open watches")
REGISTRY_ERRORS: Final = Metric(
    name="kvlease_registry_errors_total", text="Calls ended by an error", labels=("rpc", "reason")
)
REGISTRY_RPC_SECONDS: Final = Metric(
    name="kvlease_registry_rpc_seconds", text="Time in the registry, by rpc", labels=("rpc",)
)

# Connector, lending side
LENDER_LEASES: Final = Metric(
    name="kvlease_lender_leases", text="Leases held on this engine, by state", labels=("state",)
)
LENDER_LEASED_BLOCKS: Final = Metric(
    name="kvlease_lender_leased_blocks", text="Blocks of this engine that live leases pin"
)
LENDER_LEASED_BYTES: Final = Metric(
    name="kvlease_lender_leased_bytes", text="KV bytes of this engine that live leases pin"
)
LENDER_OLDEST_SECONDS: Final = Metric(
    name="kvlease_lender_oldest_lease_seconds", text="Age of the oldest lease on this engine"
)
LENDER_PUBLISHES: Final = Metric(
    name="kvlease_lender_publishes_total", text="Leases published by this engine, by answer", labels=("status",)
)
LENDER_ENDS: Final = Metric(
    name="kvlease_lender_ends_total", text="Leases of this engine ended, by reason", labels=("reason",)
)
LENDER_EXPIRIES: Final = Metric(
    name="kvlease_lender_expiries_total", text="Leases of this engine whose deadline passed unrenewed"
)
LENDER_CONNECTED: Final = Metric(
    name="kvlease_lender_session_connected", text="1 while the session with the registry is open"
)
LENDER_RECONNECTS: Final = Metric(
    name="kvlease_lender_reconnects_total", text="Sessions opened after the first", labels=()
)

# Connector, borrowing side
BORROWER_RESOLVES: Final = Metric(
    name="kvlease_borrower_resolves_total", text="Resolves of this engine, by outcome", labels=("outcome",)
)
BORROWER_MISSES: Final = Metric(
    name="kvlease_borrower_misses_total", text="Turns that borrowed nothing, by reason", labels=("reason",)
)
BORROWER_REUSED_TOKENS: Final = Metric(
    name="kvlease_borrower_reused_tokens_total", text="Tokens borrowed and proven, not computed"
)
BORROWER_READ_BYTES: Final = Metric(name="kvlease_borrower_read_bytes_total", text="KV bytes read from lenders")
BORROWER_FAILED_READS: Final = Metric(
    name="kvlease_borrower_failed_reads_total", text="READs that did not end well, by reason", labels=("reason",)
)
BORROWER_LATE_READS: Final = Metric(
    name="kvlease_borrower_late_reads_total", text="READs that landed after the read limit"
)
BORROWER_UNPROVEN_READS: Final = Metric(
    name="kvlease_borrower_unproven_reads_total", text="READs discarded because the seal was not whole"
)
BORROWER_QUARANTINED_BLOCKS: Final = Metric(
    name="kvlease_borrower_quarantined_blocks", text="Blocks kept aside until a late READ has landed"
)
BORROWER_RESOLVE_SECONDS: Final = Metric(name="kvlease_borrower_resolve_seconds", text="Wait for a resolve")
BORROWER_READ_SECONDS: Final = Metric(name="kvlease_borrower_read_seconds", text="From READ posted to proven")

# Router
ROUTER_TURNS: Final = Metric(name="kvlease_router_turns_total", text="Turns, by outcome", labels=("outcome",))
ROUTER_LOCATES: Final = Metric(
    name="kvlease_router_locates_total", text="Locates of this router, by outcome", labels=("outcome",)
)
ROUTER_MISSES: Final = Metric(
    name="kvlease_router_misses_total", text="Locates that found nothing, by reason", labels=("reason",)
)
ROUTER_FIRST_BYTE_SECONDS: Final = Metric(
    name="kvlease_router_first_byte_seconds", text="From request to the first byte of the answer"
)
ROUTER_STRIPPED: Final = Metric(
    name="kvlease_router_stripped_params_total", text="Requests whose kv_transfer_params were removed"
)
ROUTER_FALLBACKS: Final = Metric(
    name="kvlease_router_fallbacks_total", text="Turns that left the planned way, by reason", labels=("reason",)
)
ROUTER_OUTSTANDING: Final = Metric(
    name="kvlease_router_outstanding_requests", text="Requests under way, by target", labels=("target", "role")
)
