"""What the scheduler's and the workers' sides of the connector tell each other about loads, as plain picklable values.

No vLLM, no NIXL: the vLLM metadata objects that carry these are made in `vllm_metadata.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlease.connector.borrower import ComputeReason
from kvlease.connector.seal import Proof
from kvlease.registry.values import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """To a worker, beside the READ's metadata: prove this load by these seals."""

    incarnation: Incarnation
    """Of the lender: what the worker knows of an earlier one must not be used."""
    proofs: tuple[Proof, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """From a worker: a load is over."""

    request_id: str
    rank: int
    reason: ComputeReason | None
    late: bool
    read_us: int
    prove_us: int
    bytes_read: int

    def merged(self, other: LoadReport) -> LoadReport:
        """What two ranks say together: failed if one failed, as slow as the slower, bytes of both."""
        return LoadReport(
            request_id=self.request_id,
            rank=self.rank,
            reason=self.reason or other.reason,
            late=self.late or other.late,
            read_us=max(self.read_us, other.read_us),
            prove_us=max(self.prove_us, other.prove_us),
            bytes_read=self.bytes_read + other.bytes_read,
        )


@dataclass(slots=True)
class WorkerReports:
    """What workers report in one step."""

    loads: list[LoadReport] = field(default_factory=list)
    landed_late: list[tuple[str, int]] = field(default_factory=list)
    """(request id, rank) of late READs that can write no more."""
    reads: list[str] = field(default_factory=list)
    """Ids of this lender's leases that borrowers have read, as rank 0 was told."""
