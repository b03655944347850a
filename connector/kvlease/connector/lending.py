"""Lending on the engine's thread: carries the lease holder's effects out on the block pool, the seals and the link.

Knows the pool by its shape only, no vLLM import. Everything that safety rests on happens on the engine's thread,
synchronously and in the order of the effects: a seal is broken before its blocks can be handed out. What only makes a
lease known is left to the link's thread, and references go back to the pool a few in each step.

Invariant: `on_reuse` never raises and never calls the pool.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvlease.connector import digests
from kvlease.connector.announcer import Announcer, Standing, Told
from kvlease.connector.instruments import Instruments
from kvlease.connector.lender import LeaseHolder
from kvlease.connector.lender_effects import (
    BreakSeal,
    Effect,
    Free,
    Pin,
    Unpin,
    WriteSeal,
)
from kvlease.connector.link import Link
from kvlease.connector.loan import LenderTerms, Loan, LoanRefused, OverQuota
from kvlease.connector.request_params import RequestParams
from kvlease.connector.returns import Returns
from kvlease.connector.seal_table import SealTable
from kvlease.registry.clock import Clock
from kvlease.registry.values import EndReason, LeaseId, LeaseState, RenewStatus

POOL_REPORT_MS = 1_000
IDS_AT_ONCE = 64
RETURNED_BLOCKS = 128
"""References given back in one service: some 30 us of the pool's time."""
ORDERS_AT_ONCE = 16
"""Orders of the registry carried out in one service. The seals of those that end are broken already."""
log = logging.getLogger(__name__)


class Block(Protocol):
    """One block of the engine's pool."""

    @property
    def block_id(self) -> int: ...


class Pool(Protocol):
    """What is used of the engine's block pool (vLLM's BlockPool)."""

    @property
    def blocks(self) -> Sequence[Block]: ...
    @property
    def null_block(self) -> Block: ...
    @property
    def num_gpu_blocks(self) -> int: ...
    def get_num_free_blocks(self) -> int: ...
    def touch(self, blocks: Sequence[Block]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None: ...
    def unpin_blocks(self, blocks: Iterable[Block], on_reuse: Callable[[Block], None]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTurn:
    """What a finished request leaves behind: how many of its tokens are real, and where they lie."""

    params: RequestParams
    real_tokens: int
    block_hashes: Sequence[bytes]
    block_ids: tuple[Sequence[int], ...]
    held: tuple[list[Block], ...]
    """Per KV group, the engine's own list of the request's blocks. Of a block that is taken out of it, the request's
    reference is the taker's: the engine gives back what is still in the list when this turn is over."""
    adapter: bytes = b""
    """Version of its LoRA adapter; empty: none."""


class Lending:
    """One lender incarnation."""

    def __init__(
        self,
        terms: LenderTerms,
        *,
        hash_tokens: int,
        engine_params: dict[str, object],
        pool: Pool,
        tables: Sequence[SealTable],
        link: Link,
        clock: Clock,
        instruments: Instruments,
    ) -> None:
        self._terms = terms
        self._hash_tokens = hash_tokens
        self._engine_params = json.dumps(engine_params).encode()[1:]
        """The parameters that all leases share, as the rest of a JSON object."""
        self._null_block = pool.null_block.block_id
        self._ids: deque[LeaseId] = deque()
        self._pool = pool
        self._tables = tables
        self._link = link
        self._clock = clock
        self._instruments = instruments
        self._holder = LeaseHolder(terms, first_value=secrets.randbits(63) | 1)
        self._seeds = digests.Seeds(terms.fingerprint_hash)
        self._reported_ms = 0
        self._returns = Returns()
        self._draining = False
        self._announcer = Announcer(
            terms, link, tables, instruments, slot_of=lambda lease_id: self._holder.slot_of(lease_id)
        )
        link.break_seal = self._break_from_elsewhere
        link.break_all = self._break_all
        link.renew = self._promise_from_elsewhere

    def __len__(self) -> int:
        return len(self._holder)

    @property
    def owed_blocks(self) -> int:
        """References of ended and lapsed leases that the pool has not got back yet: a few go with each service."""
        return self._returns.blocks

    def finished(self, turn: FinishedTurn) -> LeaseId | None:
        """Lends the whole strides of a finished turn, if there is one; returns the lease's id."""
        if self._draining:
            self._instruments.not_lent.labels("draining").inc()
            return None
        terms, params = self._terms, turn.params
        chain = digests.chain(
            self._seeds.of(params.tenant, turn.adapter),
            turn.block_hashes,
            hash_tokens=self._hash_tokens,
            stride_tokens=terms.stride_tokens,
            tokens=turn.real_tokens,
        )
        strides = len(chain)
        if not strides:
            self._instruments.not_lent.labels("short").inc()
            return None
        blocks = strides * terms.stride_tokens // terms.block_tokens
        block_ids = tuple(tuple(group if len(group) == blocks else group[:blocks]) for group in turn.block_ids)
        if any(len(group) < blocks for group in turn.held) or any(self._null_block in group for group in block_ids):
            self._instruments.not_lent.labels("null_block").inc()
            return None
        lease_id = self._next_id()
        loan = Loan(
            lease_id=lease_id,
            tenant=params.tenant,
            conversation=params.conversation,
            chain=chain,
            block_ids=block_ids,
            engine_params=b'{"remote_request_id": "kvl:%b", %b' % (lease_id.encode(), self._engine_params),
            traceparent=params.traceparent,
            ttl_ms=None if params.ttl_ms is None else min(params.ttl_ms, terms.ttl_ms),
            on_deadline=params.on_deadline,
        )
        try:
            effects = self._holder.lend(loan, self._clock.now_ms())
        except LoanRefused as refusal:
            self._instruments.not_lent.labels("quota" if isinstance(refusal, OverQuota) else "limit").inc()
            return None
        pin, *others = effects
        assert isinstance(pin, Pin)
        for group in turn.held:
            del group[:blocks]  # the request's references are the lease's: the pool need not be asked
        self._carry_out(others)
        return lease_id

    def service(self) -> None:
        """Does what is due: orders of the registry, deadlines. Cheap when nothing is."""
        now_ms = self._clock.now_ms()
        link, holder, owed = self._link, self._holder, self._returns.blocks
        for _ in range(min(ORDERS_AT_ONCE, len(link.orders))):
            order = link.orders.popleft()
            self._carry_out(holder.end(order.lease_id, order.reason))
        for _ in range(min(ORDERS_AT_ONCE, len(link.renewals))):
            lease_id, (ttl_ms, promised_ms) = link.renewals.popitem()
            if promised_ms is None:
                self._carry_out(holder.renew(lease_id, ttl_ms, now_ms))
            else:
                self._carry_out(holder.keep_promise(lease_id, promised_ms, now_ms))
        free_blocks = self._free_soon()
        self._carry_out(holder.tick(now_ms, free_blocks=free_blocks))
        if free_blocks < self._terms.keep_free_blocks:
            self._carry_out(holder.ease(self._free_soon()))
        if owed:  # from before: what this service has made owed waits for the next
            self._give_back(RETURNED_BLOCKS)
        if now_ms - self._reported_ms >= POOL_REPORT_MS:
            self._reported_ms = now_ms
            self._tell(())

    def was_read(self, lease_ids: Iterable[LeaseId]) -> None:
        """Borrowers have read these leases, as far as their NIXL agents said so."""
        now_ms = self._clock.now_ms()
        for lease_id in lease_ids:
            self._holder.was_read(lease_id, now_ms)

    def give_way(self, more_blocks: int, least_blocks: int = 0) -> bool:
        """The engine lacks blocks: gives `more_blocks` back, those of live leases too; whether there were any to give.

        Gives none if `least_blocks`, which the engine needs free at once, could not be had from all of them.
        """
        owed = self._returns.blocks
        ours = owed + self._holder.live_blocks
        if not ours or least_blocks > self._pool.get_num_free_blocks() + ours:
            return False
        if more_blocks > owed:
            self._carry_out(self._holder.relieve(more_blocks - owed))
        self._give_back(more_blocks)
        return True

    def end_all(self, reason: EndReason) -> None:
        """Ends every lease and gives all blocks back. Whatever becomes of the bookkeeping, no seal is whole then."""
        try:
            self._carry_out(self._holder.end_all(reason))
            self._give_back(self._returns.blocks)
        except Exception:
            self._break_all()
            raise

    def rebase(self, terms: LenderTerms) -> None:
        """Other terms from now on. No lease of the earlier ones stays."""
        self.end_all(EndReason.WEIGHTS_CHANGED)
        self._carry_out(self._holder.tick(self._clock.now_ms()))  # what is still to be given back
        self._give_back(self._returns.blocks)
        self._terms = terms
        self._seeds = digests.Seeds(terms.fingerprint_hash)
        self._holder = LeaseHolder(terms, first_value=secrets.randbits(63) | 1)

    def drain(self) -> None:
        """The engine goes away in good order: every lease ends and none is made any more."""
        self._draining = True
        self.end_all(EndReason.DRAINED)

    def close(self) -> None:
        """Breaks every seal; the engine's memory is about to go."""
        self.end_all(EndReason.DRAINED)
        self._break_all()

    def _break_all(self) -> None:
        for table in self._tables:
            table.break_all()

    def _break_from_elsewhere(self, lease_id: LeaseId) -> bool:
        """Called from the link's thread: one look-up and one store in each table, no change of the holder.

        If the engine's thread ends this very lease and lends its slot anew in between, the new lease's seal breaks: a
        READ of it is refused, which costs a prefill and is as safe as any other.
        """
        slot = self._holder.slot_of(lease_id)
        if slot is None:
            return False
        for table in self._tables:
            table.break_seal(slot)
        return True

    def _promise_from_elsewhere(self, lease_id: LeaseId, ttl_ms: int) -> RenewStatus | int | None:
        """Called from the link's thread: looks at one lease and changes nothing."""
        return self._holder.promise(lease_id, ttl_ms, self._clock.now_ms())

    def _on_reuse(self, block: Block) -> None:
        """Called by the pool while it hands `block` out: before anyone can write to it."""
        try:
            self._carry_out(self._holder.on_reuse(block.block_id))
        except Exception:  # an exception here would lose the pool's blocks; every seal is broken instead
            for table in self._tables:
                table.break_all()
            self._instruments.faults.labels("on_reuse").inc()
            log.exception("kvlease: bookkeeping of a reused block failed; all seals are broken")

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        told: list[Told] = []
        for effect in effects:
            match effect:
                case BreakSeal():
                    for table in self._tables:
                        table.break_seal(effect.slot)
                case WriteSeal():
                    for table in self._tables:
                        table.write_value(effect.slot, effect.value)
                case Pin():
                    self._pool.touch(self._blocks(effect.blocks))
                case Free() | Unpin():
                    self._returns.owe(effect)
                case _:
                    told.append(effect)
        if told:  # the engine may be idle from here on: how things stand is told, too
            self._tell(told)

    def _free_soon(self) -> int:
        """Free blocks, those that leases have given up and the pool has not got back yet among them."""
        return self._pool.get_num_free_blocks() + self._returns.blocks

    def _give_back(self, most: int) -> None:
        for portion in self._returns.take(most):
            blocks = reversed(self._blocks(portion.blocks))
            if isinstance(portion, Free):
                self._pool.free_blocks(blocks)
            else:
                self._pool.unpin_blocks(blocks, self._on_reuse)

    def _next_id(self) -> LeaseId:
        """A random id. Each draw is a system call, so many are drawn at a time, and in the link's thread."""
        if not self._ids:
            self._draw_ids()
        if len(self._ids) == IDS_AT_ONCE // 2:
            self._link.call(self._draw_ids)
        return self._ids.popleft()

    def _draw_ids(self) -> None:
        drawn = secrets.token_bytes(16 * IDS_AT_ONCE).hex()
        self._ids.extend(LeaseId(drawn[start : start + 32]) for start in range(0, len(drawn), 32))

    def _blocks(self, ids: Sequence[int]) -> list[Block]:
        every = self._pool.blocks
        return [every[block_id] for block_id in ids]

    def _tell(self, told: Sequence[Told]) -> None:
        """Leaves the telling, and how things stand, to the link's thread."""
        holder, pool = self._holder, self._pool
        standing = Standing(
            leases=len(holder),
            lapsed=holder.count(LeaseState.LAPSED),
            pinned_blocks=holder.live_blocks + self._returns.blocks,
            free_blocks=pool.get_num_free_blocks(),
            total_blocks=pool.num_gpu_blocks,
        )
        self._link.call(self._announcer.tell, told, standing)
