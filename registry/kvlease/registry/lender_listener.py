"""What a lender's session reports to the lender. The lender implements it; `lender_session.py` calls it.

No code. Every call comes on the event loop's thread, in the order in which the registry's messages arrived.
Invariant: a lease is reported over (`on_end`, or `on_result` with anything but PUBLISHED) once at most, and only if
the lender has not ended it itself before.
"""

from __future__ import annotations

from typing import Protocol

from kvlease.registry.values import EndReason, LeaseId, PublishResult


class LenderListener(Protocol):
    """What a session reports. Called on the event loop's thread; must not block and must not raise."""

    def on_connected(self) -> None:
        """The registry knows every lease held."""

    def on_disconnected(self) -> None:
        """The session is lost; it is being opened again."""

    def on_refused(self, reason: str, message: str) -> None:
        """The registry does not take this lender now (a reason of errors.py); it is asked again."""

    def on_result(self, result: PublishResult) -> None:
        """The answer to a publish. With any status but PUBLISHED the lease is no lease: give the blocks back."""

    def on_end(self, lease_id: LeaseId, reason: EndReason) -> None:
        """The registry ended this lease: break the seal, free the blocks, then call `LenderSession.ended`."""

    def on_renew(self, lease_id: LeaseId, ttl_ms: int) -> None:
        """Somebody asks for `ttl_ms` more (0: the lender's own ttl): call `renewed` or `refuse_renewal`."""
