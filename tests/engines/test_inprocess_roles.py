"""Engines of both roles, and engines that guess ahead, on vLLM's real scheduler: nobody reads itself, only real tokens.

Guessed tokens are handed to the scheduler as its proposer would; whether they were right is said by the step's output.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="the scheduler is vLLM's: install the engines (make engines-venv)")

from kvlease.connector.borrower import ComputeReason
from kvlease.connector.link import Answer
from kvlease.registry.metrics import BORROWER_MISSES
from kvlease.registry.values import EndReason

from tests.engines.chat import STRIDE
from tests.engines.engine import BLOCK_TOKENS
from tests.engines.inprocess import OUTPUT_TOKEN, Desk, DeskSettings, desk, tokens
from tests.engines.inprocess_leases import hit

pytestmark = pytest.mark.engines

PROMPT = tokens(10 * BLOCK_TOKENS)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.matrix(
    group="A prompt borrows",
    condition="the lease is the own engine's (kv_both)",
    lent="-",
    reused="from its own prefix cache",
    freed="-",
    recomputed="all, without one",
)
def test_an_engine_of_both_roles_serves_its_own_lease_from_its_cache_or_computes(cached: bool) -> None:
    with desk(DeskSettings(role="kv_both", prefix_caching=cached)) as engine:
        engine.add("first", PROMPT, kvlease={"conversation": "c"})
        engine.side._link.answers.append(Answer(request_id="first", found=ComputeReason.UNKNOWN))
        engine.run()
        assert engine.leases == 1
        request = engine.add("second", [*PROMPT, *tokens(40, seed=2)], kvlease={"conversation": "c"})
        hit(engine, request, strides=4, lender="desk")
        output = engine.schedule()
        assert not output.kv_connector_metadata.reqs_to_recv
        assert output.num_scheduled_tokens["second"] == (40 if cached else 360)
        assert engine.count(BORROWER_MISSES, reason=ComputeReason.OWN_LEASE.value) == 1
        engine.finish(output)
        engine.run()


def guessing(*, ahead: bool) -> DeskSettings:
    return DeskSettings(
        role="kv_consumer",
        async_scheduling=ahead,
        prefix_caching=False,
        engine={
            "speculative_config": {
                "method": "ngram_gpu" if ahead else "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        },
    )


def guess(engine: Desk) -> None:
    """Three tokens are proposed for the request."""
    from vllm.v1.outputs import DraftTokenIds

    engine.scheduler.update_draft_token_ids(DraftTokenIds(["turn"], [[OUTPUT_TOKEN] * 3]))


def abort(engine: Desk) -> None:
    from vllm.v1.request import RequestStatus

    engine.scheduler.finish_requests("turn", RequestStatus.FINISHED_ABORTED)


@pytest.mark.parametrize(
    ("prompt_tokens", "accepted", "strides"),
    [(127, None, 1), (127, 0, 2), (124, 0, 1), (124, 3, 2), (125, 2, 2), (125, 1, 1)],
    ids=["under-way", "none-right", "none-right-short", "all-right", "two-right", "one-right"],
)
@pytest.mark.matrix(
    group="A turn ends",
    condition="speculative decoding",
    lent="real tokens only",
    reused="-",
    freed="the rest at once",
    recomputed="rejected guesses",
)
def test_guessed_tokens_are_lent_only_if_they_were_right(
    prompt_tokens: int, accepted: int | None, strides: int
) -> None:
    """R8: the step that checks three guesses has computed past the real tokens when the client goes away."""
    with desk(guessing(ahead=False)) as engine:
        engine.add("turn", tokens(prompt_tokens), max_tokens=9, kvlease={"conversation": "c"})
        engine.step()
        guess(engine)
        output = engine.schedule()
        assert output.num_scheduled_tokens == {"turn": 4}
        if accepted is not None:
            engine.finish(output, accepted=accepted)
        abort(engine)
        if accepted is None:
            engine.finish(output)
        held = list(engine.side._lending._holder._held.values())
        assert [len(lease.loan.chain) for lease in held] == ([strides] if strides else [])


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def guesser(request: pytest.FixtureRequest) -> Iterator[Desk]:
    with desk(guessing(ahead=request.param)) as opened:
        yield opened


def lent_strides(engine: Desk) -> list[int]:
    """How many strides each lease has; they end."""
    found = [len(lease.loan.chain) for lease in engine.side._lending._holder._held.values()]
    engine.side._lending.end_all(EndReason.RELEASED)
    return found


@pytest.fixture(scope="module")
def running_ahead() -> Iterator[Desk]:
    with desk(guessing(ahead=True)) as opened:
        yield opened


@pytest.mark.parametrize("prompt_tokens", range(120, 128))
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("processed", [0, 1, 2])
def test_guesses_of_steps_that_run_ahead_are_lent_only_once_they_were_right(
    running_ahead: Desk, prompt_tokens: int, accepted: int, processed: int
) -> None:
    """R8: three steps are scheduled before the first one is over, each as if all guesses before it were right."""
    running_ahead.add("turn", tokens(prompt_tokens), max_tokens=20, kvlease={"conversation": "c"})
    steps = [running_ahead.schedule() for _ in range(3)]
    assert [step.num_scheduled_tokens["turn"] for step in steps] == [prompt_tokens, 4, 4]
    for number, step in enumerate(steps[:processed]):
        running_ahead.finish(step, accepted=accepted if number else 0)
    abort(running_ahead)
    real = (0, prompt_tokens, prompt_tokens + 1 + accepted)[processed]
    assert lent_strides(running_ahead) == ([real // STRIDE] if real else [])
    for step in steps[processed:]:
        running_ahead.finish(step, accepted=3)


@pytest.mark.parametrize("prompt_tokens", range(122, 128))
def test_guesses_past_the_end_of_a_turn_are_not_lent(guesser: Desk, prompt_tokens: int) -> None:
    """Three guesses are right, and the answer may have only two of them."""
    guesser.add("turn", tokens(prompt_tokens), max_tokens=3, kvlease={"conversation": "c"})
    guesser.step()
    guess(guesser)
    output = guesser.schedule()
    assert output.num_scheduled_tokens == {"turn": 4}
    guesser.finish(output, accepted=3)
    guesser.run()
    assert lent_strides(guesser) == [(prompt_tokens + 3) // STRIDE]
