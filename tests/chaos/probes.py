"""Callers of a chaos run that are in contact with every replica at all times: they ask for ends, and then look.

One client for each replica, from where the run itself is, which is never cut off. What is answered goes to the judge,
with the time at which it was asked. Invariant: a question that gets no answer in time says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from kvlease.connector.record import record_hash
from kvlease.registry.client import RegistryClient
from kvlease.registry.errors import KvleaseError
from kvlease.registry.values import DEFAULT_TENANT, EngineId, Hit, LeaseFilter, LeaseId, ResolveQuery

from tests.chaos.fleet import Fleet
from tests.chaos.lender import HASH_SHOWN
from tests.nixl import content

PROBE_S: Final = 0.1
PROBE_TIMEOUT_MS: Final = 1_000
ORDER_S: Final = 0.15
ORDER_TIMEOUT_MS: Final = 6_000
WATCHED: Final = 24
"""Leases whose end was asked for last: each replica is asked for one after the other of them."""
LIST_TIMEOUT_MS: Final = 2_000


class Probes:
    """`open_probes` makes and runs them."""

    def __init__(self, fleet: Fleet, dice: random.Random, clients: Mapping[str, RegistryClient]) -> None:
        self._fleet: Final = fleet
        self._dice: Final = dice
        self._clients: Final = clients
        self._ended: Final[deque[str]] = deque(maxlen=WATCHED)
        self.ends = 0
        self.renewals = 0
        self.refused = 0

    async def look(self, replica: str) -> None:
        """Ask this replica for leases that are to be gone, until cancelled."""
        client, judge, turn = self._clients[replica], self._fleet.judge, 0
        while True:
            turn += 1
            wanted = self._ended[turn % len(self._ended)] if self._ended else "none"
            run, asked_s = self._fleet.replica_run(replica), time.monotonic()
            try:
                answer = await client.resolve_unary(_by_id(wanted), timeout_ms=PROBE_TIMEOUT_MS)
                detail = f"(remaining {answer.remaining_ms} ms, {answer.state})" if isinstance(answer, Hit) else ""
                judge.answered(run, asked_s, answer.lease_id if isinstance(answer, Hit) else None, detail)
            except KvleaseError:
                judge.refused(run, asked_s)
                self.refused += 1
            await asyncio.sleep(PROBE_S)

    async def order(self) -> None:
        """Ask any replica for the end or the renewal of any lease, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                news = self._dice.choice(list(self._fleet.lender_news.values()))
                replica = self._dice.choice(self._fleet.replica_names)
                if news.recent:
                    lease_id = self._dice.choice(news.recent)
                    group.create_task(
                        self._end(replica, lease_id) if self._dice.random() < 0.6 else self._renew(replica, lease_id)
                    )
                await asyncio.sleep(self._dice.uniform(0, 2 * ORDER_S))

    async def _end(self, replica: str, lease_id: str) -> None:
        judge, run, asked_s = self._fleet.judge, self._fleet.replica_run(replica), time.monotonic()
        judge.end_asked(lease_id, run, asked_s)
        self._fleet.journal.note(run, "is asked to end", [lease_id])
        with contextlib.suppress(KvleaseError):
            client = self._clients[replica]
            ended = await client.end_lease(DEFAULT_TENANT, LeaseId(lease_id), timeout_ms=ORDER_TIMEOUT_MS)
            judge.end_acknowledged(lease_id, run, asked_s, time.monotonic(), ended)
            self._fleet.journal.note(run, f"says it ended {ended} of", [lease_id])
            self.ends += ended
            self._ended.append(lease_id)

    async def _renew(self, replica: str, lease_id: str) -> None:
        with contextlib.suppress(KvleaseError):
            await self._clients[replica].renew(DEFAULT_TENANT, LeaseId(lease_id), 300_000, timeout_ms=ORDER_TIMEOUT_MS)
            self.renewals += 1

    # -- what everybody tells -------------------------------------------------------------------------------------

    async def told(self) -> dict[str, dict[str, dict[str, str]] | str]:
        """By replica and lender: every lease, as a list and a resolve of each tell it; or why there is no answer."""
        names = list(self._clients)
        found = await asyncio.gather(*(self._told_by(name) for name in names))
        return dict(zip(names, found, strict=True))

    async def _told_by(self, replica: str) -> dict[str, dict[str, str]] | str:
        client = self._clients[replica]
        views: dict[str, dict[str, str]] = {}
        try:
            for lender in self._fleet.lender_names:
                wanted = LeaseFilter(engine_id=EngineId(lender))
                listed = [
                    x for x in (await client.list_leases(wanted, timeout_ms=LIST_TIMEOUT_MS)).leases if not x.suspect
                ]
                answers = await asyncio.gather(
                    *(client.resolve_unary(_by_id(x.lease_id), timeout_ms=LIST_TIMEOUT_MS) for x in listed)
                )
                views[lender] = {
                    x.lease_id: record_hash(x.record).hex()[:HASH_SHOWN] for x in answers if isinstance(x, Hit)
                }
        except KvleaseError as error:
            return error.message or type(error).__name__
        return views


def _by_id(lease_id: str) -> ResolveQuery:
    return ResolveQuery(tenant=DEFAULT_TENANT, lease_id=LeaseId(lease_id), fingerprint_hash=content.FINGERPRINT.hash)


@asynccontextmanager
async def open_probes(fleet: Fleet, dice: random.Random) -> AsyncIterator[Probes]:
    """Probes with clients of every replica, and nothing running yet."""
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(RegistryClient(fleet.endpoint(name))) for name in fleet.replica_names
        }
        yield Probes(fleet, dice, clients)
