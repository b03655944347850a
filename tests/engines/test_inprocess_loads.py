"""Borrowing in vLLM's real scheduler: whatever comes between the decision to read and its outcome, the request goes on.

Workers are played: what they would report is passed in. Each case ends with the request finished and the pool as full
as it was, since a request that waits for a load which nobody makes would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the scheduler is vLLM's: install the engines (make engines-venv)")

from kvlease.connector.borrower import ComputeReason
from kvlease.connector.vllm_metadata import attached_orders, attached_refused
from kvlease.registry.metrics import BORROWER_BORROWS, BORROWER_MISSES

from tests.engines.engine import BLOCK_TOKENS
from tests.engines.inprocess import Desk, DeskSettings, Loads, Params, desk, tokens
from tests.engines.inprocess_leases import LENDER_PARAMS, LENT_FROM, hit

pytestmark = pytest.mark.engines

PROMPT = tokens(10 * BLOCK_TOKENS)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def borrower(request: pytest.FixtureRequest) -> Iterator[Desk]:
    with desk(DeskSettings(role="kv_producer", async_scheduling=request.param)) as opened:
        yield opened


GUESSES = {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_scheduling": True},
    "by-priority": {"engine": {"scheduling_policy": "priority"}},
    "in-chunks": {"max_batched_tokens": 2 * BLOCK_TOKENS},
    "uncached": {"prefix_caching": False},
    "guessing": {"engine": {"speculative_config": {"method": "ngram", **GUESSES}}},
    "async-guessing": {
        "async_scheduling": True,
        "engine": {"speculative_config": {"method": "ngram_gpu", **GUESSES}},
    },
}


@pytest.fixture(params=list(MODES.values()), ids=list(MODES))
def borrower_of_any_mode(request: pytest.FixtureRequest) -> Iterator[Desk]:
    with desk(DeskSettings(role="kv_producer", **request.param)) as opened:
        yield opened


def misses(borrower: Desk, reason: ComputeReason) -> float:
    return borrower.count(BORROWER_MISSES, reason=reason.value)


def endings(borrower: Desk) -> dict[str, float]:
    """How borrows ended, and how often."""
    ended = {reason.value: misses(borrower, reason) for reason in ComputeReason}
    ended["borrowed"] = borrower.count(BORROWER_BORROWS)
    return {name: count for name, count in ended.items() if count}


def at_rest(borrower: Desk) -> None:
    """Nothing is left of any request."""
    assert borrower.free == borrower.pool.num_gpu_blocks - 1
    side = borrower.side
    assert not side._borrowing._stories
    assert not len(side._borrowing._core)
    assert not side._loaded
    assert not side._reads
    assert not side._orders
    assert not side._refused
    assert not len(side._borrowing._quarantine)


def test_the_missing_middle_is_ordered_by_position(borrower: Desk) -> None:
    borrower.add("before", PROMPT[: 2 * BLOCK_TOKENS + 1])
    borrower.run()
    request = borrower.add("next", PROMPT, kvlease={})
    hit(borrower, request, strides=4)
    output = borrower.schedule()
    meta = output.kv_connector_metadata.reqs_to_recv["next"]
    assert meta.remote.block_ids == (list(range(LENT_FROM + 2, LENT_FROM + 8)),)
    assert meta.local_block_ids == (borrower.scheduler.kv_cache_manager.get_block_ids("next")[0][2:8],)
    assert list(attached_orders(output.kv_connector_metadata)) == ["next"]
    loads = Loads()
    loads.over("next")
    borrower.finish(output, loads)
    borrower.run()
    at_rest(borrower)


@pytest.mark.parametrize(
    "told",
    [
        {**LENDER_PARAMS, "remote_engine_id": "another"},
        {**LENDER_PARAMS, "remote_engine_id": ["lender"]},
        {**LENDER_PARAMS, "remote_port": "5600"},
        {**LENDER_PARAMS, "tp_size": 0},
        {name: value for name, value in LENDER_PARAMS.items() if name != "remote_request_id"},
    ],
    ids=["other-engine", "no-text", "port-text", "no-rank", "no-request"],
)
@pytest.mark.matrix(
    group="A borrow fails",
    condition="a record that no READ can go by",
    lent="-",
    reused="nothing",
    freed="-",
    recomputed="all",
)
def test_a_record_that_cannot_be_read_by_is_a_miss(borrower: Desk, told: Params) -> None:
    request = borrower.add("next", PROMPT, kvlease={})
    hit(borrower, request, strides=4, engine_params=told)
    borrower.run(10)
    assert misses(borrower, ComputeReason.RECORD_INVALID) == 1
    at_rest(borrower)


@pytest.mark.matrix(
    group="A borrow fails",
    condition="a load that was promised and cannot be ordered",
    lent="-",
    reused="nothing",
    freed="all",
    recomputed="all",
)
def test_a_promised_load_that_cannot_be_ordered_is_refused_by_the_worker(borrower: Desk) -> None:
    """The scheduler has parked the request; only a worker's report takes it out again."""
    request = borrower.add("next", PROMPT, kvlease={})
    hit(borrower, request, strides=4)
    borrower.side._borrowing.committed = None  # not callable: ordering fails as any bug in it would
    output = borrower.schedule()
    assert not attached_orders(output.kv_connector_metadata)
    assert attached_refused(output.kv_connector_metadata) == ["next"]
    loads = Loads(finished={"next"}, failed={"next"})
    borrower.finish(output, loads)
    borrower.run(10)
    assert misses(borrower, ComputeReason.READ_FAILED) == 1
    at_rest(borrower)


@pytest.mark.parametrize("reason", [ComputeReason.SEAL_BROKEN, ComputeReason.READ_TIMEOUT, ComputeReason.READ_FAILED])
@pytest.mark.matrix(
    group="A borrow fails",
    condition="READ failed, over its limit, or not proven",
    lent="-",
    reused="nothing",
    freed="local blocks, once no READ can write to them",
    recomputed="all, once; in every mode of the scheduler",
)
def test_a_failed_load_is_computed_once(borrower_of_any_mode: Desk, reason: ComputeReason) -> None:
    """S7: while another request runs."""
    borrower = borrower_of_any_mode
    borrower.add("other", tokens(3 * BLOCK_TOKENS, seed=4), max_tokens=12)
    borrower.step()
    request = borrower.add("next", PROMPT, kvlease={}, max_tokens=3)
    hit(borrower, request, strides=4)
    output = borrower.schedule()
    loads = Loads()
    loads.over("next", reason)
    borrower.finish(output, loads)
    borrower.run(20)
    assert request.num_output_tokens == 3
    assert endings(borrower) == {reason.value: 1}
    at_rest(borrower)


@pytest.mark.parametrize(
    "told", [{"conversation": "a b"}, {"tenant": 7}, {"ttl_ms": -1}, {"on_deadline": "?"}, 7], ids=str
)
def test_parameters_that_mean_nothing_are_counted_and_cost_the_request_nothing(borrower: Desk, told: Any) -> None:
    request = borrower.add("next", PROMPT, params={"kvlease": told})
    borrower.run(10)
    assert request.num_output_tokens == 1
    assert endings(borrower) == {"invalid": 1}
    at_rest(borrower)


@pytest.mark.matrix(
    group="A borrow fails",
    condition="a READ that may still land",
    lent="-",
    reused="nothing",
    freed="its local blocks, when it has landed",
    recomputed="all",
)
def test_late_blocks_are_out_of_use_until_the_read_has_landed(borrower: Desk) -> None:
    request = borrower.add("next", PROMPT, kvlease={})
    hit(borrower, request, strides=4)
    output = borrower.schedule()
    written = set(output.kv_connector_metadata.reqs_to_recv["next"].local_block_ids[0])
    loads = Loads()
    loads.over("next", ComputeReason.READ_TIMEOUT, late=True)
    borrower.finish(output, loads)
    borrower.run(10)
    assert borrower.free == borrower.pool.num_gpu_blocks - 1 - len(written)
    handed = borrower.pool.get_new_blocks(borrower.free)
    assert not written & {block.block_id for block in handed}
    borrower.pool.free_blocks(handed)
    landed = Loads()
    landed.reports.landed_late.append(("next", 0))
    borrower.add("other", tokens(40, seed=3))
    borrower.step(landed)
    borrower.run()
    at_rest(borrower)


@pytest.mark.parametrize("reason", [None, ComputeReason.SEAL_BROKEN])
@pytest.mark.parametrize("when", ["waiting", "ordered", "reported"])
@pytest.mark.matrix(
    group="A borrow fails",
    condition="aborted while waiting, ordered or reported",
    lent="-",
    reused="-",
    freed="all",
    recomputed="-",
)
def test_an_abort_at_each_instant_leaves_nothing(borrower: Desk, when: str, reason: ComputeReason | None) -> None:
    from vllm.v1.request import RequestStatus

    def abort() -> None:
        borrower.scheduler.finish_requests("next", RequestStatus.FINISHED_ABORTED)

    request = borrower.add("next", PROMPT, kvlease={})
    loads = Loads()
    loads.over("next", reason)
    if when == "waiting":
        borrower.step()
        abort()
        hit(borrower, request, strides=4)
        borrower.add("other", tokens(40, seed=3), kvlease={})
    else:
        hit(borrower, request, strides=4)
        output = borrower.schedule()
        if when == "ordered":
            abort()
        borrower.finish(output, loads)
        if when == "reported":
            abort()
    borrower.scheduler.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    borrower.step()
    at_rest(borrower)
    if when == "waiting":
        assert endings(borrower) == {"aborted": 2}
    else:
        assert endings(borrower) == {"borrowed" if reason is None else reason.value: 1}


@pytest.mark.parametrize("when", ["ordered", "reported"])
def test_an_abort_beside_a_read_that_may_still_land_keeps_its_blocks_until_then(borrower: Desk, when: str) -> None:
    """L2: the lender is gone in the middle of the READ, and so is the client."""
    from vllm.v1.request import RequestStatus

    request = borrower.add("next", PROMPT, kvlease={})
    hit(borrower, request, strides=4)
    output = borrower.schedule()
    written = set(output.kv_connector_metadata.reqs_to_recv["next"].local_block_ids[0])
    loads = Loads()
    loads.over("next", ComputeReason.READ_TIMEOUT, late=True)
    if when == "ordered":
        borrower.scheduler.finish_requests("next", RequestStatus.FINISHED_ABORTED)
    borrower.finish(output, loads)
    if when == "reported":
        borrower.scheduler.finish_requests("next", RequestStatus.FINISHED_ABORTED)
    borrower.step()
    assert borrower.free == borrower.pool.num_gpu_blocks - 1 - len(written)
    handed = borrower.pool.get_new_blocks(borrower.free)
    assert not written & {block.block_id for block in handed}
    borrower.pool.free_blocks(handed)
    landed = Loads()
    landed.reports.landed_late.append(("next", 0))
    borrower.step(landed)
    at_rest(borrower)
    assert endings(borrower) == {"read_timeout": 1}


@pytest.mark.matrix(
    group="A borrow fails",
    condition="preempted after a good READ",
    lent="-",
    reused="once",
    freed="all at its end",
    recomputed="all, from the preemption",
)
def test_a_borrow_counts_once_when_its_request_is_preempted_afterwards(borrower: Desk) -> None:
    request = borrower.add("next", PROMPT, max_tokens=5, kvlease={})
    hit(borrower, request, strides=4)
    output = borrower.schedule()
    loads = Loads()
    loads.over("next")
    borrower.finish(output, loads)
    borrower.step()
    assert borrower.scheduler.reset_prefix_cache(reset_running_requests=True)
    borrower.run()
    assert request.num_preemptions == 1
    assert endings(borrower) == {"borrowed": 1}
    at_rest(borrower)


@pytest.mark.matrix(
    group="A borrow fails",
    condition="stock's read-back fields in a request",
    lent="-",
    reused="nothing",
    freed="all",
    recomputed="all",
)
def test_stock_readback_fields_do_not_park_a_request_for_ever(borrower: Desk) -> None:
    """Where reading back is off, stock offers it all the same and orders nothing."""
    borrower.add(
        "stock",
        PROMPT,
        params={
            "do_remote_decode": True,
            "remote_block_ids": [[1, 2, 3, 4]],
            "remote_num_tokens": 4 * BLOCK_TOKENS,
            **LENDER_PARAMS,
        },
    )
    for _ in range(5):
        borrower.step()
    assert not borrower.scheduler.has_unfinished_requests()
