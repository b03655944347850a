"""The metadata objects that carry kvlease's orders and reports inside vLLM's own.

vLLM's types stop here: what is carried is plain values of `loads.py`. Both directions survive pickling to and from
worker processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlease.connector.loads import LoadOrder, WorkerReports
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

_ORDERS = "kvlease_orders"
_REFUSED = "kvlease_refused"


@dataclass
class ReportsFromWorkers(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not typed here
    """What all ranks reported in one step."""

    reports: WorkerReports = field(default_factory=WorkerReports)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportsFromWorkers:
        if isinstance(other, ReportsFromWorkers):
            self.reports.loads += other.reports.loads
            self.reports.landed_late += other.reports.landed_late
            self.reports.reads += other.reports.reads
        return self


@dataclass
class SealedHandshake(NixlHandshakePayload):  # type: ignore[misc]  # vLLM is not typed here
    """A worker's handshake payload on its way to its own scheduler, with the place of its seal table."""

    seal_table: str = ""

    def plain(self) -> NixlHandshakePayload:
        """What goes over the side channel: exactly the engine's own payload."""
        return NixlHandshakePayload(
            compatibility_hash=self.compatibility_hash, agent_metadata_bytes=self.agent_metadata_bytes
        )


def attach_orders(metadata: KVConnectorMetadata, orders: dict[str, LoadOrder]) -> None:
    """Sends load orders along with a step's metadata."""
    setattr(metadata, _ORDERS, orders)


def attached_orders(metadata: KVConnectorMetadata) -> dict[str, LoadOrder]:
    orders = getattr(metadata, _ORDERS, None)
    return orders if orders is not None else {}


def attach_refused(metadata: KVConnectorMetadata, request_ids: list[str]) -> None:
    """Sends along which promised loads nothing was ordered for: workers report them as failed."""
    setattr(metadata, _REFUSED, request_ids)


def attached_refused(metadata: KVConnectorMetadata) -> list[str]:
    refused = getattr(metadata, _REFUSED, None)
    return refused if refused is not None else []
