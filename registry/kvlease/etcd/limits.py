"""Bounds of the etcd client: every wait, every size. Values only, in milliseconds and bytes.

Invariant: a ping to an idle etcd is never closer than 5 s to the last, or etcd closes the connection as abuse; so hung
members are found by the deadlines here, not by pings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIN_PING_MS: Final = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdLimits:
    """All may be set. `call_timeout_ms` is the whole of a call with its tries; a caller may name another one."""

    call_timeout_ms: int = 5_000
    try_timeout_ms: int = 1_000
    """One try at one endpoint: how long a hung member can hold a call."""
    connect_timeout_ms: int = 500
    """Waiting for a connection within one try; nothing has been sent then."""
    backoff_first_ms: int = 20
    backoff_cap_ms: int = 250
    """Pauses after every endpoint failed once; twice the last one each time."""
    watch_idle_ms: int = 500
    """Silence after which a watch asks whether its member is there."""
    watch_check_ms: int = 700
    """How long that question may take before the watch moves to another member."""
    watch_timeout_ms: int = 10_000
    """How long a watch looks for a member before it says so. It may go on afterwards."""
    keepalive_batch: int = 256
    """Leases renewed on one stream."""
    close_timeout_ms: int = 1_000
    ping_ms: int = 6_000
    ping_timeout_ms: int = 2_000
    max_answer_bytes: int = 64 * 1024 * 1024
    page_keys: int = 256
    """Keys to a page of a large listing: 4 MB at 16 KB each."""

    def __post_init__(self) -> None:
        """Raises ValueError for bounds that cannot work."""
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.ping_ms < MIN_PING_MS:
            raise ValueError(f"ping_ms must be at least {MIN_PING_MS}: etcd closes connections that ping more often")
