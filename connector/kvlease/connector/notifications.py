"""Keeps the notifications of lease READs away from the engine's own bookkeeping.

The engine's READ ends with a notification to the lender that names a request of its own; lease READs name `kvl:…`
instead, which no request is called. The lender needs none of them: a lease is read any number of times.
"""

from __future__ import annotations

from typing import Any

PREFIX = b"kvl:"


class NotificationFilter:
    """A NIXL agent that hides notifications of lease READs; everything else is the agent's."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_new_notifs(self, *args: Any, **kwargs: Any) -> dict[str, list[bytes]]:
        notifications: dict[str, list[bytes]] = self._agent.get_new_notifs(*args, **kwargs)
        return {
            agent: [message for message in messages if not message.startswith(PREFIX)]
            for agent, messages in notifications.items()
        }
