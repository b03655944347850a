"""The lender process: a real NIXL agent over block memory and a seal table, reusing its blocks as fast as it can.

`python -m tests.nixl.lender SETTINGS`, with LenderSettings as JSON; started by `pair.py`. The product's core and seal
table decide about leases; here are only the pool, the writing of blocks and the handing out of records. Blocks are
zeroed and then written in pieces, so that READs fall between them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import selectors
import signal
import socket
import sys
import time
from collections import deque
from multiprocessing.connection import Connection
from types import FrameType
from typing import Final

from kvlease.connector.lender import LeaseHolder
from kvlease.connector.loan import LenderTerms, Loan, LoanRefused, RankTable
from kvlease.connector.seal_table import SealTable, sweep
from kvlease.registry.values import (
    DEFAULT_TENANT,
    INCARNATION_BYTES,
    ConversationId,
    EndReason,
    EngineId,
    Incarnation,
    LeaseId,
    Publication,
    Record,
)

from tests.nixl import content, faults
from tests.nixl.agent import Memory, die_with_parent, open_agent, same_addresses_at_each_start
from tests.nixl.content import BLOCK_TOKENS, STRIDE_BLOCKS, STRIDE_TOKENS, Prompt
from tests.nixl.lending import Lending
from tests.nixl.messages import Greeting, LenderSettings, Offer, Offers, Ready, Wants, Workload, to_line
from tests.nixl.pool import Pool

PIECES: Final = 4
"""Stores per block, with other work between them."""
OFFERS: Final = 48
"""Leases handed out: the last ones announced, held still or not."""
FRESH_OFFERS: Final = 8
"""Half of what is handed out is among these, so that the lender's speed alone cannot make every READ too late."""
MIXED_UP: Final = 0.05
"""Share of offers in which one lease's digests stand beside another one's body, as by a faulty registry."""
SAME_SLOT_BLOCKS: Final = 8


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Lender:
    """One incarnation."""

    def __init__(self, settings: LenderSettings, memory: Memory, table: SealTable) -> None:
        self._random = random.Random(settings.seed)
        self._settings = settings
        self._memory = memory
        self._table = table
        self._workload = Workload(settings.workload)
        self.incarnation = Incarnation(secrets.token_bytes(INCARNATION_BYTES))
        blocks = SAME_SLOT_BLOCKS if self._workload is Workload.SAME_SLOT else settings.blocks
        terms = LenderTerms(
            engine_id=EngineId(settings.engine),
            incarnation=self.incarnation,
            fingerprint_hash=content.FINGERPRINT.hash,
            block_tokens=BLOCK_TOKENS,
            stride_tokens=STRIDE_TOKENS,
            block_bytes=settings.block_bytes,
            tables=(RankTable(pp_rank=0, tp_rank=0, address=table.address),),
            slots=1 if self._workload is Workload.SAME_SLOT else table.slots,
            max_blocks=blocks if self._workload is Workload.SAME_SLOT else blocks // 2,
            renewable=True,
        )
        self._pool = Pool(blocks)
        self._lending = self.make_lending(faults.lease_holder(settings.fault, terms, secrets.randbits(64) | 1))
        self._prompts: dict[LeaseId, Prompt] = {}
        self._recent: deque[Prompt] = deque(maxlen=16)
        self._offers: deque[Offer] = deque(maxlen=OFFERS if self._workload is Workload.CHURN else 1)
        self._generations = [0] * blocks
        self._generation = 0
        self._conversations = 0
        self._end_asked = False
        self._metadata = b""
        self._selector = selectors.DefaultSelector()
        self._stopped = False

    def make_lending(self, holder: LeaseHolder) -> Lending:
        """How effects are carried out."""
        return faults.lending(self._settings.fault, holder, self._pool, self._table, self._announced)

    # -- borrowers ------------------------------------------------------------------------------------------------

    def listen(self, listener: socket.socket, metadata: bytes) -> None:
        self._metadata = metadata
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, listener)

    def stop(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True

    def end_one_lease(self, number: int, frame: FrameType | None) -> None:
        self._end_asked = True

    def serve(self, wait_s: float = 0.0) -> None:
        """Answers borrowers that have asked; waits this long for one to ask."""
        for key, _ in self._selector.select(wait_s):
            peer = key.data
            if isinstance(peer, Connection):
                try:
                    asked = peer.recv()
                    if isinstance(asked, Wants):
                        peer.send(Offers(offers=self._choose(asked.count)))
                except (EOFError, OSError):
                    self._selector.unregister(peer)
                    peer.close()
                continue
            accepted = Connection(peer.accept()[0].detach())
            greeting = Greeting(
                agent_metadata=self._metadata, memory_address=self._memory.address, incarnation=self.incarnation
            )
            try:
                accepted.send(greeting)
            except OSError:  # it did not wait so long
                accepted.close()
                continue
            self._selector.register(accepted, selectors.EVENT_READ, accepted)

    def _choose(self, count: int) -> tuple[Offer, ...]:
        if not self._offers:
            return ()
        every, fresh = list(self._offers), list(self._offers)[-FRESH_OFFERS:]
        chosen = [self._random.choice(fresh if self._random.random() < 0.5 else every) for _ in range(count)]
        return tuple(self._mixed_up(offer) if self._random.random() < MIXED_UP else offer for offer in chosen)

    def _mixed_up(self, offer: Offer) -> Offer:
        other = self._random.choice(self._offers)
        if len(other.record.digests) != len(offer.record.digests):
            return offer
        record = Record(digests=other.record.digests, body=offer.record.body)
        return Offer(lease_id=offer.lease_id, incarnation=self.incarnation, record=record, prompt=other.prompt)

    def _announced(self, publication: Publication) -> None:
        prompt = self._prompts[publication.lease_id]
        self._offers.append(
            Offer(
                lease_id=publication.lease_id,
                incarnation=self.incarnation,
                record=publication.record,
                prompt=prompt,
            )
        )

    # -- the engine -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        turn = {
            Workload.CHURN: self._churn,
            Workload.SAME_SLOT: self._same_slot,
            Workload.ONE_LEASE: self._one_lease,
        }[self._workload]
        while not self._stopped:
            self.serve()
            turn()
        self._table.break_all()

    def _churn(self) -> None:
        """One turn: deadlines, perhaps an end or a renewal, then blocks taken, written and lent."""
        holder, carry_out, dice = self._lending.holder, self._lending.carry_out, self._random.random()
        carry_out(holder.tick(now_ms()))
        if self._offers and dice < 0.15:
            lease_id = self._random.choice(self._offers).lease_id
            carry_out(holder.end(lease_id, EndReason.RELEASED) if dice < 0.08 else holder.renew(lease_id, 5, now_ms()))
        prompt = self._next_prompt()
        hit = self._pool.prefix(content.block_hashes(prompt))
        self._pool.touch(hit)
        wanted = prompt.blocks - len(hit)
        if wanted > self._pool.free_blocks:
            carry_out(holder.relieve(wanted - self._pool.free_blocks))
        self._recent.append(prompt)
        blocks = hit + self._write(prompt, len(hit), remember=self._random.random() < 0.8)
        conversation = ConversationId(f"c{prompt.conversation}") if not prompt.variant and dice < 0.5 else None
        self._lend(LeaseId(f"l{self._generation}"), prompt, blocks, conversation, self._random.randrange(20))
        self._pool.free(blocks[::-1])

    def _next_prompt(self) -> Prompt:
        dice = self._random.random()
        if self._recent and dice < 0.5:
            prompt = self._random.choice(self._recent)
            if dice < 0.25 and prompt.blocks <= 6:
                return prompt.longer(STRIDE_BLOCKS)
            if not prompt.variant:
                return prompt.forked(STRIDE_BLOCKS * self._random.randrange(1, 2), self._generation + 1)
        self._conversations += 1
        return Prompt(conversation=self._conversations, blocks=STRIDE_BLOCKS * self._random.randrange(2, 5))

    def _same_slot(self) -> None:
        """Writes the same prompt in the same blocks, lends it, ends it, writes another prompt over it."""
        prompt = Prompt(conversation=1, blocks=SAME_SLOT_BLOCKS)
        blocks = self._write(prompt, 0, remember=False, generation=0)
        lease_id = LeaseId("same")
        self._lend(lease_id, prompt, blocks, None, 1_000_000)
        self._pool.free(blocks[::-1])
        self._rest(0.01)
        self._lending.carry_out(self._lending.holder.end(lease_id, EndReason.RELEASED))
        other = Prompt(conversation=2, blocks=SAME_SLOT_BLOCKS)
        self._pool.free(self._write(other, 0, remember=False)[::-1])
        self._rest(0.002)

    def _rest(self, longest_s: float) -> None:
        until = time.monotonic() + self._random.uniform(0, longest_s)
        while (left := until - time.monotonic()) > 0:
            self.serve(left)

    def _one_lease(self) -> None:
        prompt = Prompt(conversation=1, blocks=8)
        lease_id = LeaseId("one")
        if not self._offers:
            blocks = self._write(prompt, 0, remember=False)
            self._lend(lease_id, prompt, blocks, None, 1_000_000)
            self._pool.free(blocks[::-1])
        elif self._end_asked and lease_id in self._lending.holder:
            self._lending.carry_out(self._lending.holder.end(lease_id, EndReason.RELEASED))
            other = Prompt(conversation=2, blocks=8)
            self._pool.free(self._write(other, 0, remember=False))
        self.serve(0.05)

    def _write(self, prompt: Prompt, start: int, *, remember: bool, generation: int | None = None) -> tuple[int, ...]:
        """Takes blocks for the prompt from block `start` on and writes them: zeros first, then piece by piece."""
        hashes = content.block_hashes(prompt)[start:]
        blocks = self._pool.take(len(hashes))
        self._generation += 1
        used = self._generation if generation is None else generation
        words = content.contents([content.stamp(used, block_hash) for block_hash in hashes], self._memory.block_bytes)
        for block in blocks:
            self._memory.words[block] = 0
        piece = words.shape[1] // PIECES
        for first in range(0, words.shape[1], piece):
            for row, block in enumerate(blocks):
                self._memory.words[block, first : first + piece] = words[row, first : first + piece]
            self.serve()
        for block, block_hash in zip(blocks, hashes, strict=True):
            self._generations[block] = used
            if remember:
                self._pool.remember(block, block_hash)
        self._lending.written()
        return blocks

    def _lend(
        self,
        lease_id: LeaseId,
        prompt: Prompt,
        blocks: tuple[int, ...],
        conversation: ConversationId | None,
        ttl_ms: int,
    ) -> None:
        loan = Loan(
            lease_id=lease_id,
            tenant=DEFAULT_TENANT,
            conversation=conversation,
            chain=content.digest_chain(prompt),
            block_ids=(blocks,),
            engine_params=self.engine_params([self._generations[block] for block in blocks]),
            ttl_ms=ttl_ms,
        )
        self._prompts = {offer.lease_id: offer.prompt for offer in self._offers} | {lease_id: prompt}
        with contextlib.suppress(LoanRefused):
            self._lending.carry_out(self._lending.holder.lend(loan, now_ms()))

    def engine_params(self, generations: list[int]) -> bytes:
        """What a borrower's judge needs to know of the blocks."""
        return json.dumps({"generations": generations}).encode()


def main() -> None:
    die_with_parent()
    same_addresses_at_each_start()
    settings = LenderSettings(**json.loads(sys.argv[1]))
    sweep()
    table = SealTable.create(slots=256)
    try:
        memory = Memory(settings.blocks, settings.block_bytes)
        lender = Lender(settings, memory, table)
        signal.signal(signal.SIGTERM, lender.stop)
        signal.signal(signal.SIGUSR1, lender.end_one_lease)
        agent = open_agent(f"lender-{os.getpid()}", [memory.region, (table.address, table.size, 0, "")])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(settings.socket)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(settings.socket)
            listener.listen()
            lender.listen(listener, agent.get_agent_metadata())
            ready = Ready(
                pid=os.getpid(),
                table_address=table.address,
                memory_address=memory.address,
                shared_file=str(table.path),
            )
            print(to_line(ready), flush=True)
            lender.run()
    finally:
        table.close()


if __name__ == "__main__":
    main()
