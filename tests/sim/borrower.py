"""A prefill engine that borrows: asks, waits a little, READs, proves, and uses or recomputes.

The engine steps; in each step the worker's side is looked at first (READs, seals, limits), then the scheduler decides
for each waiting request, then prompts are computed a few tokens further. One prover per rank, as one per worker.
Invariant: a block is given back, and quarantined first if a READ into it is late, before anything else can take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvlease.connector.borrower import Ask, Borrower, BorrowTerms, Compute, ComputeReason, Match, Read, Wait
from kvlease.connector.digests import chain, seed
from kvlease.connector.prover import Prover, Release
from kvlease.connector.record import RecordContent
from kvlease.connector.seal import Proof
from kvlease.registry.values import Hit, Miss, ResolveQuery

from tests.sim.borrower_turn import BorrowerTurn, Load, Stage
from tests.sim.breaks import Straight
from tests.sim.endpoint import Endpoint
from tests.sim.fabric import BlockRead, Fabric, ReadState, SlotRead
from tests.sim.judge import Fault, Judge
from tests.sim.lender import FINGERPRINTS, LenderParty
from tests.sim.memory import EngineMemory, Stamps
from tests.sim.plan import Plan
from tests.sim.pool import BlockPool, NoBlocks
from tests.sim.registry import RegistryParty
from tests.sim.tokens import BLOCK_TOKENS, STRIDE_TOKENS, Tokens
from tests.sim.world import Party


class BorrowerParty(Party):
    def __init__(
        self,
        name: str,
        plan: Plan,
        fabric: Fabric,
        registries: Sequence[RegistryParty],
        lenders: dict[str, LenderParty],
        tokens: Tokens,
        judge: Judge,
        makings: Straight,
        *,
        clock_offset_ms: int,
    ) -> None:
        super().__init__(name, clock_offset_ms=clock_offset_ms)
        self.world: Final = fabric.network.world
        self._plan, self._fabric, self._lenders = plan, fabric, lenders
        self.endpoint: Final = Endpoint(registries, first=plan.first_for(int(name[-1])))
        self._tokens, self._judge, self._makings = tokens, judge, makings
        self.preempt = plan.preempt
        self.boot()

    def boot(self) -> None:
        plan = self._plan
        self.memory = EngineMemory(ranks=plan.ranks, blocks=plan.borrower_blocks, slots=1, garbage=self.life + 1)
        self.pool = BlockPool(plan.borrower_blocks, caching=plan.borrower_caching)
        self.core = Borrower(
            BorrowTerms(
                fingerprint_hash=FINGERPRINTS[0],
                block_tokens=BLOCK_TOKENS,
                stride_tokens=STRIDE_TOKENS,
                wait_ms=plan.wait_ms,
                threshold_tokens=plan.threshold_tokens,
            )
        )
        self.provers = [Prover(plan.read_limit_ms) for _ in range(plan.ranks)]
        self.quarantine = self._makings.quarantine()
        self._turns: dict[str, BorrowerTurn] = {}
        self._late: list[tuple[str, int, BlockRead]] = []
        self._stepping = False

    def crash(self) -> None:
        self.up = False

    @property
    def idle(self) -> bool:
        return not self._turns and not self._late

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, turn: BorrowerTurn) -> None:
        """A request arrives; the registry is asked at once, and never waited for here."""
        domain = self._tokens.domain(FINGERPRINTS[0], turn.tenant)
        turn.stamps = self._tokens.stamps(turn.text, domain)
        turn.begun_ms, turn.paused_ms = self.world.now_ms, self.paused_ms
        ask = Ask(
            request_id=turn.request_id,
            tenant=turn.tenant,
            conversation=turn.conversation,
            lease_id=turn.lease_id,
            chain=chain(
                seed(FINGERPRINTS[0], turn.tenant),
                turn.text.block_hashes(),
                hash_tokens=BLOCK_TOKENS,
                stride_tokens=STRIDE_TOKENS,
                tokens=len(turn.text),
            ),
            prompt_tokens=len(turn.text),
        )
        self._turns[turn.request_id] = turn
        turn.question = self.core.begin(ask, self._now_ms())
        if turn.question is not None:
            self._ask(turn, turn.question.query(), tries=2)
        self._step_soon()

    def _ask(self, turn: BorrowerTurn, query: ResolveQuery, tries: int) -> None:
        registry, network, life = self.endpoint.registry(), self._fabric.network, self.life

        def answered(found: Hit | Miss | None) -> None:
            if found is not None:
                self._answered(turn, found)
                return
            self._judge.counts["unavailable"] += 1
            if self.endpoint.registry() is registry:
                self.endpoint.move()
            if tries > 1 and life == self.life:
                self._ask(turn, query, tries - 1)

        reply = lambda found: network.datagram(self, lambda: answered(found))  # noqa: E731
        network.datagram(registry, lambda: registry.resolve(query, reply))

    def abort(self, turn: BorrowerTurn) -> None:
        """The client has gone. A load under way is waited for: its blocks are being written."""
        if turn.request_id not in self._turns:
            return
        if turn.stage is Stage.LOADING:
            turn.aborted = True
        else:
            self._leave(turn, finished=False)

    def _answered(self, turn: BorrowerTurn, found: Hit | Miss) -> None:
        assert turn.question is not None
        match = self._makings.judge(turn.question, found)
        self.core.answered(turn.request_id, match)
        if not isinstance(match, Match):
            return
        network, lender = self._fabric.network, self._lenders.get(_address(match.content))
        if lender is None:
            self.core.probed(turn.request_id, reachable=False)
            return
        reply = lambda: network.datagram(self, lambda: self.core.probed(turn.request_id, reachable=True))  # noqa: E731
        network.datagram(lender, reply)

    # -- the engine's step ----------------------------------------------------------------------------------------

    def _step_soon(self) -> None:
        if not self._stepping:
            self._stepping = True
            self.world.after(self._plan.step_ms, self, self._step)

    def _step(self) -> None:
        self._stepping = False
        self._poll_late()
        turns = list(self._turns.values())
        for turn in turns:
            if turn.stage is Stage.LOADING:
                self._poll(turn)
        for rank, prover in enumerate(self.provers):
            for release in prover.overdue(self._now_ms()):
                self._released(self._turns[release.request_id], rank, release)
        for turn in turns:
            match turn.stage:
                case Stage.WAITING:
                    self._schedule(turn)
                case Stage.RUNNING:
                    self._compute(turn)
                case Stage.LOADING:
                    self._bounded(turn, 2 * self._plan.read_limit_ms, "in a load")
                case Stage.GONE:
                    pass
        self.pool.check()
        if not self.idle:
            self._step_soon()

    def _schedule(self, turn: BorrowerTurn) -> None:
        hits = self.pool.find(turn.stamps[BLOCK_TOKENS - 1 : len(turn.text) - 1 : BLOCK_TOKENS])
        computed = len(hits) * BLOCK_TOKENS
        decision = self.core.decide(turn.request_id, computed, self._now_ms())
        if isinstance(decision, Wait):
            self._bounded(turn, self._plan.wait_ms, "waiting for an answer")
            return
        if isinstance(decision, Compute) and decision.first:
            if decision.reason is ComputeReason.RESOLVE_TIMEOUT and self._plan.replicated:
                self.endpoint.move()  # to one that is as good
            self._judge.counts[f"refused_{decision.reason.value}"] += 1
        self.pool.touch(hits)
        try:
            taken = self.pool.take(-(-len(turn.text) // BLOCK_TOKENS) - len(hits))
        except NoBlocks:
            self.pool.give_back(reversed(hits))
            if len(turn.text) > self.pool.size * BLOCK_TOKENS:
                self._leave(turn, finished=False)
            return
        turn.blocks = [*hits, *taken]
        turn.computed = computed
        self._hits_hold(turn, hits)
        if isinstance(decision, Read):
            self._load(turn, decision)
        else:
            turn.stage = Stage.RUNNING

    def _load(self, turn: BorrowerTurn, read: Read) -> None:
        self._judge.expect(not turn.loads, Fault.READ_TWICE, turn.request_id)
        self.core.commit(turn.request_id)
        turn.begun_ms, turn.paused_ms = self.world.now_ms, self.paused_ms
        remote = self._makings.remote_blocks(read, turn.computed)
        first = turn.computed // BLOCK_TOKENS
        turn.targets = tuple(turn.blocks[first : first + len(remote)])
        turn.matched = read.matched_tokens
        turn.stage = Stage.LOADING
        turn.loads, turn.released = {}, {}
        pairs = tuple(zip(remote, turn.targets, strict=True))
        address = _address(read.content)
        ranks = {proof.seal.tp_rank for proof in read.proofs}
        for rank, prover in enumerate(self.provers):
            proofs = tuple(proof for proof in read.proofs if proof.seal.tp_rank == rank)
            if len(ranks) != len(self.provers) or not proofs:  # another shape of engine: the handshake fails
                turn.released[rank] = Release(request_id=turn.request_id, reason=ComputeReason.READ_FAILED)
                continue
            prover.posted(turn.request_id, proofs, self._now_ms())
            turn.loads[rank] = Load(
                read=BlockRead(self._fabric, address, rank, pairs, self.memory),
                proofs=proofs,
                address=address,
                early=self._makings.early_slots(self._fabric, address, proofs),
                whole_before=all(self._is_whole(address, proof) for proof in proofs),
            )
        if len(turn.released) == len(self.provers):
            self._settle(turn)

    def _poll(self, turn: BorrowerTurn) -> None:
        """What the worker of each rank sees of its READ and of its seals."""
        for rank, load in list(turn.loads.items()):
            prover, now_ms = self.provers[rank], self._now_ms()
            if turn.request_id not in prover:
                continue
            if not load.slots and load.read.state is ReadState.FAILED:
                self._released(turn, rank, prover.read_failed(turn.request_id, now_ms))
            elif not load.slots and load.read.state is ReadState.DONE:
                wanted = prover.landed(turn.request_id, now_ms)
                if isinstance(wanted, Release):
                    self._released(turn, rank, wanted)
                    continue
                load.slots = load.early or [SlotRead(self._fabric, load.address, proof) for proof in wanted.proofs]
            for index, slot in enumerate(load.slots):
                if slot.state is ReadState.PENDING:
                    continue
                good = slot.state is ReadState.DONE
                raw = self._makings.slot(load.proofs[index], slot.slot) if good else None
                release = prover.seal_read(turn.request_id, index, raw, now_ms)
                if release is not None:
                    self._released(turn, rank, release)

    def _released(self, turn: BorrowerTurn, rank: int, release: Release) -> None:
        """One rank is done with its share. The engine hears of the load when all are."""
        if rank in turn.released:
            self._judge.found(Fault.STUCK, f"{turn.request_id} was released twice by rank {rank}")
        turn.released[rank] = release
        load = turn.loads[rank]
        if release.late:
            self._judge.counts["late"] += 1
            load.read.expect_late()
            self.pool.touch(self.quarantine.enter(turn.request_id, rank, turn.targets))
            self._late.append((turn.request_id, rank, load.read))
        if release.reason is ComputeReason.SEAL_BROKEN and load.whole_before:
            self._judge.counts["overlap"] += 1
        if len(turn.released) == len(self.provers):
            self._settle(turn)

    def _settle(self, turn: BorrowerTurn) -> None:
        reasons = [release.reason for release in turn.released.values() if release.reason is not None]
        if turn.aborted:
            self._leave(turn, finished=False)
        elif reasons:
            self._judge.counts["refused"] += 1
            self._judge.counts[f"refused_{reasons[0].value}"] += 1
            turn.outcome = reasons[0].value
            self.core.read_failed(turn.request_id, reasons[0])
            self._drop_blocks(turn)
            turn.stage = Stage.WAITING
        else:
            self._judge.used(turn.request_id, self.memory, self._expected(turn, turn.computed, turn.matched))
            turn.outcome = "used"
            turn.computed = turn.matched
            self._cache(turn, 0, turn.matched)
            turn.stage = Stage.RUNNING

    def _compute(self, turn: BorrowerTurn) -> None:
        """A step of prefill: 16 tokens."""
        if self.world.chance(self.preempt):
            self._drop_blocks(turn)
            turn.stage = Stage.WAITING
            return
        stop = min(turn.computed + 16, len(turn.text))
        start, turn.computed = turn.computed, stop
        for index in range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)):
            low, high = max(start, index * BLOCK_TOKENS), min(stop, (index + 1) * BLOCK_TOKENS)
            for rank in range(self.memory.ranks):
                self.memory.write(rank, turn.blocks[index], low % BLOCK_TOKENS, turn.stamps[low:high])
        self._cache(turn, start, stop)
        if stop == len(turn.text):
            self._judge.holds(turn.request_id, self.memory, self._expected(turn, 0, stop))
            self._leave(turn, finished=True)

    # -- giving back ----------------------------------------------------------------------------------------------

    def _leave(self, turn: BorrowerTurn, *, finished: bool) -> None:
        del self._turns[turn.request_id]
        self.core.forget(turn.request_id)
        self._drop_blocks(turn)
        turn.stage = Stage.GONE
        turn.done(finished)

    def _drop_blocks(self, turn: BorrowerTurn) -> None:
        self.pool.give_back(reversed(turn.blocks))
        turn.blocks, turn.computed = [], 0

    def _poll_late(self) -> None:
        """Late READs that can land no more: landed, failed, or their lender's agent is gone."""
        for entry in list(self._late):
            request_id, rank, read = entry
            if read.state is not ReadState.PENDING:
                self._late.remove(entry)
                self._judge.counts["landed_late"] += read.landed_late
                self.pool.give_back(self.quarantine.leave(request_id, rank))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return self.world.now_ms + self.clock_offset_ms

    def _expected(self, turn: BorrowerTurn, start: int, stop: int) -> dict[int, Stamps]:
        """The local blocks of these tokens, and what each must hold."""
        positions = range(start // BLOCK_TOKENS * BLOCK_TOKENS, stop, BLOCK_TOKENS)
        return {turn.blocks[p // BLOCK_TOKENS]: turn.stamps[p : min(p + BLOCK_TOKENS, stop)] for p in positions}

    def _hits_hold(self, turn: BorrowerTurn, hits: list[int]) -> None:
        self._judge.holds(turn.request_id, self.memory, self._expected(turn, 0, len(hits) * BLOCK_TOKENS))

    def _cache(self, turn: BorrowerTurn, start: int, stop: int) -> None:
        for index in range(start // BLOCK_TOKENS, stop // BLOCK_TOKENS):
            self.pool.cache(turn.blocks[index], turn.stamps[(index + 1) * BLOCK_TOKENS - 1])

    def _is_whole(self, address: str, proof: Proof) -> bool:
        memory = self._fabric.memories.get(address)
        slot = None if memory is None else memory.slot(proof.seal.tp_rank, proof.seal.address)
        return slot is not None and int.from_bytes(slot[:8], "little") == proof.seal.value

    def _bounded(self, turn: BorrowerTurn, limit_ms: int, what: str) -> None:
        """Two steps of grace: limits are looked at once a step. Time paused does not count."""
        paused_ms = self.paused_ms - turn.paused_ms
        if self.world.now_ms - turn.begun_ms - paused_ms > limit_ms + 4 * self._plan.step_ms:
            self._judge.found(Fault.HELD_BACK, f"{turn.request_id} {what}")

    def unfinished(self) -> None:
        """The healed system is at rest: no request left, nothing in quarantine, every block back."""
        self._judge.expect(not self._turns, Fault.UNFINISHED, f"{self.name}: {sorted(self._turns)}")
        self._judge.expect(not len(self.quarantine) and not self._late, Fault.LEAK, f"{self.name}: quarantine")
        self._judge.expect(
            self.pool.free == self.pool.size, Fault.LEAK, f"{self.name}: {self.pool.size - self.pool.free} blocks"
        )
        self._judge.expect(not len(self.core), Fault.LEAK, f"{self.name}: borrows")
        self._judge.expect(not any(map(len, self.provers)), Fault.LEAK, f"{self.name}: loads")


def _address(content: RecordContent) -> str:
    """Where the lender's memory is, as the record says."""
    return content.engine_params.decode(errors="replace")
