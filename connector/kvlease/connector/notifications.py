"""Keeps the notifications of lease READs away from the engine's own bookkeeping.

The engine's READ ends with a notification to the lender that names a request of its own; lease READs name `kvl:…`
instead, which no request is called. A lease is read any number of times, so nothing ends with one; the lender only
learns which leases are worth keeping.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

PREFIX: Final = b"kvl:"
MAX_READS: Final = 1_024
"""Leases read that are remembered between two steps; more are not counted."""


class NotificationFilter:
    """A NIXL agent that hides notifications of lease READs; everything else is the agent's."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._reads: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def take_reads(self) -> list[str]:
        """Lease ids of READs since this was last called; whoever sent them may have made them up."""
        if not self._reads:
            return []
        reads, self._reads = self._reads, []
        return reads

    def get_new_notifs(self, *args: Any, **kwargs: Any) -> dict[str, list[bytes]]:
        notifications: dict[str, list[bytes]] = self._agent.get_new_notifs(*args, **kwargs)
        left: dict[str, list[bytes]] = {}
        for agent, messages in notifications.items():
            left[agent] = [message for message in messages if not message.startswith(PREFIX)]
            if len(left[agent]) < len(messages) and len(self._reads) < MAX_READS:
                self._reads += _lease_ids(messages)
        return left


def _lease_ids(messages: list[bytes]) -> Iterator[str]:
    """`kvl:LEASE:READERS` of each lease READ among the messages."""
    for message in messages:
        if message.startswith(PREFIX):
            yield message[len(PREFIX) :].rpartition(b":")[0].decode(errors="replace")
