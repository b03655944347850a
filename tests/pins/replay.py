"""Replays chats on a lender: the connector's lease holder on a block pool with the engine's rules, and stock's pins.

Time is the chats' own; nothing waits. A turn takes its blocks when it arrives and lends them when it ends; one that
finds no room, after leases have given way, is turned away and counted.

Invariant: pinned block-seconds are the integral of the blocks that only leases (or stock's pins) keep from others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvlease.connector.digests import Chain
from kvlease.connector.lender import LeaseHolder
from kvlease.connector.lender_effects import Effect, Free, Pin, Unpin
from kvlease.connector.loan import LenderTerms, Loan, RankTable
from kvlease.registry.values import (
    DIGEST_BYTES,
    ConversationId,
    EngineId,
    Incarnation,
    LeaseId,
    OnDeadline,
    TenantId,
)

from tests.pins.chats import BLOCK_TOKENS, Chat
from tests.sim.pool import BlockPool

STOCK_PIN_MS: Final = 480_000
TENANT: Final = TenantId("t")
TERMS: Final = LenderTerms(
    engine_id=EngineId("d"),
    incarnation=Incarnation(b"i" * 16),
    fingerprint_hash=b"f" * 16,
    block_tokens=BLOCK_TOKENS,
    stride_tokens=BLOCK_TOKENS,
    block_bytes=1,
    tables=(RankTable(pp_rank=0, tp_rank=0, address=64),),
    slots=4_096,
    max_blocks=1,
)


@dataclass(slots=True)
class Outcome:
    """What a way of keeping KV came to."""

    continued: int = 0
    """Turns that go on from an earlier one."""
    reused: int = 0
    """Of them, those whose KV was still there."""
    reused_tokens: int = 0
    turned_away: int = 0
    pinned_block_seconds: float = 0.0


@dataclass(slots=True)
class _Spoken:
    """What a conversation's turns left: their digests by lease."""

    digests: bytes = b""
    leases: dict[LeaseId, bytes] = field(default_factory=dict)


class Lender:
    """kvlease on one decode engine."""

    def __init__(self, blocks: int, **terms: object) -> None:
        most = int(blocks * 0.8)
        self._holder = LeaseHolder(replace(TERMS, max_blocks=most, **terms), first_value=1)  # type: ignore[arg-type]
        self._pool = BlockPool(blocks, caching=False)
        self._spoken: dict[int, _Spoken] = {}
        self._now_ms = 0
        self._numbers = 0
        self.outcome = Outcome()

    def advance(self, now_ms: int) -> None:
        """Deadlines up to now, each at its own time."""
        while (due := self._holder.next_deadline_ms()) is not None and due <= now_ms:
            self._pass(max(due, self._now_ms))
            self._carry_out(self._holder.tick(self._now_ms, free_blocks=self._pool.free))
        self._pass(now_ms)

    def arrives(self, chat: Chat) -> list[int] | None:
        """The turn's blocks; None if there is no room."""
        spoken = self._spoken.setdefault(chat.conversation, _Spoken())
        common = spoken.digests[: chat.common_blocks * DIGEST_BYTES]
        if common:
            self._find(spoken, common)
        if chat.blocks > self._pool.free:
            self._carry_out(self._holder.relieve(chat.blocks - self._pool.free))
        if chat.blocks > self._pool.free:
            self.outcome.turned_away += 1
            return None
        taken = self._pool.take(chat.blocks)
        self._carry_out(self._holder.ease(self._pool.free))
        return taken

    def ends(self, chat: Chat, blocks: list[int]) -> None:
        self._numbers += 1
        spoken, lease_id = self._spoken[chat.conversation], LeaseId(f"{self._numbers:06}")
        common = spoken.digests[: chat.common_blocks * DIGEST_BYTES]
        new = chat.whole_blocks - len(common) // DIGEST_BYTES
        digests = common + b"".join(f"{self._numbers:08}{n:08}".encode() for n in range(max(0, new)))
        spoken.digests = digests
        if digests and chat.whole_blocks:
            loan = Loan(
                lease_id=lease_id,
                tenant=TENANT,
                conversation=ConversationId(str(chat.conversation)),
                chain=Chain.of(digests[: chat.whole_blocks * DIGEST_BYTES]),
                block_ids=(tuple(blocks[: chat.whole_blocks]),),
                engine_params=b"",
            )
            self._carry_out(self._holder.lend(loan, self._now_ms))
            spoken.leases[lease_id] = loan.chain.digests
        self._pool.give_back(blocks)

    def _find(self, spoken: _Spoken, common: bytes) -> None:
        self.outcome.continued += 1
        for lease_id, digests in reversed(spoken.leases.items()):
            if lease_id in self._holder and digests[:DIGEST_BYTES] == common[:DIGEST_BYTES]:
                self.outcome.reused += 1
                self.outcome.reused_tokens += len(common) // DIGEST_BYTES * BLOCK_TOKENS
                self._holder.was_read(lease_id, self._now_ms)
                return

    def _pass(self, now_ms: int) -> None:
        self.outcome.pinned_block_seconds += self._holder.live_blocks * (now_ms - self._now_ms) / 1000
        self._now_ms = now_ms

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Pin(blocks=blocks):
                    self._pool.touch(blocks)
                case Free(blocks=blocks):
                    self._pool.give_back(reversed(blocks))
                case Unpin(blocks=blocks):
                    self._pool.unpin(reversed(blocks), lambda block: self._carry_out(self._holder.on_reuse(block)))
                case _:
                    pass


class Stock:
    """vLLM's own pins: 480 s from a turn's end, or until the first read, and nothing ends them before."""

    def __init__(self, blocks: int) -> None:
        self._free = blocks
        self._pins: dict[int, tuple[int, int]] = {}
        """By conversation: blocks, and when they are let go."""
        self._now_ms = 0
        self.outcome = Outcome()

    def advance(self, now_ms: int) -> None:
        for end_ms, conversation in sorted((end_ms, c) for c, (_, end_ms) in self._pins.items()):
            if end_ms <= now_ms:
                self._pass(max(end_ms, self._now_ms))
                self._let_go(conversation)
        self._pass(now_ms)

    def arrives(self, chat: Chat) -> list[int] | None:
        if chat.common_blocks:
            self.outcome.continued += 1
            if chat.conversation in self._pins:
                self.outcome.reused += 1
                self.outcome.reused_tokens += chat.common_blocks * BLOCK_TOKENS
                self._let_go(chat.conversation)
        if chat.blocks > self._free:
            self.outcome.turned_away += 1
            return None
        self._free -= chat.blocks
        return []

    def ends(self, chat: Chat, blocks: list[int]) -> None:
        self._let_go(chat.conversation)
        self._free += chat.blocks - chat.whole_blocks
        self._pins[chat.conversation] = (chat.whole_blocks, self._now_ms + STOCK_PIN_MS)

    def _let_go(self, conversation: int) -> None:
        blocks, _ = self._pins.pop(conversation, (0, 0))
        self._free += blocks

    def _pass(self, now_ms: int) -> None:
        pinned = sum(blocks for blocks, _ in self._pins.values())
        self.outcome.pinned_block_seconds += pinned * (now_ms - self._now_ms) / 1000
        self._now_ms = now_ms


def replay(engine: Lender | Stock, chats: Sequence[Chat]) -> Outcome:
    """All turns of the chats, in time."""
    running: list[tuple[int, int, list[int]]] = []
    for number, chat in enumerate(chats):
        while running and running[0][0] <= chat.arrival_ms:
            end_ms, ended, blocks = heapq.heappop(running)
            engine.advance(end_ms)
            engine.ends(chats[ended], blocks)
        engine.advance(chat.arrival_ms)
        taken = engine.arrives(chat)
        if taken is not None:
            heapq.heappush(running, (chat.end_ms, number, taken))
    return engine.outcome


HEARTBEAT: Final = {"ttl_ms": 60_000, "renewable": True}
ELASTIC: Final = {"ttl_ms": 60_000, "max_lifetime_ms": 3_600_000, "self_renewing": True}
FIXED: Final = {"ttl_ms": 480_000}
END: Final = {"on_deadline": OnDeadline.END}


def ways(blocks: int) -> dict[str, Lender | Stock]:
    """Every way of keeping KV on an engine of so many blocks."""
    keep = {"keep_free_blocks": int(blocks * 0.05)}
    return {
        "stock: 480 s, or first read": Stock(blocks),
        "fixed 480 s": Lender(blocks, **FIXED, **END, **keep),
        "fixed 480 s, lapsing": Lender(blocks, **FIXED, **keep),
        "heartbeat 60 s": Lender(blocks, **HEARTBEAT, **END, **keep),
        "heartbeat 60 s, lapsing": Lender(blocks, **HEARTBEAT, **keep),
        "elastic": Lender(blocks, **ELASTIC, **END, **keep),
        "elastic, lapsing": Lender(blocks, **ELASTIC, **keep),
        "ttl 0, lapsing": Lender(blocks, ttl_ms=0, **keep),
    }
