"""How leases begin and end in vLLM's real scheduler: which finished requests are lent, and what ends all at once.

Reset, pause and sleep reach the connector through the scheduler's reset (H2), SIGTERM through the handler that it
chains (H3).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="the scheduler is vLLM's: install the engines (make engines-venv)")

from kvlease.registry.metrics import LENDER_ENDS, LENDER_NOT_LENT

from tests.engines.chat import STRIDE
from tests.engines.engine import BLOCK_TOKENS
from tests.engines.inprocess import Desk, DeskSettings, Loads, desk, tokens
from tests.engines.inprocess_leases import LENDER_PARAMS

pytestmark = pytest.mark.engines

MANY = 1_000


def lend(lender: Desk, count: int, first: int = 0) -> None:
    """Turns of two blocks."""
    for number in range(first, first + count):
        lender.add(f"turn-{number}", tokens(66, seed=number + 1), kvlease={"conversation": f"chat-{number}"})
    lender.run(200 + count)


def abort(lender: Desk, request_id: str) -> None:
    from vllm.v1.request import RequestStatus

    lender.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)


@pytest.fixture
def lender() -> Iterator[Desk]:
    with desk(DeskSettings(role="kv_consumer")) as opened:
        yield opened


# -- reset -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ttl_ms", [480_000, 0], ids=["live", "lapsed"])
@pytest.mark.matrix(
    group="Something changes under a lease",
    condition="prefix cache reset",
    lent="new turns",
    reused="nothing of before",
    freed="all leases, live and lapsed",
    recomputed="all",
)
def test_a_reset_ends_every_lease_and_succeeds(ttl_ms: int) -> None:
    with desk(DeskSettings(role="kv_consumer", kvlease={"lease_ttl_ms": ttl_ms})) as lender:
        lend(lender, 3)
        lender.step()
        assert (lender.leases, lender.whole_seals) == (3, 3)
        assert lender.scheduler.reset_prefix_cache()
        assert (lender.leases, lender.whole_seals) == (0, 0)
        assert lender.count(LENDER_ENDS, reason="cache_reset") == 3
        lend(lender, 1, first=7)
        assert lender.leases == 1


@pytest.mark.matrix(
    group="Something changes under a lease",
    condition="pause that clears the cache",
    lent="-",
    reused="nothing of before",
    freed="all leases",
    recomputed="running turns",
)
def test_a_pause_that_clears_the_cache_passes_with_leases_and_running_requests(lender: Desk) -> None:
    """What the engine does for pause and sleep: everything is preempted, then the reset must succeed or it raises."""
    lend(lender, 3)
    running = lender.add("running", tokens(40, seed=50), max_tokens=5)
    lender.step()
    assert lender.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert lender.whole_seals == 0
    lender.run()
    assert running.num_preemptions == 1


def test_the_seals_are_broken_before_the_reset_touches_the_pool(lender: Desk) -> None:
    lend(lender, 2)
    whole: list[int] = []
    reset = lender.pool.reset_prefix_cache

    def watched() -> bool:
        whole.append(lender.whole_seals)
        return bool(reset())

    lender.pool.reset_prefix_cache = watched
    assert lender.scheduler.reset_prefix_cache()
    assert whole == [0]


# -- termination -------------------------------------------------------------------------------------------------------


@pytest.fixture
def told() -> Iterator[list[int]]:
    """The engine's own SIGTERM handler: notes that it was called."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


@pytest.mark.matrix(
    group="The engine",
    condition="SIGTERM while turns run",
    lent="nothing any more",
    reused="nothing",
    freed="all leases first",
    recomputed="-",
)
def test_at_sigterm_leases_end_first_and_running_requests_finish(told: list[int]) -> None:
    settings = DeskSettings(role="kv_consumer", blocks=4_096, slots=2 * MANY, kvlease={"max_leases": 2 * MANY})
    with desk(settings) as lender:
        lend(lender, MANY)
        lender.add("running", tokens(70, seed=5_000), max_tokens=3, kvlease={"conversation": "last"})
        lender.step()
        assert (lender.leases, lender.whole_seals) == (MANY, MANY)
        os.kill(os.getpid(), signal.SIGTERM)
        lender.step()
        assert (lender.leases, lender.whole_seals) == (0, 0)
        assert lender.count(LENDER_ENDS, reason="drained") == MANY
        assert told == [signal.SIGTERM]
        lender.run()
        assert lender.leases == 0
        assert lender.count(LENDER_NOT_LENT, reason="draining") == 1
        assert lender.free == lender.pool.num_gpu_blocks - 1


def test_at_sigterm_an_idle_lenders_seals_break_without_a_step(told: list[int]) -> None:
    """It may never take one again: the engine tears itself down at once."""
    with desk(DeskSettings(role="kv_consumer")) as lender:
        lend(lender, 3)
        os.kill(os.getpid(), signal.SIGTERM)
        limit = time.monotonic() + 10
        while lender.whole_seals:
            assert time.monotonic() < limit, "the seals are whole"
            time.sleep(0.001)
        assert (lender.leases, told) == (3, [signal.SIGTERM])
        lender.step()
        assert (lender.leases, lender.free) == (0, lender.pool.num_gpu_blocks - 1)


def test_the_engines_handler_is_back_when_the_connector_is_gone(told: list[int]) -> None:
    engines = signal.getsignal(signal.SIGTERM)
    with desk(DeskSettings(role="kv_consumer")):
        assert signal.getsignal(signal.SIGTERM) != engines
    assert signal.getsignal(signal.SIGTERM) == engines


def test_nothing_is_chained_where_sigterm_ends_the_process() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with desk(DeskSettings(role="kv_consumer")):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.matrix(
    group="The engine",
    condition="the engine closes",
    lent="-",
    reused="nothing",
    freed="all leases",
    recomputed="-",
)
def test_closing_ends_every_lease(lender: Desk) -> None:
    lend(lender, 3)
    lender.side._close()
    assert (lender.leases, lender.whole_seals) == (0, 0)
    assert lender.free == lender.pool.num_gpu_blocks - 1


# -- which requests are lent -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def receiver(request: pytest.FixtureRequest) -> Iterator[Desk]:
    with desk(DeskSettings(role="kv_consumer", async_scheduling=request.param)) as opened:
        yield opened


@pytest.mark.parametrize("when", ["arrived", "receiving", "received", "under-way", "stepped"])
@pytest.mark.matrix(
    group="A turn ends",
    condition="aborted while its prefill is received, or before its first step",
    lent="nothing",
    reused="-",
    freed="all, once the READ is over",
    recomputed="the next turn",
)
def test_a_received_prompt_is_lent_only_after_a_step_of_its_own(receiver: Desk, when: str) -> None:
    """Until then the READ, or what the engine does to its blocks after it, may still be under way (L6)."""
    lender = receiver
    lender.side.reset_cache()
    prompt = tokens(6 * BLOCK_TOKENS)
    received = {**LENDER_PARAMS, "do_remote_prefill": True, "remote_block_ids": [[1, 2, 3, 4, 5, 6]]}
    lender.add("turn", prompt, max_tokens=5, params=received, kvlease={"conversation": "c"})
    if when == "arrived":
        abort(lender, "turn")
    output = lender.schedule()
    loads = Loads(finished=set() if when == "arrived" else {"turn"})
    if when == "receiving":
        abort(lender, "turn")
    lender.finish(output, loads)
    if when == "received":
        abort(lender, "turn")
    elif when == "under-way":
        step = lender.schedule()
        assert step.num_scheduled_tokens == {"turn": 1}
        abort(lender, "turn")
        lender.finish(step)
    elif when == "stepped":
        lender.step()
        abort(lender, "turn")
    assert lender.leases == (1 if when == "stepped" else 0)
    assert lender.free == lender.pool.num_gpu_blocks - 1 - (6 if when == "stepped" else 0)
    assert not lender.side._loaded


@pytest.mark.parametrize(("processed", "strides"), [(False, 0), (True, 1)])
@pytest.mark.matrix(
    group="A turn ends",
    condition="aborted with steps under way (async scheduling)",
    lent="what was processed",
    reused="-",
    freed="the rest at once",
    recomputed="tokens of steps under way",
)
def test_tokens_of_steps_under_way_are_not_lent(processed: bool, strides: int) -> None:
    """Two steps ahead of the accelerator, an abort: what the second one computes would complete the second stride."""
    with desk(DeskSettings(role="kv_consumer", async_scheduling=True)) as lender:
        lender.add("turn", tokens(127), max_tokens=9, kvlease={"conversation": "c"})
        first, second = lender.schedule(), lender.schedule()
        assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"turn": 127}, {"turn": 1})
        if processed:
            lender.finish(first)
        abort(lender, "turn")
        assert lender.leases == strides
        assert lender.free == lender.pool.num_gpu_blocks - 1 - 2 * strides
        if not processed:
            lender.finish(first)
        lender.finish(second)


@pytest.fixture(scope="module")
def in_chunks(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """Prompts are computed in chunks of a stride."""
    settings = DeskSettings(
        role="kv_consumer", max_batched_tokens=STRIDE, async_scheduling=request.param, prefix_caching=False
    )
    with desk(settings) as opened:
        yield opened


@pytest.mark.parametrize(
    ("in_chunks", "under_way"),
    [(False, False), (True, False), (True, True)],
    ids=["sync", "async", "async-step-under-way"],
    indirect=["in_chunks"],
)
@pytest.mark.parametrize("again", [0, 1, 2, 3], ids=lambda steps: f"{steps}-chunks-again")
@pytest.mark.parametrize("answered", [False, True], ids=["in-its-prompt", "in-its-answer"])
@pytest.mark.matrix(
    group="A turn ends",
    condition="preempted, then aborted while it is computed again",
    lent="what was computed again",
    reused="-",
    freed="the rest at once",
    recomputed="the rest",
)
def test_what_was_computed_before_a_preemption_is_not_lent(
    in_chunks: Desk, under_way: bool, again: int, answered: bool
) -> None:
    """In the middle of its prompt, or of its answer."""
    lender = in_chunks
    request = lender.add("turn", tokens(300), max_tokens=40, kvlease={"conversation": "c"})
    for _ in range(8 if answered else 3):
        lender.step()
    assert bool(request.num_output_tokens) is answered
    step = lender.schedule() if under_way else None
    assert lender.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_preemptions == 1
    if step is not None:
        lender.finish(step)
    for _ in range(again):
        lender.step()
    abort(lender, "turn")
    held = list(lender.side._lending._holder._held.values())
    assert [len(lease.loan.chain) for lease in held] == ([again] if again else [])
    assert lender.free == lender.pool.num_gpu_blocks - 1 - again * STRIDE // BLOCK_TOKENS
    lender.side.reset_cache()


def test_a_turn_whose_parameters_mean_nothing_is_counted(lender: Desk) -> None:
    lender.add("turn", tokens(100), kvlease={"conversation": "gespr\u00e4ch"})
    lender.run()
    assert (lender.leases, lender.count(LENDER_NOT_LENT, reason="invalid")) == (0, 1)
