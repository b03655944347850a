"""Which leases ended lately, and why: so that a late publish or resolve of one is told.

Pure. A bounded memory, oldest first out; forgetting an end makes an answer less exact (UNKNOWN instead of ENDED)
and nothing worse, because lease ids are random and lenders do not use one twice.
"""

from __future__ import annotations

from collections import OrderedDict

from kvlease.registry.values import EndReason, LeaseId, TenantId


class EndedLeases:
    """Lease id -> (tenant, reason), for the `limit` most recent ends."""

    __slots__ = ("_ended", "_limit")

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._ended: OrderedDict[LeaseId, tuple[TenantId, EndReason]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self._ended

    def remember(self, lease_id: LeaseId, tenant: TenantId, reason: EndReason) -> None:
        """The first reason stays: an end is for good."""
        if lease_id in self._ended:
            return
        if len(self._ended) >= self._limit:
            self._ended.popitem(last=False)
        self._ended[lease_id] = (tenant, reason)

    def forget(self, lease_id: LeaseId) -> None:
        """The lease turned out to be held after all. Unknown ids are no error."""
        self._ended.pop(lease_id, None)

    def reason(self, lease_id: LeaseId) -> EndReason | None:
        """Why the lease ended, whoever's it was: for lenders, who know the id."""
        known = self._ended.get(lease_id)
        return None if known is None else known[1]

    def reason_for(self, lease_id: LeaseId, tenant: TenantId) -> EndReason | None:
        """Why the tenant's lease ended; None for another tenant's, which must look like any unknown id."""
        known = self._ended.get(lease_id)
        return known[1] if known is not None and known[0] == tenant else None
