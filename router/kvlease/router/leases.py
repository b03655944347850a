"""The router's dealings with the registry: bounded, counted, and never a reason for a turn to fail.

Everything here may be late or fail; then a turn is served without reuse. Only `release`, which a client asks for by
name, reports a failure.

Invariant: no call outlasts its named time-out, and the registry's errors stop here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from kvlease.registry.client import RegistryClient
from kvlease.registry.errors import KvleaseError
from kvlease.registry.values import (
    Alias,
    ConversationId,
    EngineStatus,
    LeaseView,
    Located,
    MissReason,
    RenewStatus,
    TenantId,
)
from kvlease.router.errors import NotServed, RegistryDown
from kvlease.router.metrics import RouterMetrics

_LOG: Final = logging.getLogger(__name__)
_RENEW_PAUSE_MS: Final = 1_000
"""Least pause between two renewals of a lease, and the pause after one that failed."""


class RegistryState(StrEnum):
    OFF = "off"
    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


class LocateOutcome(StrEnum):
    HIT = "hit"
    MISS = "miss"
    FAILED = "failed"
    SKIPPED = "skipped"
    """There was no name to ask for."""


class Leases:
    """What a turn may ask of the registry. `client` None: leases are off, and nothing is asked."""

    def __init__(
        self,
        client: RegistryClient | None,
        metrics: RouterMetrics,
        *,
        tenant: TenantId,
        locate_timeout_ms: int,
        call_timeout_ms: int,
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._locate_timeout_ms = locate_timeout_ms
        self._call_timeout_ms = call_timeout_ms
        self.tenant: Final = tenant
        self.state = RegistryState.OFF if client is None else RegistryState.UNKNOWN

    @property
    def on(self) -> bool:
        return self._client is not None

    async def locate(self, conversation: ConversationId | None, aliases: Sequence[Alias]) -> Located | None:
        """Where the conversation's KV is; None if leases are off, nothing names it, or the registry did not say."""
        if self._client is None:
            return None
        if conversation is None and not aliases:
            self._metrics.locates.labels(LocateOutcome.SKIPPED).inc()
            return None
        try:
            located = await self._client.locate(
                self.tenant,
                conversation=conversation,
                aliases=() if conversation is not None else tuple(aliases),
                timeout_ms=self._locate_timeout_ms,
            )
        except KvleaseError as error:
            self._saw(error)
            self._metrics.locates.labels(LocateOutcome.FAILED).inc()
            self._metrics.misses.labels(error.reason.value.lower()).inc()
            return None
        self._saw(None)
        outcome = LocateOutcome.MISS if located.lease is None else LocateOutcome.HIT
        self._metrics.locates.labels(outcome).inc()
        if located.lease is None:
            self._metrics.misses.labels(located.reason or MissReason.UNKNOWN).inc()
        return located

    async def name(self, conversation: ConversationId, aliases: Sequence[Alias]) -> None:
        """Makes the next turn recognisable. A failure is counted: the next turn then begins a new conversation."""
        if self._client is None or not aliases:
            return
        try:
            await self._client.name_conversation(
                self.tenant, conversation, tuple(aliases), timeout_ms=self._call_timeout_ms
            )
        except KvleaseError as error:
            self._saw(error)
            self._metrics.namings.labels(error.reason.value.lower()).inc()
            return
        self._metrics.namings.labels("named").inc()

    async def keep(self, lease: LeaseView) -> None:
        """Renews `lease` whenever a third of its time is over, until cancelled or the lender declines for good."""
        if self._client is None:
            return
        while True:
            pause_ms = _RENEW_PAUSE_MS
            try:
                # 0: the lender's own ttl, so that no second place has to know it.
                result = await self._client.renew(
                    self.tenant, lease.lease_id, ttl_ms=0, timeout_ms=self._call_timeout_ms
                )
            except KvleaseError as error:
                self._metrics.renewals.labels(error.reason.value.lower()).inc()
            else:
                self._metrics.renewals.labels(result.status).inc()
                if result.status not in (RenewStatus.RENEWED, RenewStatus.PRESSURE):
                    return
                pause_ms = max(_RENEW_PAUSE_MS, result.remaining_ms // 3)
            await asyncio.sleep(pause_ms / 1000)

    async def release(self, conversation: ConversationId) -> int:
        """Ends the conversation's leases; how many there were.

        Raises RegistryDown if the registry does not say so, NotServed if leases are off.
        """
        if self._client is None:
            raise NotServed("this router has no registry, so there are no conversations to end")
        try:
            return await self._client.end_conversation(self.tenant, conversation, timeout_ms=self._call_timeout_ms)
        except KvleaseError as error:
            self._saw(error)
            raise RegistryDown("the registry did not answer; try again") from error

    async def engines(self) -> Sequence[EngineStatus] | None:
        """The engines that the registry knows; None if it does not answer or leases are off. A probe of its health."""
        if self._client is None:
            return None
        try:
            engines = await self._client.list_engines(timeout_ms=self._call_timeout_ms)
        except KvleaseError as error:
            self._saw(error)
            return None
        self._saw(None)
        return engines

    def _saw(self, error: KvleaseError | None) -> None:
        state = RegistryState.UP if error is None else RegistryState.DOWN
        if state is not self.state:
            _LOG.log(
                logging.INFO if error is None else logging.WARNING,
                "registry is %s%s",
                state,
                "" if error is None else f" ({error.reason}): turns are served without reuse",
            )
        self.state = state
