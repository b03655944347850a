"""A lender as the registry sees one: an open session, and someone who waits for the answers to its publishes.

Uses the client and the session of the product as a connector does. No measuring.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.lender_session import LenderSession
from kvlease.registry.values import (
    EndReason,
    Engine,
    LeaseId,
    Publication,
    PublishResult,
    PublishStatus,
    RenewStatus,
)

WAIT_S: Final = 30.0


class NotPublished(RuntimeError):
    """The registry did not take a lease, or not in time."""


class Lender:
    """Open it with `async with`; its session lasts as long."""

    def __init__(self, client: RegistryClient, engine: Engine) -> None:
        self.engine: Final = engine
        self.session: Final = LenderSession(client, engine, clock=SystemClock(), listener=self)
        self._waiting: Final[dict[LeaseId, asyncio.Future[None]]] = {}
        self._connected: Final = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._runner = asyncio.create_task(self.session.run())
        async with asyncio.timeout(WAIT_S):
            await self._connected.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._runner is not None
        self._runner.cancel()
        await asyncio.wait([self._runner])

    async def publish(self, publications: Sequence[Publication]) -> None:
        """Returns when the registry has said PUBLISHED to each. Raises NotPublished."""
        loop = asyncio.get_running_loop()
        answers = [self._waiting.setdefault(item.lease_id, loop.create_future()) for item in publications]
        for item in publications:
            self.session.publish(item)
        try:
            async with asyncio.timeout(WAIT_S):
                for answer in answers:
                    await answer
        except TimeoutError as error:
            raise NotPublished(f"no answer to {len(publications)} publishes within {WAIT_S:.0f} s") from error

    def end(self, publications: Sequence[Publication]) -> None:
        """Ends what it published; the registry hears of it in its turn."""
        for item in publications:
            self.session.ended(item.lease_id, EndReason.RELEASED)

    # -- what the session reports

    def on_connected(self) -> None:
        self._connected.set()

    def on_disconnected(self) -> None:
        self._connected.clear()

    def on_refused(self, reason: str, message: str) -> None:
        raise AssertionError(f"the registry refuses the lender: {reason}: {message}")

    def on_result(self, result: PublishResult) -> None:
        answer = self._waiting.pop(result.lease_id, None)
        if answer is None or answer.done():
            return
        if result.status is PublishStatus.PUBLISHED:
            answer.set_result(None)
        else:
            answer.set_exception(NotPublished(f"{result.status}: {result.message}"))

    def on_end(self, lease_id: LeaseId, reason: EndReason) -> None:
        self.session.ended(lease_id, reason)

    def on_renew(self, lease_id: LeaseId, ttl_ms: int) -> None:
        self.session.refuse_renewal(lease_id, RenewStatus.DISABLED)
