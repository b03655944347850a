"""A decode engine that lends: serves turns, keeps their blocks on loan, and carries the lease holder's effects out.

The engine's order of doings is the real one: blocks are handed out first (and lapsed leases told), their bytes are
written a little later and token by token, a finished turn is lent before its own references go.
Invariant: effects that safety rests on are carried out in the order given, at once, on the engine's own thread;
references go back to the pool a few in each step, and what is told goes through the link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvlease.connector.digests import chain, seed
from kvlease.connector.lender import LeaseHolder
from kvlease.connector.lender_effects import (
    BreakSeal,
    Effect,
    Free,
    Pin,
    Unpin,
    WriteSeal,
)
from kvlease.connector.loan import LenderTerms, Loan, LoanRefused, RankTable
from kvlease.connector.seal import slot_offset
from kvlease.registry.errors import KvleaseError
from kvlease.registry.values import (
    ConversationId,
    EndReason,
    Engine,
    EngineId,
    Fingerprint,
    Incarnation,
    LeaseId,
    LeaseState,
    PublishResult,
    TenantId,
)

from tests.sim.breaks import Straight
from tests.sim.endpoint import Endpoint
from tests.sim.fabric import Fabric
from tests.sim.judge import Fault, Judge
from tests.sim.lender_link import LenderLink
from tests.sim.lender_returns import LenderReturns
from tests.sim.lifetimes import Lifetimes
from tests.sim.memory import TABLE_ADDRESS, EngineMemory
from tests.sim.plan import Plan
from tests.sim.pool import BlockPool, NoBlocks
from tests.sim.promises import Promises
from tests.sim.session import LenderSession, Registry
from tests.sim.tokens import BLOCK_TOKENS, STRIDE_TOKENS, Text, Tokens
from tests.sim.world import Party

FINGERPRINTS: Final = (b"fingerprint-v001", b"fingerprint-v002")
"""Of the model that everybody starts with, and of the one after a weight update."""


@dataclass(slots=True, kw_only=True)
class LenderTurn:
    """One turn to serve: the prompt and, after it, the answer, token by token. `done` is told the lease, if any."""

    tenant: TenantId
    conversation: ConversationId | None
    text: Text
    prompt_tokens: int
    done: Callable[[LeaseId | None], None]
    stamps: tuple[int, ...] = ()
    blocks: list[int] = field(default_factory=list)
    written: int = 0
    aborted: bool = False


class LenderParty(Party):
    def __init__(
        self,
        name: str,
        plan: Plan,
        fabric: Fabric,
        registries: Sequence[Registry],
        tokens: Tokens,
        judge: Judge,
        makings: Straight,
        promises: Promises,
        *,
        clock_offset_ms: int,
        engine_id: str = "",
    ) -> None:
        """`engine_id`: that of another lender, if it was started a second time by mistake."""
        super().__init__(name, clock_offset_ms=clock_offset_ms)
        self.engine_id: Final = EngineId(engine_id or name)
        self._promises: Final = promises
        self.world: Final = fabric.network.world
        self._plan, self._fabric = plan, fabric
        self.endpoint: Final = Endpoint(registries, first=plan.first_for(int(name[-1])))
        self._tokens, self._judge, self._makings = tokens, judge, makings
        self._fingerprint = FINGERPRINTS[0]
        self.boot()

    def boot(self) -> None:
        """A new incarnation: other memory at the same addresses, nothing held, all values new."""
        plan, rng = self._plan, self.world.rng
        self._incarnation = Incarnation(rng.randbytes(16))
        self.memory = EngineMemory(
            ranks=plan.ranks, blocks=plan.lender_blocks, slots=plan.slots, garbage=self.life + 1, on_write=self._wrote
        )
        self.pool = BlockPool(plan.lender_blocks, caching=plan.lender_caching)
        terms = LenderTerms(
            engine_id=self.engine_id,
            incarnation=self._incarnation,
            fingerprint_hash=self._fingerprint,
            block_tokens=BLOCK_TOKENS,
            stride_tokens=STRIDE_TOKENS,
            block_bytes=1,
            tables=tuple(RankTable(pp_rank=0, tp_rank=rank, address=TABLE_ADDRESS) for rank in range(plan.ranks)),
            slots=plan.slots,
            max_blocks=plan.max_leased,
            ttl_ms=plan.ttl_ms,
            on_deadline=plan.on_deadline,
            renewable=plan.renewable,
            max_lifetime_ms=plan.max_lifetime_ms,
        )
        self.holder: LeaseHolder = self._makings.holder(terms, rng.getrandbits(63) + 1)
        self._returns = LenderReturns(self, self.pool, self._makings, self._admit)
        self._sealings: dict[int, int] = {}
        self._queue: deque[LenderTurn] = deque()
        self._running: list[LenderTurn] = []
        self._tick_ms: int | None = None
        self._leases = 0
        self.lifetimes = Lifetimes(self._judge, self, plan.max_lifetime_ms)
        mirror = self._makings.mirror()
        self.session = LenderSession(self._fabric.network, self, self, self.endpoint, mirror, plan)
        self.link = LenderLink(self._fabric.network, self, self.holder, self.memory, self.session)

    def start(self) -> None:
        self._fabric.memories[self.name] = self.memory
        self.session.start()

    def crash(self) -> None:
        """Everything is gone; the address answers nothing until the next incarnation."""
        self.up = False
        self._fabric.memories[self.name] = None
        if self.session.line is not None:
            self.session.line.close()

    def update_weights(self) -> None:
        """The next incarnation computes other KV from the same tokens."""
        self._fingerprint = FINGERPRINTS[1]

    @property
    def updated(self) -> bool:
        return self._fingerprint != FINGERPRINTS[0]

    @property
    def idle(self) -> bool:
        return not self._running and not self._queue and not self._returns.blocks

    # -- turns ----------------------------------------------------------------------------------------------------

    def serve(self, turn: LenderTurn) -> None:
        turn.stamps = self._tokens.stamps(turn.text, self._tokens.domain(self._fingerprint, turn.tenant))
        self._queue.append(turn)
        self._admit()

    def abort(self, turn: LenderTurn) -> None:
        """The client has gone; what is computed is still lent."""
        turn.aborted = True

    def _admit(self) -> None:
        while self._queue:
            turn = self._queue[0]
            stamps = turn.stamps
            hits = self.pool.find(stamps[BLOCK_TOKENS - 1 : turn.prompt_tokens - 1 : BLOCK_TOKENS])
            self.pool.touch(hits)
            wanted = -(-turn.prompt_tokens // BLOCK_TOKENS) - len(hits)
            taken = self._take(wanted)
            if taken is None:
                self.pool.give_back(reversed(hits))
                if self._running:
                    return
                self._queue.popleft()  # larger than the engine: refused
                turn.done(None)
                continue
            self._queue.popleft()
            turn.blocks = [*hits, *taken]
            turn.written = len(hits) * BLOCK_TOKENS
            self._running.append(turn)
            self._compute(turn)

    def _take(self, count: int) -> list[int] | None:
        """Blocks from the pool; leases make room if it has too few."""
        if count > self.pool.free + self._returns.blocks:
            self.carry_out(self.holder.relieve(count - self.pool.free - self._returns.blocks))
        if count > self.pool.free:
            self._returns.give_back(count - self.pool.free)
        try:
            return self.pool.take(count)
        except NoBlocks:
            return None

    def _compute(self, turn: LenderTurn) -> None:
        world = self.world
        world.after(world.between(1, 6), self, lambda: self._computed(turn, world.between(2, 7)))

    def _computed(self, turn: LenderTurn, count: int) -> None:
        """Some more tokens are written: within the blocks held, one block at a time."""
        stop = min(turn.written + count, len(turn.text))
        if turn.aborted or turn.written >= len(turn.text):
            self._finish(turn)
            return
        if stop > len(turn.blocks) * BLOCK_TOKENS:
            taken = self._take(1)
            if taken is None:
                self._finish(turn)
                return
            turn.blocks += taken
            self._compute(turn)  # handed out now, written later
            return
        stamps = turn.stamps
        position = turn.written
        while position < stop:
            index, offset = divmod(position, BLOCK_TOKENS)
            end = min(stop, (index + 1) * BLOCK_TOKENS)
            for rank in range(self.memory.ranks):
                self.memory.write(rank, turn.blocks[index], offset, stamps[position:end])
            if end == (index + 1) * BLOCK_TOKENS:
                self.pool.cache(turn.blocks[index], stamps[end - 1])
            position = end
        turn.written = stop
        self._compute(turn)

    def _finish(self, turn: LenderTurn) -> None:
        self._running.remove(turn)
        stamps = turn.stamps
        held = {
            block: stamps[start : start + BLOCK_TOKENS]
            for block, start in zip(turn.blocks, range(0, turn.written, BLOCK_TOKENS), strict=False)
        }
        whole = turn.written // BLOCK_TOKENS
        self._judge.holds(self.name, self.memory, dict(list(held.items())[:whole]))
        lease_id = self._lend(turn)
        self.pool.give_back(reversed(turn.blocks))
        self._checked()
        self._arm()
        turn.done(lease_id)
        self._admit()

    def _lend(self, turn: LenderTurn) -> LeaseId | None:
        blocks = turn.written // STRIDE_TOKENS * (STRIDE_TOKENS // BLOCK_TOKENS)
        self._leases += 1
        lease_id = LeaseId(f"{self.name}.{self.life}.{self._leases}")
        loan = Loan(
            lease_id=lease_id,
            tenant=turn.tenant,
            conversation=turn.conversation,
            chain=chain(
                seed(self._fingerprint, turn.tenant),
                turn.text.block_hashes(),
                hash_tokens=BLOCK_TOKENS,
                stride_tokens=STRIDE_TOKENS,
                tokens=turn.written,
            ),
            block_ids=(tuple(turn.blocks[:blocks]),),
            engine_params=self.name.encode(),  # where its memory is
        )
        try:
            effects = self.holder.lend(loan, self.lender_now_ms())
        except LoanRefused:
            self._judge.counts["loan_refused"] += 1
            return None
        self._judge.counts["lent"] += 1
        self.carry_out(effects, loan.block_ids[0])
        return lease_id

    # -- leases ---------------------------------------------------------------------------------------------------

    def carry_out(self, effects: Sequence[Effect], lent: tuple[int, ...] = ()) -> None:
        """In the order given. `lent`: the blocks that a seal written among them speaks for."""
        for effect in effects:
            match effect:
                case Pin(blocks=blocks):
                    self.pool.touch(blocks)
                case Free() | Unpin():
                    self._returns.owe(effect)
                case WriteSeal(slot=slot, value=value):
                    self._sealings[slot] = self.sealings(slot) + 1
                    self.memory.write_seal(slot, value)
                    self._judge.sealed(self.memory, TABLE_ADDRESS + slot_offset(slot), lent)
                case BreakSeal(slot=slot):
                    self._makings.break_seal(self, slot)
                case _:
                    self.lifetimes.hear(effect)
                    self.link.tell(effect)

    def on_reuse(self, block: int) -> None:
        """The pool's one callback for all lapsed leases."""
        self.carry_out(self.holder.on_reuse(block))

    def sealings(self, slot: int) -> int:
        """How often the slot has been written in this incarnation."""
        return self._sealings.get(slot, 0)

    def drain(self) -> None:
        """Leaves in good order: every lease ends first."""
        self.carry_out(self.holder.end_all(EndReason.DRAINED))
        self._checked()
        self.link.work()
        self.session.leave()

    def _arm(self) -> None:
        """The engine's thread looks at the deadlines again when the next one is due."""
        deadline_ms = self.holder.next_deadline_ms()
        if deadline_ms is None:
            return
        at_ms = max(self.world.now_ms + 1, deadline_ms - self.clock_offset_ms)
        if self._tick_ms is None or at_ms < self._tick_ms or self._tick_ms <= self.world.now_ms:
            self._tick_ms = at_ms
            self.world.after(at_ms - self.world.now_ms, self, self._tick)

    def _tick(self) -> None:
        self._tick_ms = None
        self.carry_out(self.holder.tick(self.lender_now_ms()))
        self._checked()
        self._arm()
        self._admit()

    def _checked(self) -> None:
        self.holder.check()
        self.pool.check()

    # -- what the session asks ------------------------------------------------------------------------------------

    def engine(self) -> Engine:
        return Engine(
            engine_id=self.engine_id,
            incarnation=self._incarnation,
            fingerprint=Fingerprint(hash=self._fingerprint),
        )

    def lender_now_ms(self) -> int:
        return self.world.now_ms + self.clock_offset_ms

    def free_and_total(self) -> tuple[int, int]:
        return self.pool.free, self.pool.size

    def published(self, result: PublishResult) -> None:
        self._promises.answered(self, result, overdue=self.lifetimes.overdue(result.lease_id))

    def session_over(self, why: KvleaseError) -> bool:
        self._promises.session_over(why)
        return not self._makings.comes_back(why)

    def end_asked(self, lease_id: LeaseId, reason: EndReason) -> None:
        self._promises.told_to_end(self, lease_id, reason, overdue=self.lifetimes.overdue(lease_id))
        self.carry_out(self.holder.end(lease_id, reason))
        self._checked()
        self._admit()

    def renew_asked(self, lease_id: LeaseId, ttl_ms: int) -> None:
        lapsed = self.holder.count(LeaseState.LAPSED)
        self.carry_out(self.holder.renew(lease_id, ttl_ms, self.lender_now_ms()))
        self._judge.counts["revived"] += lapsed - self.holder.count(LeaseState.LAPSED)
        self._checked()
        self._arm()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _wrote(self, rank: int, block: int) -> None:
        self._judge.lender_wrote(self.memory, rank, block)

    def unfinished(self) -> None:
        """The healed system is at rest: everything that was lent must be back."""
        self._judge.expect(self.idle, Fault.UNFINISHED, f"{self.name} still serves turns")
        self._judge.expect(
            self.pool.free == self.pool.size, Fault.LEAK, f"{self.name}: {self.pool.size - self.pool.free} blocks"
        )
