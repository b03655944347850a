"""The borrower process: reads leased blocks into its own memory, proves each READ, and judges every word it accepts.

`python -m tests.nixl.borrower SETTINGS`, with BorrowerSettings as JSON; started by `pair.py`; reports Counts as JSON
lines. The product's borrower, prover, quarantine and seal reader decide. The seal is read once more before each READ,
only to tell which READs a lender's reuse overlapped; that reading decides nothing.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from kvlease.connector.borrower import Ask, BorrowTerms, ComputeReason, Read
from kvlease.connector.prover import ReadSeals, Release
from kvlease.connector.seal import Proof, SealVerdict, verdict
from kvlease.connector.seal_reader import SealRead, SealReader, SealReadState
from kvlease.registry.values import DEFAULT_TENANT, Hit, Incarnation, LeaseState

from tests.nixl import content, faults
from tests.nixl.agent import Memory, die_with_parent, open_agent, state_of
from tests.nixl.content import BLOCK_TOKENS, STRIDE_TOKENS, Words
from tests.nixl.judge import LocalBlocks
from tests.nixl.link import Link
from tests.nixl.messages import ENGINE, BorrowerSettings, Counts, Offer, to_line

LOCAL_BLOCKS: Final = 512
OFFERS_AT_ONCE: Final = 6
REPORT_EVERY_S: Final = 0.1
IDLE_WAIT_S: Final = 0.0001
RETRY_AFTER_S: Final = 0.05
"""Without an answer for so long, a borrower with nothing to do tries its last records again."""
LINGERING: Final = 0.25
DRAIN_S: Final = 10.0
OWN_VARIANT: Final = 1 << 40


class Phase(Enum):
    BEFORE = auto()
    """The seal is being read, to classify."""
    RESTING = auto()
    READING = auto()
    LANDED = auto()
    PROVING = auto()


@dataclass(slots=True)
class Load:
    request_id: str
    read: Read
    offer: Offer
    remote: tuple[int, ...]
    local: tuple[int, ...]
    words: Words
    before: SealRead
    begun_ms: int
    phase: Phase = Phase.BEFORE
    look_at: float = 0.0
    posted_ns: int = 0
    handle: object | None = None
    landed: bool = False
    whole_before: bool = False
    seals: dict[int, SealRead] | None = None


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def percentiles(values: list[int]) -> list[int]:
    ordered = sorted(values)
    return [ordered[int(len(ordered) * part)] for part in (0.5, 0.9, 0.99)] if ordered else []


class BorrowerProcess:
    """All loads of one process, on one thread."""

    def __init__(self, settings: BorrowerSettings) -> None:
        self._settings = settings
        self._random = random.Random(settings.seed)
        memory = Memory(LOCAL_BLOCKS, settings.block_bytes)
        self._memory = memory
        self.counts = Counts(pid=os.getpid())
        self._blocks = LocalBlocks(memory, self.counts)
        self._agent = open_agent(f"borrower-{os.getpid()}", [memory.region])
        self._seals = SealReader(self._agent)
        self._agent.register_memory(self._agent.get_reg_descs([self._seals.region], "DRAM"))
        self._link = Link(settings.socket, self._agent, settings.patience_s)
        terms = BorrowTerms(
            fingerprint_hash=content.FINGERPRINT.hash,
            block_tokens=BLOCK_TOKENS,
            stride_tokens=STRIDE_TOKENS,
            threshold_tokens=0,
        )
        self._before: dict[str, bytes | None] = {}
        self._borrower = faults.borrower(settings.fault, terms)
        self._prover = faults.prover(settings.fault, self._before, settings.read_limit_ms)
        self._quarantine = faults.quarantine(settings.fault)
        self._loads: dict[str, Load] = {}
        self._late: list[Load] = []
        self._offers: deque[Offer] = deque()
        self._remembered: deque[Offer] = deque(maxlen=OFFERS_AT_ONCE)
        self._number = 0
        self._read_us: list[int] = []
        self._seal_us: list[int] = []

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        report_at = retry_at = time.monotonic()
        while self.counts.reads < self._settings.reads or self._loads:
            moved = self._step()
            if not self._loads and not self._link.up and self._link.connect():
                self.counts.incarnations = self._link.incarnations
                self._offers.extendleft(self._remembered)
            if self.counts.reads < self._settings.reads:
                if len(self._offers) < OFFERS_AT_ONCE // 2:
                    self._link.ask(OFFERS_AT_ONCE)
                self._offers.extend(self._link.answers(0 if moved or self._offers else IDLE_WAIT_S))
                if self._offers or self._loads:
                    retry_at = time.monotonic() + RETRY_AFTER_S
                elif time.monotonic() >= retry_at:
                    self._offers.extend(self._remembered)
                while self._offers and self._link.up and len(self._loads) < self._settings.in_flight:
                    if not self._begin(self._offers.popleft()):
                        break
            if not moved and self._loads:
                time.sleep(IDLE_WAIT_S)
            if time.monotonic() >= report_at:
                report_at += REPORT_EVERY_S
                self._report()
        until = time.monotonic() + DRAIN_S
        while self._late and time.monotonic() < until:
            self._look_after_late()
            time.sleep(IDLE_WAIT_S)
        while self._blocks.end_use():
            pass
        self.counts.done = True
        self._report()

    def _report(self) -> None:
        self.counts.reading = sum(load.phase is Phase.READING for load in self._loads.values())
        self.counts.quarantined = self._quarantine.blocks
        self.counts.retired_seals = self._seals.retired
        if self.counts.done:
            self.counts.read_us = percentiles(self._read_us)
            self.counts.seal_us = percentiles(self._seal_us)
        print(to_line(self.counts), flush=True)

    def _step(self) -> bool:
        """Looks at every load once; True if any went on."""
        moved = False
        for load in list(self._loads.values()):
            if time.monotonic() < load.look_at:
                continue
            phase = load.phase
            match phase:
                case Phase.BEFORE:
                    self._look_before(load)
                case Phase.RESTING:
                    self._post(load)
                case Phase.READING:
                    self._look_read(load)
                case Phase.LANDED:
                    self._landed(load)
                case Phase.PROVING:
                    self._look_seals(load)
            moved = moved or load.phase is not phase or load.request_id not in self._loads
        for release in self._prover.overdue(now_ms()):
            self._release(self._loads[release.request_id], release)
            moved = True
        self._look_after_late()
        return moved

    def _linger(self, load: Load) -> None:
        if self._random.random() < LINGERING:
            load.look_at = time.monotonic() + self._random.uniform(0, self._settings.linger_ms / 1_000)

    # -- one load -------------------------------------------------------------------------------------------------

    def _begin(self, offer: Offer) -> bool:
        """Decides on an offer as the scheduler's side does; False if there is no room for it now."""
        self._number += 1
        request_id = f"r{self._number}"
        prompt = offer.prompt
        if self._random.random() < 0.4:
            common = prompt.fork if prompt.variant else prompt.blocks
            prompt = prompt.forked(self._random.randrange(common), OWN_VARIANT + self._number)
        prompt = prompt.longer(2)
        self._borrower.begin(
            Ask(
                request_id=request_id,
                tenant=DEFAULT_TENANT,
                conversation=None,
                lease_id=offer.lease_id,
                digests=content.digest_chain(prompt),
                prompt_tokens=prompt.blocks * BLOCK_TOKENS,
            ),
            now_ms(),
        )
        hit = Hit(
            lease_id=offer.lease_id,
            engine_id=ENGINE,
            incarnation=Incarnation(offer.incarnation),
            conversation=None,
            record=offer.record,
            matched_strides=0,
            state=LeaseState.LIVE,
            remaining_ms=0,
        )
        self._borrower.answered(request_id, hit)
        self._borrower.probed(request_id, reachable=True)
        skipped = self._random.randrange(3) if self._random.random() < 0.3 else 0
        decision = self._borrower.decide(request_id, skipped * BLOCK_TOKENS, now_ms())
        self._borrower.forget(request_id)
        if not isinstance(decision, Read) or self._link.agent_name is None:
            self.counts.not_asked += 1
            return True
        remote = decision.block_ids[0][skipped:]
        local = self._blocks.take(len(remote))
        if local is None:
            return False
        hashes = content.block_hashes(prompt)[skipped : skipped + len(remote)]
        generations = json.loads(decision.engine_params)["generations"][skipped : skipped + len(remote)]
        stamps = [content.stamp(generation, h) for generation, h in zip(generations, hashes, strict=True)]
        self._loads[request_id] = Load(
            request_id=request_id,
            read=decision,
            offer=offer,
            remote=remote,
            local=local,
            words=content.contents(stamps, self._settings.block_bytes),
            before=self._seals.post(self._link.agent_name, decision.proofs[0].seal),
            begun_ms=now_ms(),
        )
        self._remembered.append(offer)
        return True

    def _look_before(self, load: Load) -> None:
        state = self._seals.poll(load.before)
        if state is SealReadState.PENDING:
            if now_ms() - load.begun_ms < self._settings.read_limit_ms:
                return
            self._seals.give_up(load.before)
        slot = load.before.data
        self._before[load.request_id] = slot
        load.whole_before = slot is not None and verdict(load.read.proofs[0], slot) is SealVerdict.WHOLE
        load.phase = Phase.RESTING
        self._linger(load)

    def _post(self, load: Load) -> None:
        self.counts.reads += 1
        if load.offer.incarnation != self._link.incarnation:
            self.counts.old_incarnation += 1
        self._prover.posted(load.request_id, load.read.proofs, now_ms())
        load.phase = Phase.READING
        load.posted_ns = time.monotonic_ns()
        try:
            load.handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(self._memory.descriptors(load.local), "DRAM"),
                self._agent.get_xfer_descs(self._memory.descriptors(load.remote, self._link.memory_address), "DRAM"),
                self._link.agent_name or "",
                b"",
            )
            state = self._agent.transfer(load.handle)
        except Exception:  # noqa: BLE001 - NIXL's bindings raise types of their own for each way a peer can fail
            state = "ERR"
        self._saw_read(load, state)

    def _look_read(self, load: Load) -> None:
        self._saw_read(load, state_of(self._agent, load.handle))

    def _saw_read(self, load: Load, state: str) -> None:
        if state == "PROC":
            return
        if load.handle is not None:
            self._agent.release_xfer_handle(load.handle)
            load.handle = None
        if state != "DONE":
            self._release(load, self._prover.read_failed(load.request_id, now_ms()))
            return
        self._read_us.append((time.monotonic_ns() - load.posted_ns) // 1_000)
        load.landed = True
        load.phase = Phase.LANDED
        self._linger(load)

    def _landed(self, load: Load) -> None:
        answer = self._prover.landed(load.request_id, now_ms())
        if isinstance(answer, Release):
            self._release(load, answer)
            return
        self._read_seals(load, answer)

    def _read_seals(self, load: Load, asked: ReadSeals) -> None:
        load.phase = Phase.PROVING
        load.posted_ns = time.monotonic_ns()
        load.seals = {index: self._post_seal(proof) for index, proof in enumerate(asked.proofs)}
        self._look_seals(load)

    def _post_seal(self, proof: Proof) -> SealRead:
        return self._seals.post(self._link.agent_name or "", proof.seal)

    def _look_seals(self, load: Load) -> None:
        for index, seal in list((load.seals or {}).items()):
            if self._seals.poll(seal) is SealReadState.PENDING:
                continue
            if load.seals is not None:
                del load.seals[index]
            self._seal_us.append((time.monotonic_ns() - load.posted_ns) // 1_000)
            release = self._prover.seal_read(load.request_id, index, seal.data, now_ms())
            if release is not None:
                self._release(load, release)
                return

    # -- the end of a load ----------------------------------------------------------------------------------------

    def _release(self, load: Load, release: Release) -> None:
        """Judges, then lets the request use its blocks: borrowed if accepted, computed if refused."""
        counts, blocks = self.counts, load.local
        for seal in (load.seals or {}).values():
            self._seals.give_up(seal)
        del self._loads[load.request_id]
        self._before.pop(load.request_id, None)
        right = load.landed and self._blocks.hold(blocks, load.words)
        if release.reason is None:
            counts.right += right
            counts.wrong += not right
            counts.old_incarnation_accepted += load.offer.incarnation != self._link.incarnation
            self._blocks.use(blocks, load.words)
            return
        counts.refused[release.reason] = counts.refused.get(release.reason, 0) + 1
        counts.refused_right += right
        if load.whole_before and release.reason is ComputeReason.SEAL_BROKEN:
            counts.overlap += 1
            counts.overlap_wrong += not right
        fresh: tuple[int, ...] | None = blocks
        if release.late:
            counts.late += 1
            kept = self._quarantine.enter(load.request_id, 0, blocks)
            self._blocks.poison(kept)
            self._blocks.give([block for block in blocks if block not in kept])
            self._late.append(load)
            fresh = self._blocks.take(len(blocks))
        if fresh is not None:
            self._blocks.compute(fresh, load.words)
            self._blocks.use(fresh, load.words)

    def _look_after_late(self) -> None:
        """A late READ that is over, landed or not, can write no more: its blocks come back."""
        for load in list(self._late):
            if load.handle is not None:  # None: it had landed, and this borrower was too slow to say so in time
                if state_of(self._agent, load.handle) == "PROC":
                    continue
                self._agent.release_xfer_handle(load.handle)
            self._late.remove(load)
            kept = self._quarantine.leave(load.request_id, 0)
            self.counts.late_over += 1
            self.counts.late_landed += bool(kept) and not self._blocks.poisoned(kept)
            self._blocks.give(kept)


def main() -> None:
    die_with_parent()
    BorrowerProcess(BorrowerSettings(**json.loads(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
