"""What the callers of one tenant may take of a count that all callers share: a quarter, where identity is on.

Else one tenant could open every stream that a registry allows, and all others would be refused theirs.
A tenant's callers count together, however many credentials it was given. Those that serve every tenant have no share:
whoever could take their streams from others has all tenants' leases already.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvlease.registry.errors import LimitReached
from kvlease.registry.identity import Tenants

SHARES: Final = 4
"""Three tenants that use up theirs leave room for a fourth."""


class TenantShares:
    """The places that callers have taken of one limit, by the tenants that they act for."""

    def __init__(self, name: str, limit: int) -> None:
        """`name` of the limit for everybody together, as it is set."""
        self._name: Final = name
        self._share: Final = max(1, limit // SHARES)
        self._taken: Final[Counter[Tenants]] = Counter()

    def take(self, tenants: Tenants) -> None:
        """One place more; `give_back` follows. Raises LimitReached if all of the share is taken."""
        if tenants.every:
            return
        if self._taken[tenants] >= self._share:
            limit = f"{self._name}_per_tenant"
            raise LimitReached(f"too many for one tenant: a quarter of {self._name} is {self._share}", limit=limit)
        self._taken[tenants] += 1

    def give_back(self, tenants: Tenants) -> None:
        if tenants.every:
            return
        self._taken[tenants] -= 1
        if not self._taken[tenants]:
            del self._taken[tenants]
