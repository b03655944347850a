"""Reuse on real engines: what is read, at which positions, and that every answer equals recomputation.

One prefill engine with its prefix cache off (all reuse comes from leases), one decode engine; no router. Log-probs
decide, since a small model answers with the same tokens even on wrong KV.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines.chat import STRIDE, Turns, ids, recompute, strides
from tests.engines.engine import BLOCK_TOKENS
from tests.engines.fleet import REGISTRY, Fleet, FleetSettings, one_prefill_one_decode
from tests.engines.logprobs import assert_same
from tests.engines.openai_client import OpenAIClient

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    engines = one_prefill_one_decode(
        kvlease={"renewable": True, "resolve_wait_ms": 5_000}, prefill_prefix_caching=False
    )
    async with Fleet(FleetSettings(engines=engines, router=False)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def prefill(fleet: Fleet) -> AsyncIterator[OpenAIClient]:
    async with OpenAIClient(fleet.prefill_url) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def decode(fleet: Fleet) -> AsyncIterator[OpenAIClient]:
    async with OpenAIClient(fleet.decode_url) as client:
        yield client


@pytest.fixture
def turns(prefill: OpenAIClient, decode: OpenAIClient) -> Turns:
    return Turns(prefill, decode)


@pytest.mark.matrix(
    group="A prompt borrows",
    condition="the next turn of a conversation",
    lent="-",
    reused="all that was lent",
    freed="superseded leases",
    recomputed="new tokens",
)
async def test_each_turn_reads_all_that_the_last_one_left(turns: Turns) -> None:
    last = await turns.turn(ids(500, seed=1), max_tokens=20)
    assert last.reused == 0
    for number in range(2, 6):
        turn = await turns.turn(last.history + ids(90, seed=number), max_tokens=20)
        assert turn.reused == last.lent
        await turns.check(turn, f"turn {number}")
        last = turn


@pytest.mark.matrix(
    group="A prompt borrows",
    condition="thinking taken out of the history",
    lent="-",
    reused="up to the first difference, in whole strides",
    freed="-",
    recomputed="the rest",
)
async def test_thinking_removed_from_the_history(turns: Turns) -> None:
    """R1: prompt 1k, thinking 2k, answer 100; the next turn leaves the thinking out. Only what is common is read."""
    prompt, thinking = ids(1_000, seed=10), 2_000
    first = await turns.turn(prompt, max_tokens=thinking + 100)
    answer = first.history[len(prompt) + thinking :]
    turn = await turns.turn(prompt + answer + ids(50, seed=11))
    assert turn.reused == strides(1_000)
    await turns.check(turn, "after stripped thinking")
    again = await recompute(turns.prefill, turn.prompt)
    assert_same(again, turn.answer, "the same prompt without a lease, afterwards")


@pytest.mark.matrix(
    group="A prompt borrows",
    condition="history tokenised again",
    lent="-",
    reused="up to the first difference, in whole strides",
    freed="-",
    recomputed="the rest",
)
async def test_history_that_was_tokenised_again(turns: Turns) -> None:
    """R3: ids differ from the generated ones somewhere in the middle of the answer."""
    first = await turns.turn(ids(700, seed=20), max_tokens=200)
    changed = first.history.copy()
    changed[800] += 1
    turn = await turns.turn(changed + ids(30, seed=21))
    assert turn.reused == strides(800)
    await turns.check(turn, "after other tokenisation")


@pytest.mark.parametrize("length", [STRIDE * 8 - 1, STRIDE * 8, STRIDE * 8 + 1, STRIDE * 8 + BLOCK_TOKENS])
async def test_prompts_that_end_near_a_stride(turns: Turns, length: int) -> None:
    """A prompt that is wholly covered by a lease still leaves at least one token to compute."""
    whole = ids(900, seed=30)
    first = await turns.turn(whole)
    turn = await turns.turn(first.prompt[:length])
    assert turn.reused == min(strides(length), (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    await turns.check(turn, f"prompt of {length} tokens")


@pytest.mark.matrix(
    group="A prompt borrows",
    condition="retry, regenerate, branches",
    lent="branches live side by side",
    reused="each of them",
    freed="-",
    recomputed="new tokens",
)
async def test_retry_regenerate_and_branches_all_reuse(turns: Turns) -> None:
    """S6: the same turn again, and three continuations of one turn at once."""
    first = await turns.turn(ids(640, seed=40), max_tokens=16)
    second_prompt = first.history + ids(40, seed=41)
    second = await turns.turn(second_prompt)
    retry = await turns.turn(second_prompt)
    assert second.reused == first.lent
    assert retry.reused >= first.lent
    assert_same(retry.answer, second.answer, "retry")
    branches = await asyncio.gather(*(turns.turn(second.history + ids(70, seed=42 + n)) for n in range(3)))
    for branch in branches:
        assert branch.reused >= second.lent
        await turns.check(branch, "branch")


@pytest.mark.matrix(
    group="A prompt borrows",
    condition="another tenant, another cache salt",
    lent="-",
    reused="nothing",
    freed="-",
    recomputed="all",
)
async def test_nothing_is_shared_across_tenants_or_salts(turns: Turns) -> None:
    prompt = ids(400, seed=50)
    first = await turns.turn(prompt, salt="one")
    assert (await turns.turn([*first.history, 101], salt="one")).reused == first.lent
    assert (await turns.turn([*first.history, 101], salt="two")).reused == 0
    assert (await turns.turn([*first.history, 101])).reused == 0
    assert (await turns.turn([*first.history, 101], salt="one", tenant="somebody-else")).reused == 0


@pytest.mark.matrix(
    group="A prompt borrows",
    condition="no conversation id",
    lent="-",
    reused="the longest common prefix",
    freed="-",
    recomputed="the rest",
)
async def test_a_prefix_is_found_without_its_conversation(prefill: OpenAIClient, decode: OpenAIClient) -> None:
    first = await Turns(prefill, decode).turn(ids(600, seed=60))
    other = Turns(prefill, decode)
    turn = await other.turn(first.prompt + ids(60, seed=61))
    assert turn.reused == strides(600)
    await other.check(turn, "another conversation with the same beginning")


@pytest.mark.matrix(
    group="A prompt borrows",
    condition="a match below the threshold",
    lent="-",
    reused="nothing",
    freed="-",
    recomputed="all",
)
async def test_short_matches_are_not_worth_a_read(turns: Turns) -> None:
    """`kv_recompute_threshold`: fewer tokens than that are computed; a request may set its own."""
    first = await turns.turn(ids(STRIDE + 5, seed=70))
    assert (await turns.turn([*first.history, 101], recompute_threshold=STRIDE + 1)).reused == 0
    assert (await turns.turn([*first.history, 101], recompute_threshold=STRIDE)).reused == STRIDE


@pytest.mark.matrix(
    group="Time passes",
    condition="deadline, lapsing",
    lent="-",
    reused="until the blocks are reused",
    freed="at the deadline",
    recomputed="after it",
)
async def test_lapsed_leases_are_read_until_their_blocks_are_reused(turns: Turns) -> None:
    """T2, lapsing on: past the deadline the KV is still there, as long as nobody needs the memory."""
    first = await turns.turn(ids(640, seed=80), ttl_ms=0)
    await turns.turn(ids(100, seed=81))  # the lender works on something else
    turn = await turns.turn(first.history + ids(20, seed=82))
    assert turn.reused == first.lent
    await turns.check(turn, "from a lapsed lease")


@pytest.mark.matrix(
    group="A borrow fails",
    condition="registry away",
    lent="kept, and presented when it is back",
    reused="nothing meanwhile",
    freed="-",
    recomputed="all, after a bounded wait",
)
async def test_without_a_registry_turns_are_computed_and_reuse_is_back_with_it(fleet: Fleet, turns: Turns) -> None:
    first = await turns.turn(ids(640, seed=90))
    fleet.child(REGISTRY).signal(signal.SIGKILL)
    await fleet.child(REGISTRY).wait(5)
    turn = await turns.turn(first.history + ids(20, seed=91))
    assert turn.reused == 0
    await turns.check(turn, "without a registry")
    await fleet.start(REGISTRY)
    for _ in range(20):  # each try is a whole turn: a few seconds in all
        again = await turns.turn(first.history + ids(20, seed=91))
        await turns.check(again, "after the registry came back")
        if again.reused >= first.lent:
            return
    pytest.fail("the lender did not present its leases to the new registry")


@pytest.mark.parametrize(("on_deadline", "afterwards"), [("end", False), ("lapse", True)])
@pytest.mark.matrix(
    group="Time passes",
    condition="deadline, on_deadline: end",
    lent="-",
    reused="before it",
    freed="at the deadline",
    recomputed="after it",
)
async def test_before_and_after_the_deadline(turns: Turns, on_deadline: str, afterwards: bool) -> None:
    """T2, shortened to a ttl of 3 s, the lender busy: reuse before; after, only while lapsed blocks last."""
    first = await turns.turn(ids(640, seed=100), ttl_ms=3_000, on_deadline=on_deadline)
    prompt = [*first.history, *ids(20, seed=101)]
    for wait_s, reused in ((1.0, True), (2.5, afterwards)):
        await asyncio.sleep(wait_s)
        await Turns(turns.prefill, turns.decode).turn(ids(100, seed=102))
        answer = await turns.prefill.complete(
            prompt,
            max_tokens=1,
            return_tokens_as_token_ids=True,
            ignore_eos=True,
            kv_transfer_params={"kvlease": {"conversation": turns.conversation}},
        )
        assert answer.cached_tokens == (first.lent if reused else 0)
        assert_same(answer, await recompute(turns.prefill, prompt, max_tokens=1), f"{on_deadline} after {wait_s} s")
