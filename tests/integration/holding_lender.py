"""A lender for cases at the registry: the connector's own lease holder behind a real session, without an engine.

It publishes, renews, lapses and ends as the connector does, on a clock that the test gives it, and looks at its
deadlines when told to. There is no pool: blocks are numbers, and what an engine would do to them is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvlease.connector.digests import Chain
from kvlease.connector.lender import LeaseHolder
from kvlease.connector.lender_effects import (
    Announce,
    AnnounceEnded,
    AnnounceLapsed,
    AnnounceRenewed,
    Effect,
    RefuseRenewal,
)
from kvlease.connector.loan import LenderTerms, Loan, RankTable
from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import Clock
from kvlease.registry.lender_session import LenderSession
from kvlease.registry.values import (
    DEFAULT_TENANT,
    DIGEST_BYTES,
    EndReason,
    Engine,
    EngineId,
    Fingerprint,
    Incarnation,
    LeaseId,
    OnDeadline,
    PublishResult,
    PublishStatus,
    ResolveQuery,
)

FINGERPRINT = Fingerprint(hash=b"f" * 16, fields=(("model", "tiny"),))
STRIDE = 64
MOST_LEASES = 128


def digests(lease_id: str) -> bytes:
    """One stride, of this lease alone."""
    return lease_id.encode().rjust(DIGEST_BYTES, b".")[-DIGEST_BYTES:]


def query(lease_id: str) -> ResolveQuery:
    """Asks for what `lease_id` covers."""
    return ResolveQuery(
        tenant=DEFAULT_TENANT, digests=digests(lease_id), stride_tokens=STRIDE, fingerprint_hash=FINGERPRINT.hash
    )


class HoldingLender:
    """Does at once what it is told; `tick` is the engine step in which deadlines are looked at."""

    def __init__(
        self,
        client: RegistryClient,
        engine_id: str,
        clock: Clock,
        *,
        ttl_ms: int,
        max_lifetime_ms: int,
        on_deadline: OnDeadline,
    ) -> None:
        engine = Engine(
            engine_id=EngineId(engine_id),
            incarnation=Incarnation(digests(engine_id)),
            api_url=f"http://{engine_id}",
            fingerprint=FINGERPRINT,
        )
        terms = LenderTerms(
            engine_id=engine.engine_id,
            incarnation=engine.incarnation,
            fingerprint_hash=FINGERPRINT.hash,
            block_tokens=STRIDE,
            stride_tokens=STRIDE,
            block_bytes=1,
            tables=(RankTable(pp_rank=0, tp_rank=0, address=4_096),),
            slots=MOST_LEASES,
            max_blocks=MOST_LEASES,
            ttl_ms=ttl_ms,
            max_lifetime_ms=max_lifetime_ms,
            on_deadline=on_deadline,
            renewable=True,
        )
        self.clock = clock
        self.session = LenderSession(client, engine, clock=clock, listener=self)
        self.holder = LeaseHolder(terms, first_value=1)
        self.connects = 0
        self.published: set[LeaseId] = set()

    def lend(self, lease_id: str) -> None:
        loan = Loan(
            lease_id=LeaseId(lease_id),
            tenant=DEFAULT_TENANT,
            conversation=None,
            chain=Chain.of(digests(lease_id)),
            block_ids=((len(self.holder),),),
            engine_params=b"{}",
        )
        self._carry_out(self.holder.lend(loan, self.clock.now_ms()))

    def tick(self) -> None:
        self._carry_out(self.holder.tick(self.clock.now_ms(), limit=MOST_LEASES))

    def on_connected(self) -> None:
        self.connects += 1

    def on_disconnected(self) -> None:
        pass

    def on_refused(self, reason: str, message: str) -> None:
        raise AssertionError(f"the registry refuses the session: {reason}, {message}")

    def on_result(self, result: PublishResult) -> None:
        if result.status is PublishStatus.ENDED:  # somebody asked for that, and it was not heard
            self._carry_out(self.holder.end(result.lease_id, EndReason.RELEASED))
            return
        assert result.status is PublishStatus.PUBLISHED, f"{result.lease_id} was answered {result.status}"
        self.published.add(result.lease_id)

    def on_end(self, lease_id: LeaseId, reason: EndReason) -> None:
        self._carry_out(self.holder.end(lease_id, reason))

    def on_renew(self, lease_id: LeaseId, ttl_ms: int) -> None:
        self._carry_out(self.holder.renew(lease_id, ttl_ms, self.clock.now_ms()))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Announce():
                    self.session.publish(effect.draft.publication())
                case AnnounceRenewed():
                    self.session.renewed(effect.lease_id, effect.deadline_ms)
                case AnnounceLapsed():
                    self.session.lapsed(effect.lease_id)
                case AnnounceEnded():
                    self.session.ended(effect.lease_id, effect.reason)
                case RefuseRenewal():
                    self.session.refuse_renewal(effect.lease_id, effect.status)
                case _:
                    pass  # an engine's business


@asynccontextmanager
async def holding(
    client: RegistryClient,
    engine_id: str,
    clock: Clock,
    *,
    ttl_ms: int = 480_000,
    max_lifetime_ms: int = 0,
    on_deadline: OnDeadline = OnDeadline.LAPSE,
) -> AsyncIterator[HoldingLender]:
    """A lender whose session runs as long as the block. One that failed by itself is the block's error.

    Not a task group: fifty of these around one another would wrap a failed assertion fifty times.
    """
    lender = HoldingLender(
        client, engine_id, clock, ttl_ms=ttl_ms, max_lifetime_ms=max_lifetime_ms, on_deadline=on_deadline
    )
    running = asyncio.create_task(lender.session.run(), name=f"lender {engine_id}")
    try:
        yield lender
    finally:
        running.cancel()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome
