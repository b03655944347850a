"""Weights that change in place, on vLLM's real scheduler and executor: leases end first, and nothing mixes (R7, H2).

A worker is played by an object that notes what it finds when a call reaches it; between it and the engine stand vLLM's
own `EngineCore` methods and executor class. What reaches no executor cannot be seen here, nor by the connector.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the scheduler is vLLM's: install the engines (make engines-venv)")

from kvlease.connector.borrower import ComputeReason
from kvlease.registry.metrics import BORROWER_MISSES, LENDER_ENDS, LENDER_NOT_LENT

from tests.engines.engine import BLOCK_TOKENS
from tests.engines.inprocess import Desk, DeskSettings, Loads, desk, tokens
from tests.engines.inprocess_leases import LENDER_PARAMS, hit

pytestmark = pytest.mark.engines


class Worker:
    """Notes, for each call, how many of the lender's seals were whole and how many blocks were free by then."""

    def __init__(self, lender: Desk) -> None:
        self._lender = lender
        self.found: dict[str, tuple[int, int]] = {}

    def __getattr__(self, name: str) -> Any:
        def called(*_: Any, **__: Any) -> None:
            self.found[name] = (self._lender.whole_seals, self._lender.free)

        return called


class Engine:
    """The engine's calls to its workers and its weight version, with nothing else of the engine around them."""

    def __init__(self, lender: Desk) -> None:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        self.worker = Worker(lender)
        executor = object.__new__(Executor.get_class(lender.side.vllm_config))
        executor.driver_worker = self.worker
        executor.sleeping_tags = set()
        self.core = object.__new__(EngineCore)
        self.core.model_executor = executor
        self.core.scheduler = lender.scheduler
        self.core.structured_output_manager = None
        self.core.mm_receiver_cache = None
        self.core.batch_queue = None


def lend(lender: Desk, number: int = 0, *, params: dict[str, object] | None = None) -> None:
    """A turn of two blocks."""
    lender.add(f"turn-{number}", tokens(66, seed=number + 1), params=params, kvlease={"conversation": f"c{number}"})
    lender.run()


@pytest.fixture(params=[True, False], ids=["cached", "uncached"])
def lender(request: pytest.FixtureRequest) -> Iterator[Desk]:
    with desk(DeskSettings(role="kv_consumer", prefix_caching=request.param)) as opened:
        yield opened


def run(engine: Engine, call: str, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """Calls the workers as `/collective_rpc` does; what the worker found."""
    engine.core.collective_rpc(call, None, args, kwargs)
    return engine.worker.found[call]


def custom(worker: Any) -> None:
    """A function of an operator's own, run on the workers."""
    worker.custom()


@pytest.mark.parametrize("call", ["reload_weights", "start_weight_update", "update_weights", "load_everything_anew"])
@pytest.mark.matrix(
    group="Something changes under a lease",
    condition="weight transfer, or a call that nobody knows",
    lent="nothing until they have a name",
    reused="nothing",
    freed="all leases, before",
    recomputed="all",
)
def test_leases_end_before_a_worker_changes_weights(lender: Desk, call: str) -> None:
    lend(lender)
    assert (lender.leases, lender.whole_seals) == (1, 1)
    whole, free = run(Engine(lender), call)
    assert (whole, free) == (0, lender.pool.num_gpu_blocks - 1)
    assert lender.count(LENDER_ENDS, reason="weights_changed") == 1


def test_lapsed_leases_end_as_well() -> None:
    with desk(DeskSettings(role="kv_consumer", kvlease={"lease_ttl_ms": 0})) as lender:
        lend(lender)
        lender.step()
        lender.step()  # gives back what the step before has made owed
        assert (lender.free, lender.whole_seals) == (lender.pool.num_gpu_blocks - 1, 1)
        assert run(Engine(lender), "reload_weights")[0] == 0
        assert lender.leases == 0


def test_a_function_that_workers_are_to_run_may_change_weights(lender: Desk) -> None:
    lend(lender)
    engine = Engine(lender)
    engine.core.collective_rpc(custom)
    assert engine.worker.found["custom"][0] == 0
    assert lender.leases == 0


def test_calls_that_change_nothing_leave_leases_alone(lender: Desk) -> None:
    lend(lender)
    engine = Engine(lender)
    for call in ("list_loras", "execute_dummy_batch", "compute_weight_checksums", "wake_up"):
        assert run(engine, call)[0] == 1
    assert lender.leases == 1
    lend(lender, 1)
    assert lender.leases == 2


def test_an_operators_own_call_is_harmless_if_the_settings_say_so() -> None:
    with desk(DeskSettings(role="kv_consumer", kvlease={"harmless_calls": ["custom"]})) as lender:
        lend(lender)
        engine = Engine(lender)
        engine.core.collective_rpc(custom)
        assert engine.worker.found["custom"][0] == 1
        assert lender.leases == 1


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.matrix(
    group="Something changes under a lease",
    condition="sleep, level 1 and 2",
    lent="after level 1",
    reused="nothing",
    freed="all leases, before",
    recomputed="all",
)
def test_sleep_finds_no_lease(lender: Desk, level: int) -> None:
    """H2: the engine itself resets the cache before the memory goes."""
    lend(lender)
    engine = Engine(lender)
    engine.core.sleep(level)
    assert engine.worker.found["sleep"] == (0, lender.pool.num_gpu_blocks - 1)
    assert lender.count(LENDER_ENDS, reason="cache_reset") == 1
    lender.scheduler.set_pause_state(type(lender.scheduler.pause_state).UNPAUSED)
    lend(lender, 1)
    assert lender.leases == (1 if level == 1 else 0), "weights that were discarded are not those of before"


@pytest.mark.parametrize("call", [("sleep", 1), ("discard", ("kv_cache",))], ids=["sleep", "discard"])
def test_memory_that_goes_without_a_reset_finds_no_lease_either(lender: Desk, call: tuple[str, object]) -> None:
    lend(lender)
    name, argument = call
    assert run(Engine(lender), name, argument)[0] == 0
    lend(lender, 1)
    assert lender.leases == 1


@pytest.mark.matrix(
    group="Something changes under a lease",
    condition="KV memory released",
    lent="-",
    reused="nothing",
    freed="all leases, before",
    recomputed="all",
)
def test_release_of_kv_memory_finds_no_lease(lender: Desk) -> None:
    lend(lender)
    lender.step()
    engine = Engine(lender)
    engine.core.pause_scheduler(mode="abort", clear_cache=False)
    engine.core.release_kv_cache_memory()
    assert engine.worker.found["discard"][0] == 0


def test_changed_weights_are_lent_again_once_they_have_a_name(lender: Desk) -> None:
    """Under another fingerprint, so that only engines with weights of that name match."""
    before = lender.side._identity.fingerprint
    engine = Engine(lender)
    lend(lender)
    assert lender.scheduler.reset_prefix_cache()
    run(engine, "reload_weights")
    lend(lender, 1)  # its KV is of the new weights already
    assert lender.leases == 0
    assert lender.count(LENDER_NOT_LENT, reason="weights_changed") == 1
    engine.core.set_weight_version("step-17")
    lend(lender, 2)
    assert lender.leases == 1
    after = lender.side._identity.fingerprint
    assert before.differences(after) == ("weights_version",)
    assert dict(after.fields)["weights_version"] == "0, step-17"
    assert lender.side._lending._holder._terms.fingerprint_hash == after.hash


@pytest.mark.matrix(
    group="Something changes under a lease",
    condition="weights change while a turn runs",
    lent="nothing",
    reused="-",
    freed="all at its end",
    recomputed="the next turn",
)
def test_a_turn_that_ran_across_the_change_is_not_lent(lender: Desk) -> None:
    engine = Engine(lender)
    lender.add("across", tokens(70), max_tokens=80, kvlease={"conversation": "c"})
    lender.step()
    run(engine, "update_weights")
    engine.core.set_weight_version("next")
    lender.run(100)
    assert lender.leases == 0
    assert lender.count(LENDER_NOT_LENT, reason="weights_changed") == 1


def test_a_turn_that_finds_earlier_kv_in_the_cache_is_not_lent() -> None:
    """Weights renewed without a reset: what the engine's own cache gives is of both."""
    with desk(DeskSettings(role="kv_consumer")) as lender:
        engine = Engine(lender)
        lender.add("before", tokens(66))
        lender.run()
        run(engine, "reload_weights")
        engine.core.set_weight_version("next")
        lender.add("after", tokens(130), kvlease={"conversation": "c"})
        lender.run()
        assert lender.leases == 0


def test_the_engines_methods_are_its_own_again_afterwards() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    with desk(DeskSettings(role="kv_consumer")) as lender:
        executor = Executor.get_class(lender.side.vllm_config)
        held = executor.collective_rpc, EngineCore.set_weight_version
    assert executor.collective_rpc is not held[0]
    assert executor.collective_rpc is held[0].__wrapped__
    assert EngineCore.set_weight_version is held[1].__wrapped__


def test_a_borrower_with_changed_weights_reads_nothing_that_it_asked_for_before() -> None:
    with desk(DeskSettings(role="kv_producer")) as borrower:
        request = borrower.add("next", tokens(10 * BLOCK_TOKENS), kvlease={})
        hit(borrower, request, strides=4)
        run(Engine(borrower), "reload_weights")
        borrower.run()
        assert borrower.count(BORROWER_MISSES, reason=ComputeReason.FINGERPRINT.value) == 1
        request = borrower.add("later", tokens(10 * BLOCK_TOKENS, seed=4), kvlease={})
        Engine(borrower).core.set_weight_version("step-17")
        borrower.step()
        borrower.run()
        assert borrower.free == borrower.pool.num_gpu_blocks - 1


@pytest.mark.parametrize(("theirs", "leases"), [("0", 1), ("0, step-17", 0), ("unknown", 0), (None, 1)])
@pytest.mark.matrix(
    group="Something changes under a lease",
    condition="prefilled with other weights",
    lent="nothing",
    reused="-",
    freed="all at its end",
    recomputed="the next turn",
)
def test_a_turn_prefilled_with_other_weights_is_not_lent(theirs: str | None, leases: int) -> None:
    """While a fleet changes engine by engine. A stock prefill engine does not say, and is believed as vLLM does."""
    received: dict[str, object] = {**LENDER_PARAMS, "do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]]}
    if theirs is not None:
        received["kvlease_weights"] = theirs
    with desk(DeskSettings(role="kv_consumer")) as lender:
        lender.add("turn", tokens(3 * BLOCK_TOKENS), max_tokens=5, params=received, kvlease={"conversation": "c"})
        lender.step(Loads(finished={"turn"}))
        lender.run()
        assert lender.leases == leases
        assert lender.count(LENDER_NOT_LENT, reason="weights_changed") == 1 - leases


@pytest.mark.parametrize("later", ["beside it", "after it", "prefilled elsewhere"])
@pytest.mark.parametrize(("theirs", "found"), [("0", 3), ("0, step-17", 0), ("unknown", 0), (None, 3)])
@pytest.mark.matrix(
    group="Something changes under a lease",
    condition="a turn after one prefilled with other weights",
    lent="its own KV",
    reused="-",
    freed="-",
    recomputed="what the other weights computed",
)
def test_no_other_turn_finds_kv_of_other_weights(theirs: str | None, found: int, later: str) -> None:
    """A fleet renewed decode first: by now both sides have the same weights, and what a turn finds here is lent on."""
    received: dict[str, object] = {**LENDER_PARAMS, "do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]]}
    if theirs is not None:
        received["kvlease_weights"] = theirs
    with desk(DeskSettings(role="kv_consumer")) as lender:
        turn = lender.add("turn", tokens(3 * BLOCK_TOKENS), max_tokens=BLOCK_TOKENS + 2, params=received)
        lender.step(Loads(finished={"turn"}))
        if later == "beside it":
            lender.step()
        else:
            lender.run()
            found += found // 3  # with what it has generated
        prompt = [*turn.all_token_ids, *tokens(BLOCK_TOKENS, seed=1)]
        params: dict[str, object] = {}
        if later == "prefilled elsewhere":
            blocks = [list(range(10, 10 + -(-len(prompt) // BLOCK_TOKENS)))]
            params = {**received, "kvlease_weights": "0", "do_remote_prefill": True, "remote_block_ids": blocks}
        lender.add("next", prompt, params=params, kvlease={"conversation": "c"})
        output = lender.schedule()
        if params:
            fetched = output.kv_connector_metadata.reqs_to_recv["next"].local_block_ids[0]
            assert len(fetched) == -(-len(prompt) // BLOCK_TOKENS) - found
        else:
            assert output.scheduled_new_reqs[0].num_computed_tokens == found * BLOCK_TOKENS
        lender.finish(output, Loads(finished={"next"}) if params else None)
        lender.run()
        assert lender.leases == 1
        lender.add("again", prompt)
        output = lender.step()
        assert output.scheduled_new_reqs[0].num_computed_tokens == len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        lender.run()
        assert not lender.side._weights._foreign


def test_a_prefill_says_which_weights_it_was_made_with() -> None:
    with desk(DeskSettings(role="kv_producer")) as prefill:
        engine = Engine(prefill)
        handed: list[object] = []
        for name in (None, "step-17"):
            if name is None:
                run(engine, "reload_weights")
            else:
                engine.core.set_weight_version(name)
            prefill.add("turn", tokens(70), params={"do_remote_decode": True})
            output = prefill.schedule()
            [finished] = [item for outputs in prefill.finish(output).values() for item in outputs.outputs]
            handed.append(finished.kv_transfer_params["kvlease_weights"])
            done = Loads()
            done.sent.add("turn")
            prefill.step(done)
        assert handed == ["unknown", "0, step-17"]
