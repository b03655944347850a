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
REGISTRY_STALENESS: Final = Metric(
    name="kvlease_registry_staleness_seconds",
    text="At most so old is what this replica knows of a shared store; 0 with the memory store",
)
REGISTRY_WATCHERS: Final = Metric(name="kvlease_registry_watchers", text="Open watches")
REGISTRY_ERRORS: Final = Metric(
    name="kvlease_registry_errors_total", text="Calls ended by an error", labels=("rpc", "reason")
)
REGISTRY_RPC_SECONDS: Final = Metric(
    name="kvlease_registry_rpc_seconds", text="Time in the registry, by rpc", labels=("rpc",)
)

# Connector: lenders
LENDER_PUBLISHES: Final = Metric(name="kvlease_lender_publishes_total", text="Finished turns lent")
LENDER_NOT_LENT: Final = Metric(
    name="kvlease_lender_turns_not_lent_total", text="Finished turns not lent, by reason", labels=("reason",)
)
LENDER_ENDS: Final = Metric(
    name="kvlease_lender_ends_total", text="Leases of this engine ended, by reason", labels=("reason",)
)
LENDER_LEASES: Final = Metric(
    name="kvlease_lender_leases", text="Leases held on this engine, by state", labels=("state",)
)
LENDER_LEASED_BLOCKS: Final = Metric(
    name="kvlease_lender_leased_blocks", text="Blocks of this engine that live leases hold"
)
LENDER_LEASED_BYTES: Final = Metric(
    name="kvlease_lender_leased_bytes", text="KV bytes of this engine that live leases hold"
)

# Connector: borrowers
BORROWER_BORROWS: Final = Metric(name="kvlease_borrower_borrows_total", text="Prompts that used a lease")
BORROWER_MISSES: Final = Metric(
    name="kvlease_borrower_misses_total",
    text="Prompts that might have used a lease and were computed, by reason",
    labels=("reason",),
)
BORROWER_REUSED_TOKENS: Final = Metric(
    name="kvlease_borrower_reused_tokens_total", text="Tokens borrowed and proven, not computed"
)
BORROWER_READ_BYTES: Final = Metric(name="kvlease_borrower_read_bytes_total", text="KV bytes read from lenders")
BORROWER_READ_SECONDS: Final = Metric(
    name="kvlease_borrower_read_seconds", text="From the offer of a READ to its last block"
)
BORROWER_PROVE_SECONDS: Final = Metric(
    name="kvlease_borrower_prove_seconds", text="From the last block to the verdict of the seals"
)
BORROWER_FAILED_READS: Final = Metric(name="kvlease_borrower_failed_reads_total", text="READs that NIXL gave up")
BORROWER_UNPROVEN_READS: Final = Metric(
    name="kvlease_borrower_unproven_reads_total",
    text="READs discarded because their seals did not prove them, by reason",
    labels=("reason",),
)
BORROWER_LATE_READS: Final = Metric(name="kvlease_borrower_late_reads_total", text="READs past the read limit")
BORROWER_QUARANTINED_BLOCKS: Final = Metric(
    name="kvlease_borrower_quarantined_blocks", text="Blocks kept aside until a late READ has landed"
)

# Connector: both
CONNECTOR_FAULTS: Final = Metric(
    name="kvlease_connector_faults_total",
    text="Errors inside the connector that cost a lease or a borrow; see the log",
    labels=("hook",),
)
CONNECTOR_REGISTRY_MOVES: Final = Metric(
    name="kvlease_connector_registry_moves_total", text="Times another replica of the registry was taken into use"
)
CONNECTOR_REGISTRY_PLACE: Final = Metric(
    name="kvlease_connector_registry_replica",
    text="Replica in use, by its place in the list of endpoints, from 0; -1: none",
)

# Router
ROUTER_TURNS: Final = Metric(name="kvlease_router_turns_total", text="Turns, by outcome", labels=("outcome",))
ROUTER_LOCATES: Final = Metric(
    name="kvlease_router_locates_total",
    text="Locates of this router, by outcome and by who answered (copy or registry)",
    labels=("outcome", "by"),
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
ROUTER_NAMINGS: Final = Metric(
    name="kvlease_router_namings_total", text="Continuations named in the registry, by outcome", labels=("outcome",)
)
ROUTER_RENEWALS: Final = Metric(
    name="kvlease_router_renewals_total", text="Renewals this router asked for, by answer", labels=("status",)
)
ROUTER_RELEASES: Final = Metric(
    name="kvlease_router_released_prefills_total",
    text="Prefills given back because the client left before decoding, or the decode engine refused the turn",
)
ROUTER_ENGINE_UP: Final = Metric(
    name="kvlease_router_engine_up", text="1 if the last health probe succeeded", labels=("target", "role")
)
ROUTER_ENGINE_LENDS: Final = Metric(
    name="kvlease_router_engine_lends",
    text="1 if the registry knows the decode engine as a lender; absent while the registry does not answer",
    labels=("target",),
)
ROUTER_REGISTRY_MOVES: Final = Metric(
    name="kvlease_router_registry_moves_total", text="Times another replica of the registry was taken into use"
)
ROUTER_REGISTRY_PLACE: Final = Metric(
    name="kvlease_router_registry_replica",
    text="Replica in use, by its place in the list of endpoints, from 0; -1: none",
)
ROUTER_COPY_LEASES: Final = Metric(name="kvlease_router_copy_leases", text="Leases in this router's copy")
ROUTER_COPY_STALENESS: Final = Metric(
    name="kvlease_router_copy_staleness_seconds",
    text="Since the copy of the leases was last known to be all; absent until it first was",
)
ROUTER_COPY_LISTS: Final = Metric(
    name="kvlease_router_copy_lists_total", text="Times the copy of the leases was listed anew"
)
ROUTER_COPY_EVENTS: Final = Metric(
    name="kvlease_router_copy_events_total", text="Lease events applied to the copy of the leases"
)
