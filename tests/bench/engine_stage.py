"""What stands around the connector in a benchmark of its engine thread: vLLM's block pool, a link to a real registry,
made-up turns and prompts.

The pool is vLLM's own, its blocks cached by hash as after a real prefill. Everything of kvlease is the product's; the
lenders' side channel, which belongs to an engine, answers yes. Runs on one thread, which plays the engine's.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvlease.connector.borrower import Ask, BorrowTerms, ComputeReason, Question, Wait
from kvlease.connector.borrowing import ArrivedRequest, Borrowing
from kvlease.connector.digests import Chain, fingerprint
from kvlease.connector.instruments import Instruments
from kvlease.connector.journal import Journal
from kvlease.connector.lending import FinishedTurn, Lending
from kvlease.connector.link import EndOrder, Link
from kvlease.connector.loan import LenderTerms, RankTable
from kvlease.connector.probe import LenderProbe, Peer
from kvlease.connector.request_params import RequestParams
from kvlease.connector.seal_table import SealTable
from kvlease.connector.settings import ConnectorSettings
from kvlease.registry.clock import SystemClock
from kvlease.registry.telemetry import configure_tracing
from kvlease.registry.values import (
    DEFAULT_TENANT,
    ConversationId,
    EndReason,
    Engine,
    EngineId,
    Incarnation,
    LeaseId,
)

from tests.bench.payloads import BLOCK_BYTES, BLOCK_TOKENS, NEXT_TURN_STRIDES, STRIDE_TOKENS

HASH_BYTES: Final = 32
PATIENCE_MS: Final = 5_000
"""For answers of the registry: the benchmark waits for them, since a time-out would not be what it measures."""
WAIT_S: Final = 20.0
LOOK_S: Final = 0.000_2
BLOCKS_PER_STRIDE: Final = STRIDE_TOKENS // BLOCK_TOKENS
ENGINE_PARAMS: Final[dict[str, object]] = {
    "remote_engine_id": "bench-decode",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "transfer_mode": "pull",
}


class OpenSideChannel:
    """An engine that is there."""

    async def answers_for(self, peer: Peer) -> bool:
        return True

    async def close(self) -> None:
        return None


class Late(RuntimeError):
    """Something the benchmark waits for did not happen in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeTurn:
    """A finished turn, and the blocks that its request was given."""

    params: RequestParams
    tokens: int
    block_hashes: Sequence[bytes]
    blocks: Sequence[Any]
    held: list[Any]
    """Those that it still has a reference on."""


@dataclass(frozen=True, slots=True)
class _Hashed:
    """What the pool looks at of a request whose blocks it caches."""

    block_hashes: Sequence[bytes]


class Stage:
    """One engine that lends and borrows. `close` ends its thread."""

    def __init__(self, registry: str, *, blocks: int, leases: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.pool: Final[Any] = BlockPool(num_gpu_blocks=blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self._table: Final = SealTable.create(4 * leases)
        self._fingerprint: Final = fingerprint({"model": "bench"})
        self._clock: Final = SystemClock()
        self._numbers = 0
        settings = ConnectorSettings.load({"registry": registry, "resolve_wait_ms": PATIENCE_MS})
        probe = LenderProbe(OpenSideChannel(), self._clock, settings.probe_ms)
        self.link: Final = Link(settings, self._clock, Journal(configure_tracing("bench")), probe)
        instruments = Instruments()
        self._engine: Final = Engine(
            engine_id=EngineId("bench-decode"),
            incarnation=Incarnation(secrets.token_bytes(16)),
            fingerprint=self._fingerprint,
        )
        terms = LenderTerms(
            engine_id=self._engine.engine_id,
            incarnation=self._engine.incarnation,
            fingerprint_hash=self._fingerprint.hash,
            block_tokens=BLOCK_TOKENS,
            stride_tokens=STRIDE_TOKENS,
            block_bytes=BLOCK_BYTES,
            tables=(RankTable(pp_rank=0, tp_rank=0, address=self._table.address),),
            slots=self._table.slots,
            max_blocks=blocks,
        )
        self.lending: Final = Lending(
            terms,
            hash_tokens=BLOCK_TOKENS,
            engine_params=ENGINE_PARAMS,
            pool=self.pool,
            tables=(self._table,),
            link=self.link,
            clock=self._clock,
            instruments=instruments,
        )
        self._terms: Final = BorrowTerms(
            fingerprint_hash=self._fingerprint.hash,
            block_tokens=BLOCK_TOKENS,
            stride_tokens=STRIDE_TOKENS,
            wait_ms=PATIENCE_MS,
        )
        self.borrowing: Final = Borrowing(
            self._terms,
            hash_tokens=BLOCK_TOKENS,
            pool=self.pool,
            link=self.link,
            clock=self._clock,
            instruments=instruments,
        )

    def open(self) -> None:
        """Starts the link and the lender's session. Raises Late."""
        self.link.start()
        self._answers(ConversationId("nobody"), ComputeReason.UNKNOWN)
        self.link.lend_as(self._engine)

    def close(self) -> None:
        self.lending.close()
        self.link.close()
        self._table.close()

    # -- turns -------------------------------------------------------------------------------------------------------

    def turn(self, tokens: int, *, ttl_ms: int | None = None, after: MadeTurn | None = None) -> MadeTurn:
        """A finished turn of a conversation of its own, or one that extends `after` by the tokens that are more."""
        count = tokens // BLOCK_TOKENS
        known = list(after.block_hashes) if after else []
        hashes = known + [secrets.token_bytes(HASH_BYTES) for _ in range(count - len(known))]
        shared = list(after.blocks) if after else []
        self.pool.touch(shared)
        blocks = shared + self.pool.get_new_blocks(count - len(shared))
        self.pool.cache_full_blocks(_Hashed(hashes), blocks, len(shared), count, BLOCK_TOKENS, 0)
        self._numbers += 1
        conversation = after.params.conversation if after else ConversationId(f"chat-{self._numbers}")
        params = RequestParams(tenant=DEFAULT_TENANT, conversation=conversation, ttl_ms=ttl_ms)
        return MadeTurn(params=params, tokens=tokens, block_hashes=hashes, blocks=blocks, held=list(blocks))

    def finished(self, turn: MadeTurn) -> FinishedTurn:
        """As vLLM tells of it: its blocks listed anew."""
        return FinishedTurn(
            params=turn.params,
            real_tokens=turn.tokens,
            block_hashes=turn.block_hashes,
            block_ids=([block.block_id for block in turn.blocks],),
            held=(turn.held,),
        )

    def lend(self, turn: MadeTurn) -> LeaseId:
        """Lends it and lets its request go."""
        lease_id = self.lending.finished(self.finished(turn))
        assert lease_id is not None
        self.give_back(turn)
        return lease_id

    def give_back(self, turn: MadeTurn) -> None:
        """The request that made this turn is gone: what it still holds goes back to the pool, as vLLM does."""
        self.pool.free_blocks(reversed(turn.held))
        turn.held.clear()

    def order_end(self, lease_id: LeaseId) -> None:
        """The registry wants this lease ended."""
        self.link.orders.append(EndOrder(lease_id=lease_id, reason=EndReason.RELEASED))

    # -- prompts -----------------------------------------------------------------------------------------------------

    def prompt(self, turn: MadeTurn) -> ArrivedRequest:
        """The next turn's prompt."""
        self._numbers += 1
        more = [secrets.token_bytes(HASH_BYTES) for _ in range(NEXT_TURN_STRIDES * BLOCKS_PER_STRIDE)]
        hashes = [*turn.block_hashes, *more]
        return ArrivedRequest(
            request_id=f"request-{self._numbers}",
            params=turn.params,
            prompt_tokens=len(hashes) * BLOCK_TOKENS + 1,
            block_hashes=hashes,
        )

    def published(self, turn: MadeTurn) -> None:
        """Returns when the registry resolves this turn. Raises Late."""
        self._answers(turn.params.conversation, ComputeReason.DIVERGED)  # a hit, for a chain without a stride

    def answer_is_here(self, to: str | None = None) -> None:
        """Returns when an answer of the registry waits for the engine's thread, or that to request `to` was taken.

        Raises Late.
        """

        def here() -> bool:
            return bool(self.link.answers) or (to is not None and not isinstance(self.borrowing.decide(to, 0), Wait))

        _until(here, "an answer to a resolve")

    def _answers(self, conversation: ConversationId | None, wanted: ComputeReason) -> None:
        ask = Ask(
            request_id="look",
            tenant=DEFAULT_TENANT,
            conversation=conversation,
            lease_id=None,
            chain=Chain.of(b""),
            prompt_tokens=0,
        )
        question = Question(ask=ask, terms=self._terms)

        def as_wanted() -> bool:
            self.link.resolve("look", question)
            self.answer_is_here()
            return self.link.answers.popleft().found is wanted

        _until(as_wanted, f"the registry to answer {wanted} for {conversation}")


def _until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > limit:
            raise Late(f"waited {WAIT_S:.0f} s for {what}")
        time.sleep(LOOK_S)
