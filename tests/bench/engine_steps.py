"""The connector's work on an engine's thread, without an engine: `python -m tests.bench.engine_steps REGISTRY EFFORT`.

Real `Lending`, `Borrowing` and `Link` against a real registry, on vLLM's real block pool, with many leases out. Timed
are the thread's wall time, hand-overs of the interpreter lock to the link's thread included, and its processor time
beside it. Between two calls the thread sleeps as an engine's does while its model runs. What is judged is the p99 over
that of vLLM's own scheduler, measured first. Says one figure after another, then null.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, ParamSpec, TypeVar

from kvlease.connector.borrower import Read
from kvlease.connector.borrowing import ArrivedRequest
from kvlease.connector.lending import FinishedTurn
from kvlease.connector.loads import LoadReport, WorkerReports

from tests.bench import engine_yardstick
from tests.bench.effort import FULL, QUICK, Effort
from tests.bench.engine_stage import MadeTurn, Stage
from tests.bench.engine_yardstick import Yardstick
from tests.bench.figures import Budget, Figure, Unit, at_most, encode, over_calls, quantile
from tests.bench.payloads import BLOCK_TOKENS, STRIDE_TOKENS, TOKENS
from tests.bench.served import say

HOOKS: Final = "connector, each hook on the engine's thread"
STEPS: Final = "connector, added to an engine step"
ADDED_US: Final = at_most(goal=200.0)
"""Added to an engine step, p99."""
OF_VLLM: Final = at_most(0.5)
"""The same over the p99 of what vLLM's own scheduler spends on a decode step."""
MAKING_ROOM_OF_VLLM: Final = at_most(1.0)
"""For a prompt that takes hundreds of blocks from leases: once in it, and mostly the pool's own work."""
STEPS_PER_FINISH: Final = 8
"""A decode batch of 32 whose answers have 256 tokens ends a request every eighth step."""
LAPSES: Final = {"1k": 4, "8k": 1, "24k": 1}
"""Leases that lapse in one step at most, by size."""
REUSED_BLOCKS: Final = 25
"""What a step of a busy batch takes from the pool."""
MODEL_S: Final = 0.002
"""A short forward pass: long enough for the link's thread to finish what it was given."""
HELD: Final = "1k"
"""Size of the leases that are out."""
P = ParamSpec("P")
R = TypeVar("R")


class Timed:
    """Times of one hook, wall and processor, in microseconds."""

    def __init__(self, section: str, name: str, budget: Budget | None = OF_VLLM) -> None:
        self._section: Final = section
        self._name: Final = name
        self._budget: Final = budget
        self._wall_us: list[float] = []
        self._cpu_us: list[float] = []

    def __call__(self, hook: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        time.sleep(MODEL_S)
        return self._time(hook, *args, **kwargs)

    def lent(self, stage: Stage, turn: MadeTurn, hook: Callable[[FinishedTurn], R]) -> R:
        """The same for a turn that has just finished: vLLM lists a request's blocks right before it calls the hook."""
        time.sleep(MODEL_S)
        return self._time(hook, stage.finished(turn))

    def _time(self, hook: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        cpu_ns, began_ns = time.thread_time_ns(), time.perf_counter_ns()
        result = hook(*args, **kwargs)
        ended_ns = time.perf_counter_ns()
        self._wall_us.append((ended_ns - began_ns) / 1e3)
        self._cpu_us.append((time.thread_time_ns() - cpu_ns) / 1e3)
        return result

    def figures(self, yardstick: Yardstick) -> list[Figure]:
        """p50 and p99; with a budget, the p99 is held to the yardstick. The quartiles are those of all calls."""
        if not self._wall_us:
            return []
        figures = [self._figure("p50", 0.5), self._figure("p99", 0.99)]
        if self._budget is None:
            return figures
        share = figures[1].value / yardstick.p99_us
        name = f"{self._name}, p99 / vLLM's"
        return [
            figures[0],
            replace(figures[1], budget=ADDED_US),
            Figure(
                section=self._section,
                name=name,
                unit=Unit.RATIO,
                value=share,
                low=share,
                high=share,
                budget=self._budget,
            ),
        ]

    def _figure(self, which: str, share: float) -> Figure:
        note = f"CPU {quantile(self._cpu_us, share):,.0f} us, {len(self._wall_us)} calls"
        return over_calls(self._section, f"{self._name}, {which}", Unit.MICROSECONDS, self._wall_us, share, note=note)


def lender_hooks(stage: Stage, effort: Effort) -> list[Timed]:
    """Each hook of a lender by itself."""
    few = max(4, effort.steps // 5)
    idle = Timed(HOOKS, f"service, nothing due, {len(stage.lending):,} leases out")
    for _ in range(effort.steps):
        idle(stage.lending.service)
    timed = [idle]
    for size, tokens in TOKENS.items():
        finish = Timed(HOOKS, f"a {size}-token turn is lent")
        order = Timed(HOOKS, f"service, a {size}-token lease ended by order")
        back = Timed(HOOKS, f"service, more blocks of that {size}-token lease go back")
        for _ in range(few):
            turn = stage.turn(tokens)
            lease_id = finish.lent(stage, turn, stage.lending.finished)
            assert lease_id is not None
            stage.give_back(turn)
            stage.order_end(lease_id)
            order(stage.lending.service)
            _settle(stage, back)
        timed += [finish, order, back]
    timed += [_lapse(stage, few, size, leases) for size, leases in LAPSES.items()]
    return [*timed, _supersede(stage, few), *_reuse(stage, few), _pressure(stage, few)]


def _settle(stage: Stage, back: Timed | None = None) -> None:
    """Steps until the pool has everything back."""
    while stage.lending.owed_blocks:
        if back is None:
            stage.lending.service()
        else:
            back(stage.lending.service)


def _supersede(stage: Stage, count: int) -> Timed:
    finish = Timed(HOOKS, "an 8k-token turn is lent, superseding the one before")
    for _ in range(count):
        earlier = stage.turn(TOKENS["8k"])
        assert stage.lending.finished(stage.finished(earlier)) is not None
        later = stage.turn(TOKENS["8k"] + 4 * STRIDE_TOKENS, after=earlier)
        stage.give_back(earlier)
        lease_id = finish.lent(stage, later, stage.lending.finished)
        assert lease_id is not None
        stage.give_back(later)
        stage.order_end(lease_id)
        stage.lending.service()
        _settle(stage)
    return finish


def _lapse(stage: Stage, count: int, size: str, leases: int) -> Timed:
    """Deadlines pass."""
    lapse = Timed(HOOKS, f"service, {leases} {size}-token leases lapse")
    for _ in range(count):
        for _ in range(leases):
            stage.lend(stage.turn(TOKENS[size], ttl_ms=0))
        lapse(stage.lending.service)
        _settle(stage)
        stage.pool.free_blocks(reversed(stage.pool.get_new_blocks(stage.pool.get_num_free_blocks())))
    return lapse


def _reuse(stage: Stage, count: int) -> list[Timed]:
    """The pool hands blocks of lapsed leases out."""
    reuse = Timed(HOOKS, f"get_new_blocks, {REUSED_BLOCKS} of lapsed leases")
    plain = Timed(HOOKS, f"get_new_blocks, {REUSED_BLOCKS} of no lease", None)
    for _ in range(count):
        rest = stage.pool.get_new_blocks(stage.pool.get_num_free_blocks() - TOKENS["8k"] // BLOCK_TOKENS)
        for _ in range(TOKENS["8k"] // TOKENS[HELD]):
            stage.lend(stage.turn(TOKENS[HELD], ttl_ms=0))
            stage.lending.service()
        _settle(stage)
        taken = reuse(stage.pool.get_new_blocks, REUSED_BLOCKS)
        others = stage.pool.get_new_blocks(stage.pool.get_num_free_blocks())
        stage.pool.free_blocks([*reversed(rest), *others, *taken])
        stage.pool.free_blocks(plain(stage.pool.get_new_blocks, REUSED_BLOCKS))
    return [reuse, plain]


def _pressure(stage: Stage, count: int) -> Timed:
    room = Timed(HOOKS, f"give_way for an 8k-token prompt, {HELD}-token leases end", MAKING_ROOM_OF_VLLM)
    wanted = TOKENS["8k"] // BLOCK_TOKENS
    for _ in range(count):
        before = len(stage.lending)
        assert room(stage.lending.give_way, wanted)
        ended = before - len(stage.lending)
        _settle(stage)
        for _ in range(ended):
            stage.lend(stage.turn(TOKENS[HELD]))
    return room


def borrower_hooks(stage: Stage, effort: Effort) -> list[Timed]:
    """Each hook of a borrower by itself, for prompts that extend a lease."""
    timed: list[Timed] = []
    for size, tokens in TOKENS.items():
        lent = stage.turn(tokens)
        stage.lend(lent)
        stage.published(lent)
        arrive = Timed(HOOKS, f"a {size}-token prompt arrives: digests, resolve handed over")
        decide = Timed(HOOKS, f"decide, a {size}-token answer is taken")
        again = Timed(HOOKS, f"decide again, {size} tokens, no room yet")
        commit = Timed(HOOKS, f"committed, {size} tokens")
        report = Timed(HOOKS, f"reported, {size} tokens proven")
        for _ in range(max(4, effort.steps // 5)):
            prompt = stage.prompt(lent)
            request_id = prompt.request_id
            arrive(stage.borrowing.arrived, prompt)
            stage.answer_is_here()
            read = decide(stage.borrowing.decide, request_id, 0)
            assert isinstance(read, Read), read
            assert isinstance(again(stage.borrowing.decide, request_id, 0), Read)
            commit(stage.borrowing.committed, request_id, read, read.block_ids[0])
            report(stage.borrowing.reported, _proven(request_id))
            stage.borrowing.settled(request_id)
            stage.borrowing.forget(request_id)
        timed += [arrive, decide, again, commit, report]
    return timed


def steps(stage: Stage, effort: Effort) -> list[Timed]:
    """What the hooks of one step add up to, as they come together."""
    decode = Timed(STEPS, f"decode: service twice, an 8k-token turn lent every {STEPS_PER_FINISH} steps")
    for number in range(effort.steps):
        turn = stage.turn(TOKENS["8k"]) if number % STEPS_PER_FINISH == 0 else None
        if turn is None:
            decode(_decode_step, stage, None)
        else:
            decode.lent(stage, turn, lambda finished: _decode_step(stage, finished))
        if turn is not None:
            stage.give_back(turn)
            stage.lending.give_way(len(turn.blocks))
            _settle(stage)
    prefill = Timed(STEPS, "prefill: service three times, one 8k-token prompt arrives, one is admitted")
    lent = stage.turn(TOKENS["8k"])
    stage.lend(lent)
    stage.published(lent)
    earlier = stage.prompt(lent)
    stage.borrowing.arrived(earlier)
    for _ in range(max(4, effort.steps // 3)):
        stage.answer_is_here(to=earlier.request_id)  # a quick one is taken in the step that asked
        prompt = stage.prompt(lent)
        prefill(_prefill_step, stage, prompt, earlier.request_id)
        stage.borrowing.settled(earlier.request_id)
        stage.borrowing.forget(earlier.request_id)
        earlier = prompt
    return [decode, prefill]


def _decode_step(stage: Stage, finished: FinishedTurn | None) -> None:
    stage.lending.service()
    if finished is not None:
        assert stage.lending.finished(finished) is not None
    stage.lending.service()


def _prefill_step(stage: Stage, arriving: ArrivedRequest, admitted: str) -> None:
    stage.lending.service()
    stage.borrowing.arrived(arriving)
    stage.lending.service()
    read = stage.borrowing.decide(admitted, 0)
    assert isinstance(read, Read), read
    stage.borrowing.committed(admitted, read, read.block_ids[0])
    stage.lending.service()


def _proven(request_id: str) -> WorkerReports:
    load = LoadReport(
        request_id=request_id, rank=0, reason=None, late=False, read_us=2_000, prove_us=400, bytes_read=1_000_000
    )
    return WorkerReports(loads=[load])


def main(registry: str, effort: Effort) -> None:
    yardstick = engine_yardstick.measure(effort.steps, MODEL_S)
    for figure in yardstick.figures():
        say(encode(figure))
    held = effort.leases * TOKENS[HELD] // BLOCK_TOKENS
    stage = Stage(registry, blocks=held + 8 * TOKENS["24k"] // BLOCK_TOKENS, leases=effort.leases)
    stage.open()
    try:
        for _ in range(effort.leases):
            last = stage.turn(TOKENS[HELD])
            stage.lend(last)
        stage.published(last)
        gc.collect()
        gc.freeze()  # as an engine does when it is ready
        for part in (lender_hooks, borrower_hooks, steps):
            for timed in part(stage, effort):
                for figure in timed.figures(yardstick):
                    say(encode(figure))
    finally:
        stage.close()
    say(None)


if __name__ == "__main__":
    main(sys.argv[1], QUICK if sys.argv[2:] == ["quick"] else FULL)
