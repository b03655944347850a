"""`kvlease bench`: what a running registry takes, as seen from here, with a lender of its own that holds nothing.

The lender has an engine id and a tenant that nobody else uses, publishes leases, and takes all of them back at the end,
also when it is interrupted. If this process is killed, the registry misses its session and forgets them by itself.
Invariants: every part ends after its seconds; a registry that refuses resolves because it has too much to do is not
asked any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from kvlease.cli.bench_figures import Figure, Samples
from kvlease.cli.bench_load import Load, Turn
from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.errors import (
    DeadlineExceeded,
    EngineIdInUse,
    KvleaseError,
    LimitReached,
    Overloaded,
    PermissionDenied,
    RegistryUnavailable,
    Unauthenticated,
)
from kvlease.registry.lender_session import LenderSession
from kvlease.registry.values import (
    EndReason,
    EngineId,
    Hit,
    LeaseId,
    Miss,
    MissReason,
    PublishResult,
    PublishStatus,
    RegistryStatus,
    RenewStatus,
    TenantId,
)

LEASES_OUTLIVE_MS: Final = 120_000
"""The leases' ttl beyond the longest that a run may take: if nobody takes them back, they end by themselves."""
_PARTS: Final = 7
_ROLES: Final = ("lender", "borrower", "router")
_REFUSALS: Final = {x.reason.value: x for x in (EngineIdInUse, LimitReached, PermissionDenied, Unauthenticated)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTerms:
    """`seconds`: each part. `callers`: at once in the parts that ask together."""

    tenant: TenantId
    engine_id: EngineId
    leases: int
    tokens: int
    seconds: float
    callers: int
    timeout_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    registry: RegistryStatus
    tokens: int
    record_bytes: int
    leases: int
    figures: Sequence[Figure]


class _Lender:
    """Hears what the registry answers to the publishes."""

    def __init__(self) -> None:
        self.connected: Final = asyncio.Event()
        self.refused: asyncio.Future[KvleaseError] = asyncio.get_running_loop().create_future()
        self.session: LenderSession | None = None
        self._answers: dict[LeaseId, asyncio.Future[PublishResult]] = {}
        self._ends: dict[LeaseId, asyncio.Future[EndReason]] = {}

    def answer(self, lease_id: LeaseId) -> asyncio.Future[PublishResult]:
        """What the registry will say to this publish."""
        future: asyncio.Future[PublishResult] = asyncio.get_running_loop().create_future()
        self._answers[lease_id] = future
        return future

    def end(self, lease_id: LeaseId) -> asyncio.Future[EndReason]:
        """The registry's word that this lease is over."""
        future: asyncio.Future[EndReason] = asyncio.get_running_loop().create_future()
        self._ends[lease_id] = future
        return future

    def on_connected(self) -> None:
        self.connected.set()

    def on_disconnected(self) -> None:
        self._refuse(RegistryUnavailable("the registry closed the lender's session"))

    def on_refused(self, reason: str, message: str) -> None:
        self._refuse(_REFUSALS.get(reason, RegistryUnavailable)(message))

    def _refuse(self, error: KvleaseError) -> None:
        if not self.refused.done():
            self.refused.set_result(error)

    def on_result(self, result: PublishResult) -> None:
        future = self._answers.pop(result.lease_id, None)
        if future is not None and not future.done():
            future.set_result(result)

    def on_end(self, lease_id: LeaseId, reason: EndReason) -> None:
        future = self._ends.pop(lease_id, None)
        if future is not None and not future.done():
            future.set_result(reason)
        if self.session is not None:
            self.session.ended(lease_id, reason)

    def on_renew(self, lease_id: LeaseId, ttl_ms: int) -> None:
        if self.session is not None:
            self.session.refuse_renewal(lease_id, RenewStatus.DISABLED)


async def measure(client: RegistryClient, terms: BenchTerms) -> Report:
    """The whole run. Raises KvleaseError: PermissionDenied says which grants are needed, Overloaded that it is shed."""
    try:
        registry = (await client.survey(timeout_ms=terms.timeout_ms)).registry
        if registry.shedding:
            raise Overloaded("the registry refuses resolves already: it has more to do than it can")
        async with _lending(client, terms) as run:
            figures = [
                await run.publish(),
                await run.resolve(callers=1),
                await run.resolve(callers=terms.callers),
                await run.resolve_unary(),
                await run.locate(callers=1),
                await run.locate(callers=terms.callers),
                await run.end(),
            ]
            first = run.turns[0]
            return Report(
                registry=registry,
                tokens=run.load.tokens,
                record_bytes=first.record_bytes,
                leases=len(run.turns),
                figures=figures,
            )
    except PermissionDenied as error:
        raise PermissionDenied(f"{error.message}; {_grants(terms)}") from error


def _grants(terms: BenchTerms) -> str:
    grants = " ".join(f"kvlease://{role}/{terms.engine_id}?tenant={terms.tenant}" for role in _ROLES)
    return f"a bench lends, borrows and locates, so it needs the grants {grants}"


@asynccontextmanager
async def _lending(client: RegistryClient, terms: BenchTerms) -> AsyncIterator[_Run]:
    """A connected lender; all that it has published is taken back at the end, however it comes."""
    load, lender, clock = Load(terms.engine_id, terms.tenant, tokens=terms.tokens), _Lender(), SystemClock()
    session = lender.session = LenderSession(client, load.engine, clock=clock, listener=lender)
    running = asyncio.create_task(session.run(), name="kvlease bench lender")
    try:
        await _first(lender.connected.wait(), lender, terms)
        yield _Run(client, terms, load, lender, session, clock)
    finally:
        # Also after an interruption: this task was cancelled once, and waits here for the goodbye all the same.
        try:
            await session.goodbye()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _first(wanted: Awaitable[object], lender: _Lender, terms: BenchTerms) -> None:
    """Waits for `wanted`. Raises what the registry refuses the lender with, and DeadlineExceeded."""
    waiting = asyncio.ensure_future(wanted)
    try:
        async with asyncio.timeout(terms.timeout_ms / 1_000):
            await asyncio.wait((waiting, lender.refused), return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError as error:
        raise DeadlineExceeded(f"the lender got no answer within {terms.timeout_ms} ms") from error
    finally:
        if not waiting.done():
            waiting.cancel()
    if lender.refused.done():
        raise lender.refused.result()


class _Run:
    """The parts, one after another."""

    def __init__(
        self,
        client: RegistryClient,
        terms: BenchTerms,
        load: Load,
        lender: _Lender,
        session: LenderSession,
        clock: SystemClock,
    ) -> None:
        self._client, self._terms, self._lender, self._session = client, terms, lender, session
        self._clock = clock
        self._ttl_ms = int(_PARTS * terms.seconds * 1_000) + LEASES_OUTLIVE_MS
        self.load = load
        self.turns: list[Turn] = []

    async def publish(self) -> Figure:
        """From the lender's publish to the first resolve that finds the lease, one lease after another."""
        samples, started = Samples(), time.perf_counter()
        until = started + self._terms.seconds
        while len(self.turns) < self._terms.leases and (not self.turns or time.perf_counter() < until):
            turn = self.load.turn(deadline_ms=self._clock.now_ms() + self._ttl_ms)
            lease_id = turn.publication.lease_id
            answer = self._lender.answer(lease_id)
            begun = time.perf_counter()
            self._session.publish(turn.publication)
            await _first(answer, self._lender, self._terms)
            _check_published(answer.result(), self._terms)
            if await self._found(turn):
                samples.took_s.append(time.perf_counter() - begun)
            else:
                samples.failed += 1
            self.turns.append(turn)
        return samples.figure("publish to resolvable", callers=1, over_s=time.perf_counter() - started)

    async def resolve(self, *, callers: int) -> Figure:
        """On the stream, where what is asked at once travels together."""
        return await self._ask("resolve, stream", callers, self._found)

    async def resolve_unary(self) -> Figure:
        async def ask(turn: Turn) -> bool:
            answer = await self._client.resolve_unary(turn.query, timeout_ms=self._terms.timeout_ms)
            return _is(answer, turn)

        return await self._ask("resolve, single calls", 1, ask)

    async def locate(self, *, callers: int) -> Figure:
        async def ask(turn: Turn) -> bool:
            found = await self._client.locate(
                self._terms.tenant, turn.publication.conversation, timeout_ms=self._terms.timeout_ms
            )
            return found.lease is not None and found.lease.lease_id == turn.publication.lease_id

        return await self._ask("locate", callers, ask)

    async def end(self) -> Figure:
        """From the call that ends a lease to the moment at which its lender hears of it, one lease after another."""
        samples, started = Samples(), time.perf_counter()
        until = started + self._terms.seconds
        for turn in self.turns:
            lease_id = turn.publication.lease_id
            heard = self._lender.end(lease_id)
            begun = time.perf_counter()
            call = asyncio.create_task(
                self._client.end_lease(self._terms.tenant, lease_id, timeout_ms=self._terms.timeout_ms)
            )
            try:
                await _first(heard, self._lender, self._terms)
                samples.took_s.append(time.perf_counter() - begun)
            finally:
                await call
            if time.perf_counter() >= until:
                break
        return samples.figure("end to its lender", callers=1, over_s=time.perf_counter() - started)

    async def _found(self, turn: Turn) -> bool:
        answer = await self._client.resolve(turn.query, timeout_ms=self._terms.timeout_ms)
        if isinstance(answer, Miss) and answer.reason is MissReason.OVERLOADED:
            raise Overloaded("the registry began to refuse resolves; stopped")
        return _is(answer, turn)

    async def _ask(self, what: str, callers: int, ask: Callable[[Turn], Awaitable[bool]]) -> Figure:
        """`callers` ask for one lease after another, each as soon as it is answered."""
        samples, started = Samples(), time.perf_counter()
        until = started + self._terms.seconds

        async def caller(number: int) -> None:
            at = number
            while (begun := time.perf_counter()) < until:
                at += 1
                try:
                    found = await ask(self.turns[at % len(self.turns)])
                except DeadlineExceeded:
                    found = False
                if found:
                    samples.took_s.append(time.perf_counter() - begun)
                else:
                    samples.failed += 1

        callers_at_work = [asyncio.create_task(caller(number)) for number in range(callers)]
        try:
            await asyncio.gather(*callers_at_work)
        finally:
            for task in callers_at_work:
                task.cancel()
        return samples.figure(what, callers=callers, over_s=time.perf_counter() - started)


def _is(answer: Hit | Miss, turn: Turn) -> bool:
    return isinstance(answer, Hit) and answer.record == turn.publication.record


def _check_published(result: PublishResult, terms: BenchTerms) -> None:
    """Raises PermissionDenied or LimitReached."""
    match result.status:
        case PublishStatus.PUBLISHED:
            return
        case PublishStatus.INVALID:
            raise PermissionDenied(result.message)
        case _:
            raise LimitReached(f"a lease was refused, {result.status.value}: {result.message}", limit=terms.tenant)
