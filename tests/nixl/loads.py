"""Loads of a borrower: blocks read from a lender into local memory, each READ proven, each word judged when it is used.

The product's prover, quarantine and seal reader decide. The seal is read once more before each READ, only to tell which
READs a lender's reuse overlapped; that reading decides nothing. Which lease is read, and from whom, others choose.
Invariant: one thread; local blocks of a load are used by nobody else until the load is over.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from kvlease.connector.borrower import ComputeReason, Read
from kvlease.connector.prover import ReadSeals, Release
from kvlease.connector.seal import Proof, SealVerdict, verdict
from kvlease.connector.seal_reader import SealRead, SealReader, SealReadState

from tests.nixl import content, faults
from tests.nixl.agent import Memory, open_agent, state_of
from tests.nixl.content import Prompt, Words
from tests.nixl.judge import LocalBlocks
from tests.nixl.link import Link
from tests.nixl.messages import BorrowerSettings, Counts

LOCAL_BLOCKS: Final = 512
LINGERING: Final = 0.25


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
    link: Link
    incarnation: bytes
    """Of the lender that the record names."""
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


class Loads:
    """All loads of one process, on one thread."""

    def __init__(self, settings: BorrowerSettings, dice: random.Random) -> None:
        self._settings = settings
        self._random = dice
        memory = Memory(LOCAL_BLOCKS, settings.block_bytes)
        self._memory = memory
        self.counts = Counts(pid=os.getpid())
        self._blocks = LocalBlocks(memory, self.counts)
        self.agent = open_agent(f"borrower-{os.getpid()}", [memory.region])
        self._seals = SealReader(self.agent)
        self.agent.register_memory(self.agent.get_reg_descs([self._seals.region], "DRAM"))
        self._before: dict[str, bytes | None] = {}
        self._prover = faults.prover(settings.fault, self._before, settings.read_limit_ms)
        self._quarantine = faults.quarantine(settings.fault)
        self._loads: dict[str, Load] = {}
        self._late: list[Load] = []
        self._read_us: list[int] = []
        self._seal_us: list[int] = []

    def __len__(self) -> int:
        return len(self._loads)

    def using(self, link: Link) -> bool:
        """Whether a load, also one that is late, is from this lender."""
        return any(load.link is link for load in (*self._loads.values(), *self._late))

    @property
    def late(self) -> bool:
        """Whether READs that were given up may still write."""
        return bool(self._late)

    def begin(self, request_id: str, read: Read, prompt: Prompt, link: Link, skipped: int) -> bool:
        """Starts to READ what was decided but for the first `skipped` blocks; False if there is no room for it now."""
        remote = read.block_ids[0][skipped:]
        local = self._blocks.take(len(remote))
        if local is None:
            return False
        hashes = content.block_hashes(prompt)[skipped : skipped + len(remote)]
        generations = json.loads(read.engine_params)["generations"][skipped : skipped + len(remote)]
        stamps = [content.stamp(generation, h) for generation, h in zip(generations, hashes, strict=True)]
        self._loads[request_id] = Load(
            request_id=request_id,
            read=read,
            link=link,
            incarnation=read.content.incarnation,
            remote=remote,
            local=local,
            words=content.contents(stamps, self._settings.block_bytes),
            before=self._seals.post(link.agent_name or "", read.proofs[0].seal),
            begun_ms=now_ms(),
        )
        return True

    def finish(self) -> None:
        """Every use of local blocks ends, and is judged."""
        while self._blocks.end_use():
            pass
        self.counts.read_us = percentiles(self._read_us)
        self.counts.seal_us = percentiles(self._seal_us)

    def tally(self) -> Counts:
        """The counts so far."""
        self.counts.reading = sum(load.phase is Phase.READING for load in self._loads.values())
        self.counts.quarantined = self._quarantine.blocks
        self.counts.retired_seals = self._seals.retired
        return self.counts

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
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
        self.look_after_late()
        return moved

    def _linger(self, load: Load) -> None:
        if self._random.random() < LINGERING:
            load.look_at = time.monotonic() + self._random.uniform(0, self._settings.linger_ms / 1_000)

    # -- one load -------------------------------------------------------------------------------------------------

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
        if load.incarnation != load.link.incarnation:
            self.counts.old_incarnation += 1
        self._prover.posted(load.request_id, load.read.proofs, now_ms())
        load.phase = Phase.READING
        load.posted_ns = time.monotonic_ns()
        try:
            load.handle = self.agent.initialize_xfer(
                "READ",
                self.agent.get_xfer_descs(self._memory.descriptors(load.local), "DRAM"),
                self.agent.get_xfer_descs(self._memory.descriptors(load.remote, load.link.memory_address), "DRAM"),
                load.link.agent_name or "",
                b"",
            )
            state = self.agent.transfer(load.handle)
        except Exception:  # noqa: BLE001 - NIXL's bindings raise types of their own for each way a peer can fail
            state = "ERR"
        self._saw_read(load, state)

    def _look_read(self, load: Load) -> None:
        self._saw_read(load, state_of(self.agent, load.handle))

    def _saw_read(self, load: Load, state: str) -> None:
        if state == "PROC":
            return
        if load.handle is not None:
            self.agent.release_xfer_handle(load.handle)
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
        load.seals = {index: self._post_seal(load, proof) for index, proof in enumerate(asked.proofs)}
        self._look_seals(load)

    def _post_seal(self, load: Load, proof: Proof) -> SealRead:
        return self._seals.post(load.link.agent_name or "", proof.seal)

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
            counts.old_incarnation_accepted += load.incarnation != load.link.incarnation
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

    def look_after_late(self) -> None:
        """A late READ that is over, landed or not, can write no more: its blocks come back."""
        for load in list(self._late):
            if load.handle is not None:  # None: it had landed, and this borrower was too slow to say so in time
                if state_of(self.agent, load.handle) == "PROC":
                    continue
                self.agent.release_xfer_handle(load.handle)
            self._late.remove(load)
            kept = self._quarantine.leave(load.request_id, 0)
            self.counts.late_over += 1
            self.counts.late_landed += bool(kept) and not self._blocks.poisoned(kept)
            self._blocks.give(kept)
