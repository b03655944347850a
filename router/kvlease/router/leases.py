"""The router's dealings with the registry: bounded, counted, and never a reason for a turn to fail.

Everything here may be late or fail; then a turn is served without reuse. Only `release`, which a client asks for by
name, reports a failure. A turn is located in the router's copy of the leases, and by a call where the copy cannot say.

Invariant: no call outlasts its named time-out, and the registry's errors stop here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import Clock
from kvlease.registry.errors import KvleaseError
from kvlease.registry.lease_copy import LeaseCopy
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
from kvlease.router.conversations import RecentNames
from kvlease.router.errors import NotServed, RegistryDown
from kvlease.router.metrics import RouterMetrics
from prometheus_client import Counter

_LOG: Final = logging.getLogger(__name__)
_RENEW_PAUSE_MS: Final = 1_000
"""Least pause between two renewals of a lease, and the pause after one that failed."""


_RECENT_NAMES: Final = 65_536
"""Aliases this router remembers to have named: some 24 MiB, and more turns than it serves while a lease lives."""


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


class LocatedBy(StrEnum):
    """Who said it."""

    COPY = "copy"
    REGISTRY = "registry"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """How this router's copy of the leases stands. `staleness_ms` is None until there was a list."""

    leases: int
    staleness_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What a turn learned about its conversation. `located` is None if nobody could say."""

    located: Located | None
    by: LocatedBy
    conversation: ConversationId | None = None
    """The one that it goes on with; None: it begins one."""


_NOBODY: Final = Lookup(located=None, by=LocatedBy.NOBODY)


class Leases:
    """What a turn may ask of the registry. `client` None: leases are off, and nothing is asked.

    The copy only ever says where a lease is. What it does not find may be on its way, published or named through
    another router a moment ago, so the registry is asked: several routers find what one would.
    """

    def __init__(
        self,
        client: RegistryClient | None,
        metrics: RouterMetrics,
        copy: LeaseCopy,
        clock: Clock,
        *,
        tenant: TenantId,
        copy_staleness_ms: int,
        locate_timeout_ms: int,
        call_timeout_ms: int,
    ) -> None:
        """A copy staler than `copy_staleness_ms` is not asked; 0: it never is."""
        self._client = client
        self._metrics = metrics
        self._copy = copy
        self._clock = clock
        self._names = RecentNames(limit=_RECENT_NAMES)
        self._locates: dict[tuple[LocatedBy, LocateOutcome], Counter] = {}
        self._copy_staleness_ms = copy_staleness_ms
        self._locate_timeout_ms = locate_timeout_ms
        self._call_timeout_ms = call_timeout_ms
        self.tenant: Final = tenant
        self.state = RegistryState.OFF if client is None else RegistryState.UNKNOWN

    @property
    def on(self) -> bool:
        return self._client is not None

    async def locate(self, conversation: ConversationId | None, aliases: Sequence[Alias]) -> Lookup:
        """Where the conversation's KV is. Nobody says if leases are off or nothing names it, or if a call fails.

        A conversation found by an alias is the caller's: other turns of the same history get others, if there are any.
        """
        if self._client is None:
            return _NOBODY
        taken = None
        if conversation is None:
            if not aliases:
                self._count(LocatedBy.NOBODY, LocateOutcome.SKIPPED)
                return _NOBODY
            taken = self._names.take(aliases[0])
        asked = taken.conversation if taken is not None else conversation
        goes_on = asked if taken is None or taken.continues else None
        located = self._in_copy(asked) if asked is not None else None
        if located is not None:
            self._count(LocatedBy.COPY, LocateOutcome.HIT)
            return Lookup(located=located, by=LocatedBy.COPY, conversation=goes_on)
        try:
            located = await self._client.locate(
                self.tenant,
                conversation=asked,
                aliases=() if asked is not None else tuple(aliases),
                timeout_ms=self._locate_timeout_ms,
            )
        except KvleaseError as error:
            self._saw(error)
            self._count(LocatedBy.REGISTRY, LocateOutcome.FAILED)
            self._metrics.misses.labels(error.reason.value.lower()).inc()
            return Lookup(located=None, by=LocatedBy.REGISTRY, conversation=goes_on)
        self._saw(None)
        if asked is None and located.conversation is not None:
            goes_on = self._taken_elsewhere(aliases[0], located.conversation)
        if located.lease is None:
            self._count(LocatedBy.REGISTRY, LocateOutcome.MISS)
            self._metrics.misses.labels(located.reason or MissReason.UNKNOWN).inc()
        else:
            self._count(LocatedBy.REGISTRY, LocateOutcome.HIT)
        return Lookup(located=located, by=LocatedBy.REGISTRY, conversation=goes_on)

    def give_back(self, alias: Alias, conversation: ConversationId) -> None:
        """A turn that took the conversation by its alias was not served: the next try may have it."""
        self._names.give_back(alias, conversation)

    def copy_report(self) -> CopyReport | None:
        """How the copy stands; None if there is none."""
        if self._client is None or not self._copy_staleness_ms:
            return None
        return CopyReport(leases=len(self._copy), staleness_ms=self._copy.staleness_ms(self._clock.now_ms()))

    async def name(self, conversation: ConversationId, aliases: Sequence[Alias]) -> None:
        """Makes the next turn recognisable. A failure is counted: the next turn then begins a new conversation."""
        if self._client is None or not aliases:
            return
        self._names.name(conversation, aliases)
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

    def _taken_elsewhere(self, alias: Alias, conversation: ConversationId) -> ConversationId | None:
        """The conversation of a turn whose alias another router named; a turn of the same history may have it."""
        before = self._names.take(alias)
        if before is None:
            self._names.taken(alias, conversation)
            return conversation
        return before.conversation if before.continues else None

    def _in_copy(self, conversation: ConversationId) -> Located | None:
        now_ms = self._clock.now_ms()
        staleness_ms = self._copy.staleness_ms(now_ms)
        if not self._copy_staleness_ms or staleness_ms is None or staleness_ms > self._copy_staleness_ms:
            return None
        located = self._copy.locate(self.tenant, conversation, now_ms=now_ms)
        return located if located.lease is not None else None

    def _count(self, by: LocatedBy, outcome: LocateOutcome) -> None:
        counter = self._locates.get((by, outcome))
        if counter is None:  # looking a label up costs as much as a locate in the copy
            counter = self._locates[by, outcome] = self._metrics.locates.labels(outcome, by)
        counter.inc()

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
