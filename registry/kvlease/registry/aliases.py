"""Further names of conversations: a router's hash of a message prefix -> the conversation it belongs to.

Pure; time is a parameter. A wrong or forgotten alias costs reuse and never correctness, because digests decide what
is read; so this is a cache: bounded per tenant, and what would be forgotten first goes when it is full.
Invariant: `_expiry` of a tenant holds exactly one entry per alias.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvlease.registry.errors import LimitReached
from kvlease.registry.values import Alias, ConversationId, TenantId
from sortedcontainers import SortedList


class _Names:
    """One tenant's aliases."""

    __slots__ = ("expiry", "named")

    def __init__(self) -> None:
        self.named: dict[Alias, tuple[ConversationId, int]] = {}
        self.expiry: SortedList[tuple[int, Alias]] = SortedList()

    def forget(self, alias: Alias) -> None:
        _, expires_ms = self.named.pop(alias)
        self.expiry.remove((expires_ms, alias))


class Aliases:
    """All tenants' aliases, at most `max_per_tenant` each, of at most `max_tenants` tenants."""

    def __init__(self, *, max_per_tenant: int, max_tenants: int) -> None:
        self._max_per_tenant = max_per_tenant
        self._max_tenants = max_tenants
        self._tenants: dict[TenantId, _Names] = {}

    def __len__(self) -> int:
        return sum(len(names.named) for names in self._tenants.values())

    def name(
        self, tenant: TenantId, conversation: ConversationId, aliases: Iterable[Alias], *, expires_ms: int
    ) -> None:
        """The newest naming of an alias wins, and so does its expiry.

        Raises LimitReached if it would take one tenant too many.
        """
        names = self._tenants.get(tenant)
        if names is None:
            if len(self._tenants) >= self._max_tenants:
                raise LimitReached("too many tenants name conversations", limit="max_tenants")
            names = self._tenants[tenant] = _Names()
        for alias in aliases:
            if alias in names.named:
                names.forget(alias)
            elif len(names.named) >= self._max_per_tenant:
                names.forget(names.expiry[0][1])
            names.named[alias] = (conversation, expires_ms)
            names.expiry.add((expires_ms, alias))

    def find(self, tenant: TenantId, aliases: Sequence[Alias], now_ms: int) -> ConversationId | None:
        """The conversation of the first alias that is known and not expired."""
        names = self._tenants.get(tenant)
        if names is None:
            return None
        for alias in aliases:
            known = names.named.get(alias)
            if known is not None and known[1] > now_ms:
                return known[0]
        return None

    def expire(self, now_ms: int, limit: int) -> int:
        """Forget at most `limit` expired aliases; how many it was."""
        forgotten = 0
        for tenant, names in list(self._tenants.items()):
            while forgotten < limit and names.expiry and names.expiry[0][0] <= now_ms:
                names.forget(names.expiry[0][1])
                forgotten += 1
            if not names.named:
                del self._tenants[tenant]
        return forgotten

    def check(self) -> None:
        """Raises AssertionError if the two indexes disagree."""
        for tenant, names in self._tenants.items():
            expected = sorted((expires_ms, alias) for alias, (_, expires_ms) in names.named.items())
            assert list(names.expiry) == expected, f"alias expiry of {tenant}"
            assert 0 < len(names.named) <= self._max_per_tenant, f"alias count of {tenant}"
