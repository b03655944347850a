"""Lent blocks never cost running work anything (L8): vLLM's real scheduler finds room as if no lease were there.

Each case has the same shape: leases hold most of the cache, something needs it, and what a scheduler without leases
would do must happen. How the room is made is not looked at.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="the scheduler is vLLM's: install the engines (make engines-venv)")

from kvlease.registry.metrics import LENDER_LEASED_BLOCKS

from tests.engines.engine import BLOCK_TOKENS
from tests.engines.inprocess import Desk, DeskSettings, desk, tokens

pytestmark = pytest.mark.engines


def lend(lender: Desk, count: int, blocks: int) -> None:
    """`count` finished turns of `blocks` blocks each, all lent."""
    for number in range(count):
        lender.add(
            f"lent-{number}", tokens(blocks * BLOCK_TOKENS + 1, seed=number + 1), kvlease={"conversation": f"c{number}"}
        )
        lender.run()


@pytest.mark.parametrize("at_once", [False, True], ids=["chat-by-chat", "branches-of-one-request"])
@pytest.mark.matrix(
    group="Memory is wanted",
    condition="many turns with one long beginning",
    lent="all; what they share counts once",
    reused="-",
    freed="-",
    recomputed="-",
)
def test_turns_with_one_long_beginning_are_all_lent(at_once: bool) -> None:
    """Their leases list more blocks than the pool has, and hold half of it."""
    system = tokens(20 * BLOCK_TOKENS, seed=70)
    with desk(DeskSettings(role="kv_consumer", blocks=65)) as lender:
        for number in range(6):
            prompt = [*system, *tokens(10, seed=0 if at_once else number + 1)]
            length = 2 * BLOCK_TOKENS + 1
            lender.add(f"turn-{number}", prompt, max_tokens=length, kvlease={"conversation": f"c{number}"})
            if not at_once:
                lender.run(100)
        lender.run(100)
        assert lender.leases == 6
        assert lender.side._lending._holder.live_blocks == 20 + 6 * 2
        lender.step()
        assert lender.count(LENDER_LEASED_BLOCKS) == 20 + 6 * 2


@pytest.mark.matrix(
    group="Memory is wanted",
    condition="running work needs blocks",
    lent="-",
    reused="-",
    freed="leases, before anything is preempted",
    recomputed="-",
)
def test_a_large_chunk_of_a_running_prefill_preempts_nobody() -> None:
    """Turns that end while a long prompt is computed are lent, and its next chunk finds too few blocks."""
    chunk, prompt = 20, 100
    settings = DeskSettings(
        role="kv_consumer",
        blocks=129,
        max_batched_tokens=1_024,
        max_model_len=4_096,
        engine={"long_prefill_token_threshold": chunk * BLOCK_TOKENS},
    )
    with desk(settings) as lender:
        beside = lender.add("beside", tokens(20, seed=90), max_tokens=40)
        long = lender.add("long", tokens(prompt * BLOCK_TOKENS, seed=91), max_tokens=2)
        lender.step()
        for number in range(3):
            lender.add(f"lent-{number}", tokens(352, seed=number + 1), kvlease={"conversation": f"c{number}"})
            lender.step()
        assert lender.leases == 3
        assert 16 < lender.free < chunk
        lender.run(100)
        assert (beside.num_preemptions, long.num_preemptions) == (0, 0)


def test_a_prompt_with_local_hits_is_admitted() -> None:
    """Blocks found in the prefix cache are free until they are used: they are no room for the rest of the prompt."""
    with desk(DeskSettings(role="kv_consumer", blocks=65)) as lender:
        known = tokens(24 * BLOCK_TOKENS, seed=80)
        lender.add("known", known)
        lender.run()
        lend(lender, 4, 8)
        assert lender.leases == 4
        lender.add("next", [*known, *tokens(20 * BLOCK_TOKENS, seed=81)], max_tokens=2)
        lender.run(20)


@pytest.mark.matrix(
    group="Memory is wanted",
    condition="a prompt finds no room",
    lent="-",
    reused="-",
    freed="leases, within the same step",
    recomputed="ended leases' next turns",
)
def test_many_leases_give_way_to_one_prompt() -> None:
    """What is missing is not known: they are asked again until it is there, within the same step."""
    with desk(DeskSettings(role="kv_consumer", blocks=65)) as lender:
        lend(lender, 7, 8)
        lender.add("next", tokens(50 * BLOCK_TOKENS, seed=60))
        lender.step()
        assert not lender.scheduler.has_unfinished_requests()


@pytest.mark.matrix(
    group="Memory is wanted",
    condition="leases could not make enough room",
    lent="stay",
    reused="-",
    freed="nothing",
    recomputed="-",
)
def test_leases_stay_when_their_end_would_not_help() -> None:
    """A prompt that waits for a running request's blocks does not cost the leases theirs."""
    with desk(DeskSettings(role="kv_consumer", blocks=65, max_batched_tokens=2_048)) as lender:
        lend(lender, 1, 8)
        lender.add("running", tokens(40 * BLOCK_TOKENS, seed=70), max_tokens=40)
        lender.step()
        lender.add("waiting", tokens(40 * BLOCK_TOKENS, seed=71), max_tokens=2)
        for _ in range(5):
            lender.step()
        assert lender.leases == 1
        lender.run(100)


def test_leases_that_share_blocks_stay_when_their_end_would_not_help() -> None:
    with desk(DeskSettings(role="kv_consumer", blocks=65)) as lender:
        system = tokens(16 * BLOCK_TOKENS, seed=80)
        for number in range(2):
            lender.add(
                f"lent-{number}", [*system, *tokens(66, seed=number + 1)], kvlease={"conversation": f"c{number}"}
            )
            lender.run()
        lender.add("running", tokens(30 * BLOCK_TOKENS, seed=70), max_tokens=40)
        lender.step()
        lender.add("waiting", tokens(40 * BLOCK_TOKENS, seed=71), max_tokens=2)
        for _ in range(5):
            lender.step()
        assert lender.leases == 2
        assert lender.side._lending._holder.live_blocks == 20
        lender.run(100)
