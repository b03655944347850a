"""The lease table's limits and times, each with its unit and the reason for its default.

Pure values. Exceeding a count is a typed refusal (QUOTA for a lease, LimitReached for an engine) or, for caches
that only save work (aliases, remembered ends), the oldest entry going. Nothing here grows without bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SCAN_LIMIT: Final = 128
"""Leases one prefix search looks at. Only leases that may not be answered (silent lender, other fingerprint) or
that tie are scanned past, so the limit is met only when more than this many share exactly the best prefix."""

TICK_WORK: Final = 32
"""Leases one `tick` touches at most: some 20 us each, so resolves wait for less than 1 ms while very many expire."""

HEARTBEAT_WINDOW: Final = 32
"""Heartbeats over which the lender's present is the maximum: one late heartbeat must not set its clock back."""

ALIAS_SWEEP_MS: Final = 10_000
"""How often expired aliases are dropped. Reads look at the expiry themselves, so this only gives memory back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLimits:
    """What one registry holds at most, and after how long it gives up on a lender."""

    suspect_after_ms: int = 10_000
    """Silence after which a lender's leases are not resolved. Ten heartbeats: shorter would flap on a busy host."""
    session_ttl_ms: int = 60_000
    """Silence after which a lender is lost and its leases end."""
    home_silent_ms: int = 3_000
    """Silence of the replica that had an engine's session after which the engine counts as disconnected."""
    renewal_wait_ms: int = 1_000
    """How long a lender has to answer a renewal."""
    max_engines: int = 4_096
    """Engines with a session. A fleet is tens to hundreds; a loop that invents ids is stopped here."""
    max_leases_per_engine: int = 262_144
    """More than the blocks of any one engine at 64 tokens each."""
    max_tenants: int = 16_384
    """Tenants with leases, and tenants with aliases."""
    max_leases_per_tenant: int = 1_000_000
    """The whole table by default; set lower where tenants share a fleet."""
    max_blocks_per_tenant: int = 0
    """Blocks pinned for one tenant, all engines together; 0: no limit."""
    max_branches: int = 8
    """Leases side by side in one conversation: edited histories, regenerations, n > 1."""
    max_aliases_per_tenant: int = 262_144
    """Names of conversations. When full, the one that would be forgotten first goes."""
    default_alias_ttl_ms: int = 3_600_000
    """One hour: longer than any lease is useful."""
    max_alias_ttl_ms: int = 86_400_000
    max_remembered_ends: int = 131_072
    """Ended lease ids kept so that a late publish or resolve is told why. The oldest goes first."""
    max_owed_ends: int = 131_072
    """Ends that lenders have yet to confirm: milliseconds for each that is connected. The oldest goes first."""
    owed_end_ttl_ms: int = 3_600_000
    """How long a shared store remembers an end for a lender that is not heard, at least: an elastic lease's longest
    lifetime. Longer if the lease has more time left."""
    max_owed_end_ttl_ms: int = 86_400_000

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field, if a limit makes no sense."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value < (0 if name == "max_blocks_per_tenant" else 1):
                raise ValueError(f"{name} must be positive, not {value}")
        if self.session_ttl_ms <= self.suspect_after_ms:
            raise ValueError("session_ttl_ms must be longer than suspect_after_ms")
