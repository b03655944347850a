"""Lease ids as people give them: whole, or only as much of the beginning as no other lease shares.

An id is first taken as it is; only what a registry does not know is looked for among the leases that can be resolved.
Invariant: a command acts on a lease that was named in full, or on the only one that can be meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvlease.registry.client import RegistryClient
from kvlease.registry.errors import InvalidRequest, PermissionDenied
from kvlease.registry.values import LeaseFilter, LeaseId, LeaseView, TenantId

LEAST_CHARS: Final = 4
"""Of a beginning: fewer name a lease by accident."""
_SHOWN: Final = 10


class Ambiguous(InvalidRequest):
    """Several leases begin like this; the message lists them."""


async def begun_by(client: RegistryClient, tenant: TenantId, beginning: str, *, timeout_ms: int) -> LeaseId | None:
    """The tenant's only lease whose id begins like this; None if there is none, or the caller may not list them.

    Raises Ambiguous.
    """
    if len(beginning) < LEAST_CHARS:
        return None
    try:
        found = await client.list_leases(LeaseFilter(tenant=tenant), timeout_ms=timeout_ms)
    except PermissionDenied:
        return None
    matching = starting(found.leases, beginning)
    if len(matching) > 1:
        raise Ambiguous(_ambiguous(beginning, matching), field="lease_id")
    return matching[0].lease_id if matching else None


def starting(leases: Iterable[LeaseView], beginning: str) -> list[LeaseView]:
    """Those whose id begins like this, in the order of their ids."""
    return sorted((x for x in leases if x.lease_id.startswith(beginning)), key=lambda x: x.lease_id)


def _ambiguous(beginning: str, leases: list[LeaseView]) -> str:
    shown = [f"  {x.lease_id}  conversation {x.conversation or '-'}, on {x.engine_id}" for x in leases[:_SHOWN]]
    if len(leases) > _SHOWN:
        shown.append(f"  and {len(leases) - _SHOWN} more")
    return "\n".join((f"{len(leases)} leases begin with {beginning}; give more of one of these:", *shown))
