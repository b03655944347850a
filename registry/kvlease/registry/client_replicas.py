"""Which replica of the registry a client uses, and when it takes another one.

Everything of one client shares one current replica: resolves, single calls, watches, a lender's session. It is kept
until it fails: its connection breaks, it says that it cannot serve, or it leaves a ping unanswered. A ping is sent when
something was not answered in time, and now and then when nothing was asked.
Invariants: a replica that failed is tried again only after all others have been; when all have, there is a pause that
grows, with jitter, and asking fails at once meanwhile. Nothing is looked up or connected before the first use.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from kvlease.registry.backoff import Backoff
from kvlease.registry.client_addresses import Address, AddressBook, Lookup
from kvlease.registry.client_channel import ClientLimits, Open
from kvlease.registry.client_endpoints import Endpoint
from kvlease.registry.client_replica import Replica
from kvlease.registry.errors import InternalError, KvleaseError, LimitReached, RegistryUnavailable

_log = logging.getLogger(__name__)
_STALLED_S: Final = 0.25
"""A ping that took so much longer than its limit: it was this process that stood still."""
_ELSEWHERE: Final = (RegistryUnavailable, InternalError, LimitReached)
"""Ends of a stream that another replica may not give."""


class Replicas:
    """The replicas of one registry. `run` must be running while it is used. All else is of the same event loop."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        open_to: Open,
        lookup: Lookup,
        limits: ClientLimits,
        fraction: Callable[[], float],
    ) -> None:
        """`fraction` spreads clients over replicas and attempts over time: numbers in [0, 1)."""
        self._endpoints: Final = tuple(endpoints)
        self._book: Final = AddressBook(endpoints, lookup)
        self._open_to: Final = open_to
        self._limits: Final = limits
        self._fraction: Final = fraction
        self._backoff: Final = Backoff(
            first_ms=limits.backoff_first_ms, cap_ms=limits.backoff_cap_ms, fraction=fraction
        )
        self._ranks: Final[dict[str, float]] = {}
        self._failed: Final[dict[str, tuple[float, KvleaseError]]] = {}
        self._wanted: Final = asyncio.Event()
        self._news = asyncio.Event()
        self._last: Address | None = None
        self._closing: Final[dict[asyncio.Task[None], Replica]] = {}
        self._closed = False
        self.current: Replica | None = None
        """The replica in use; None while one is looked for."""
        self.down: KvleaseError | None = None
        """Why there is none, once all have been tried."""
        self.moves = 0
        """How often another replica was taken than the last one."""

    @property
    def several(self) -> bool:
        """Whether there is another replica to take."""
        return len(self._book.addresses) > 1

    @property
    def place(self) -> int:
        """The current replica's number, from 0, among all addresses in the order of the list; -1: there is none."""
        if self.current is None:
            return -1
        targets = [x.target for x in self._book.addresses]
        return targets.index(self.current.address.target) if self.current.address.target in targets else -1

    async def connected(self, *, patient: bool = False) -> Replica:
        """The current replica, waited for while one is looked for.

        Raises RegistryUnavailable if all have been tried in vain, unless `patient`, and if the client is closed.
        """
        self._wanted.set()
        while self.current is None:
            if self.down is not None and (self._closed or not patient):
                raise self.down.again()
            await self._news.wait()
        return self.current

    def leave(self, replica: Replica, error: KvleaseError) -> None:
        """`replica` has failed: another one is taken, or none. Nothing happens if it is not in use any more."""
        if replica is not self.current:
            return
        self._note_failure(replica.address, error)
        self.current = None
        if not self._candidates():
            self._set_down()
        replica.leave()
        self._tell()

    def ended(self, replica: Replica, error: KvleaseError) -> bool:
        """A stream on `replica` has ended with `error`: whether the next one is to be opened without a pause of its
        own, on another replica or when there is one again."""
        if replica.left.is_set():
            return True
        if isinstance(error, RegistryUnavailable) or (self.several and isinstance(error, _ELSEWHERE)):
            self.leave(replica, error)
            return True
        return False

    def release(self, replica: Replica) -> None:
        """`replica` still serves and will not for long: another one is looked for, if there are others."""
        if self.several:
            replica.unwanted.set()

    async def retire(self, replica: Replica) -> bool:
        """`replica` goes away: whether another one is in use by now. It serves until one is found."""
        self.release(replica)
        if not self.several:
            return False
        try:
            async with asyncio.timeout(self._limits.connect_timeout_ms / 1000):
                await replica.left.wait()
        except TimeoutError:
            return False
        return True

    def doubt(self) -> None:
        """Something was not answered in time: see whether the current replica lives."""
        if self.current is not None:
            self.current.doubted.set()

    async def examine(self) -> list[tuple[Address, KvleaseError | None]]:
        """Every replica, and why it is not to be used, None if it is. For operators; takes none into use."""
        await self._book.refresh(limit_s=self._limits.lookup_timeout_ms / 1000)
        replicas = [self._open(address) for address in self._book.addresses]
        try:
            asked = (replica.ask(timeout_ms=self._limits.connect_timeout_ms) for replica in replicas)
            return list(zip([x.address for x in replicas], await asyncio.gather(*asked), strict=True))
        finally:
            for replica in replicas:
                await replica.close()

    # --- the life of it

    async def run(self) -> NoReturn:
        """Keep a replica in use from the first time that one is wanted, for as long as this task lives."""
        looking: asyncio.Task[NoReturn] | None = None
        try:
            await self._wanted.wait()
            await self._look_up()
            if self._book.changes:
                looking = asyncio.create_task(self._keep_looking(), name="kvlease lookups")
            successor: Replica | None = None
            while True:
                replica = successor or await self._connect(self._candidates())
                if replica is not None:
                    successor = await self._serve(replica)
                    continue
                self._set_down()
                self._tell()
                await asyncio.sleep(self._backoff.next_ms() / 1000)
                self._failed.clear()
                await self._look_up()
        finally:
            if looking is not None:
                looking.cancel()
            await self._end()

    async def _serve(self, replica: Replica) -> Replica | None:
        """Use `replica` until it is left; the one to take next, if that is known already."""
        self._adopt(replica)
        watching = asyncio.create_task(self._watch(replica), name="kvlease watch of a replica")
        successor: Replica | None = None
        try:
            while not replica.left.is_set() and successor is None:
                await _first(replica.left, replica.unwanted)
                if not replica.left.is_set():
                    self._note_failure(replica.address, RegistryUnavailable("it goes away"))
                    successor = await self._connect(self._candidates())
                    if successor is None:
                        await _first(replica.left, limit_s=self._backoff.next_ms() / 1000)
                        self._failed.clear()
                        await self._reconsider(replica)
        finally:
            watching.cancel()
            if (self._now_s() - replica.since_s) * 1000 >= self._limits.settled_ms:
                self._backoff.reset()
            self._close(replica)
        return successor

    async def _reconsider(self, replica: Replica) -> None:
        """There is no other to take: whether this one is well again. Else all would change places after each fault."""
        replica.unwanted.clear()
        if await replica.ask(timeout_ms=self._limits.ping_timeout_ms) is not None:
            replica.unwanted.set()

    def _adopt(self, replica: Replica) -> None:
        address, last = replica.address, self._last
        self.current, self.down, self._last = replica, None, address
        if last is not None and last.target != address.target:
            self.moves += 1
            why = self._failed.get(last.target)
            _log.warning("registry: %s is used instead of %s (%s)", address, last, why[1].message if why else "away")
        self._tell()

    async def _watch(self, replica: Replica) -> None:
        """Ping for cause, and when nothing was heard for a while. The only replica there is, is not left for it."""
        limits = self._limits
        idle_s, settled_s = limits.idle_ms / 1000, limits.settled_ms / 1000
        pause_ms, pinged_s = limits.ping_pause_ms, 0.0
        while True:
            await _first(replica.doubted, limit_s=max(0.01, replica.heard_s + idle_s - self._now_s()))
            doubted = replica.doubted.is_set()
            replica.doubted.clear()
            if not self.several:
                await asyncio.sleep(idle_s)
                continue
            started_s = self._now_s()
            if not doubted and started_s - replica.heard_s < idle_s:
                continue
            error = await replica.ask(timeout_ms=limits.ping_timeout_ms)
            stalled = self._now_s() - started_s > limits.ping_timeout_ms / 1000 + _STALLED_S
            if error is not None and not replica.unwanted.is_set() and not stalled and replica.heard_s < started_s:
                self.leave(replica, error)
                return
            if doubted:  # a replica that is slow is not made slower by being asked whether it lives
                pause_ms = min(2 * pause_ms, 4 * limits.ping_pause_ms)
                if started_s - pinged_s > settled_s:
                    pause_ms = limits.ping_pause_ms
                pinged_s = started_s
                await asyncio.sleep(pause_ms / 1000)

    # --- finding one

    def _candidates(self) -> list[Address]:
        """Those that have not failed of late, in this client's own order."""
        too_old_s = self._now_s() - self._limits.avoid_ms / 1000
        tired = {target for target, (at_s, _) in self._failed.items() if at_s >= too_old_s}
        addresses = [x for x in self._book.addresses if x.target not in tired]
        return sorted(addresses, key=lambda x: (x.spare, self._ranks.setdefault(x.target, self._fraction())))

    async def _connect(self, candidates: Sequence[Address]) -> Replica | None:
        """The first that answers. They are tried in order, the next one when an attempt has failed or takes long."""
        waiting = deque(candidates)
        trying: dict[asyncio.Task[KvleaseError | None], Replica] = {}
        found: Replica | None = None
        try:
            while found is None and (waiting or trying):
                if waiting:
                    replica = self._open(waiting.popleft())
                    attempt = asyncio.create_task(replica.ask(timeout_ms=self._limits.connect_timeout_ms))
                    trying[attempt] = replica
                limit_s = self._limits.stagger_ms / 1000 if waiting else None
                done, _ = await asyncio.wait(trying, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                for attempt in done:
                    replica, error = trying.pop(attempt), attempt.result()
                    if error is None and found is None:
                        found = replica
                        continue
                    if error is not None:
                        self._note_failure(replica.address, error)
                    self._close(replica)
        finally:
            for attempt, replica in trying.items():
                attempt.cancel()
                self._close(replica)
        return found

    def _open(self, address: Address) -> Replica:
        # The name is what a certificate has to have, whatever address it was looked up to be.
        return Replica(address, self._open_to(address.target, str(address.endpoint)))

    async def _look_up(self) -> None:
        await self._book.refresh(limit_s=self._limits.lookup_timeout_ms / 1000)
        known = {x.target for x in self._book.addresses}
        for target in [x for x in self._ranks if x not in known]:
            del self._ranks[target]

    async def _keep_looking(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._limits.lookup_interval_ms / 1000)
            await self._look_up()

    # --- small parts

    def _note_failure(self, address: Address, error: KvleaseError) -> None:
        self._failed[address.target] = (self._now_s(), error)

    def _set_down(self) -> None:
        """Names what was tried, and what was wrong with each."""
        tried = [f"{x}: {self._failed[x.target][1].message}" for x in self._book.addresses if x.target in self._failed]
        tried += [f"{x}: {x.host} cannot be looked up: {text}" for x, text in self._book.faults.items()]
        self.down = RegistryUnavailable(f"no registry answers at {'; at '.join(tried) or 'any address'}")

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _close(self, replica: Replica) -> None:
        task = asyncio.create_task(replica.close())
        self._closing[task] = replica
        task.add_done_callback(self._closing.pop)

    async def _end(self) -> None:
        """Closed: whoever waits is told, and nothing is open any more."""
        self._closed = True
        self._book.close()
        self.down = RegistryUnavailable("the client is closed")
        self.current = None
        self._tell()
        closing = dict(self._closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        for replica in closing.values():
            await replica.close(at_once=True)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


async def _first(*events: asyncio.Event, limit_s: float | None = None) -> None:
    """Wait for the first of `events`, or for `limit_s`."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
