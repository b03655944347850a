"""`make demo`: a conversation on real engines, once with leases and once without, and what came of it.

Starts a registry, one prefill and one decode engine and the router, twice: with kvlease's connector, and with vLLM's
own. P's prefix cache is off in both, so that what is saved is saved by leases. Exit status: 0 if all turns after the
first reused something and both runs gave the same answers; 1 if not, or if something did not start; 130 after Ctrl-C.
Everything that was started is stopped in each case.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp
from openai import OpenAIError
from rich.console import Console

from tests.demo import story
from tests.demo.conversation import GROWING, SHORT, WARM_UP, Turn, differences, hold
from tests.demo.screen import Progress, Row, story_table, turn_table
from tests.demo.spans import SpanReceiver
from tests.engines.children import ChildFailed
from tests.engines.fleet import Fleet, FleetSettings, one_prefill_one_decode

SEED: Final = 7
SPAN_TIMEOUT_S: Final = 10.0
"""Spans are exported every 200 ms."""
END_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the client saw, and what the processes said about it."""

    turns: Sequence[Turn]
    reuses: Sequence[story.Reuse] = ()
    stories: Sequence[story.LeaseStory] = ()


async def with_leases(console: Console) -> Run:
    """The conversation on a fleet with kvlease."""
    async with SpanReceiver() as receiver:
        engines = one_prefill_one_decode(kvlease={}, prefill_prefix_caching=False)
        settings = FleetSettings(engines=engines, otlp_endpoint=receiver.endpoint)
        async with _running(console, settings, "Starting registry, engines and router, with leases") as fleet:
            return await _hold_with_leases(console, fleet, receiver)


@asynccontextmanager
async def _running(console: Console, settings: FleetSettings, title: str) -> AsyncIterator[Fleet]:
    """A fleet whose start is shown."""
    async with AsyncExitStack() as stack:
        with Progress(console, title) as progress:
            fleet = await stack.enter_async_context(Fleet(settings, progress))
        yield fleet


async def _hold_with_leases(console: Console, fleet: Fleet, receiver: SpanReceiver) -> Run:
    turns_before = 0

    async def lent(number: int, turn: Turn) -> None:
        """A person takes seconds to type the next message; the next turn here waits until this one's lease is out."""
        _show(console, number, turn)
        wanted = turns_before + number
        if not await receiver.wait(
            lambda spans: (
                sum(span.name == story.PUBLISH and "kvlease.blocks" in span.attributes for span in spans) >= wanted
            ),
            SPAN_TIMEOUT_S,
        ):
            console.print(f"  turn {number}: no lease was published within {SPAN_TIMEOUT_S:.0f} s", style="red")

    console.print("Warming up: a short conversation")
    await hold(fleet.router_url, WARM_UP, seed=SEED + 1, after_turn=lent)
    turns_before = len(WARM_UP)
    console.print("The conversation, with leases")
    turns = await hold(fleet.router_url, GROWING, seed=SEED, after_turn=lent)
    await receiver.wait(lambda spans: len(story.turns(spans, skip=len(WARM_UP))) >= len(GROWING), SPAN_TIMEOUT_S)
    measured = story.turns(receiver.spans, skip=len(WARM_UP))
    traces = [turn.trace_id for turn in measured]
    for conversation in dict.fromkeys(turn.text(story.CONVERSATION) for turn in measured):
        await _end_conversation(fleet, conversation)
    # A lender acts on an end in its next step; an idle one gets a step from a question too short to be lent.
    await hold(fleet.router_url, SHORT, seed=SEED + 2, after_turn=_unseen)
    if not await receiver.wait(
        lambda spans: all(lease.ended for lease in story.lease_stories(spans, traces)), END_TIMEOUT_S
    ):
        console.print(f"  some leases had not ended after {END_TIMEOUT_S:.0f} s", style="red")
    spans = receiver.spans
    return Run(
        turns=turns,
        reuses=[story.reuse_of(spans, trace_id) for trace_id in traces],
        stories=story.lease_stories(spans, traces),
    )


async def _unseen(_number: int, _turn: Turn) -> None:
    """A turn that is not part of the comparison."""


async def _end_conversation(fleet: Fleet, conversation: str) -> None:
    """What a client does that will not come back: its last lease is given back at once."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=END_TIMEOUT_S)) as http,
        http.delete(f"{fleet.router_url}/v1/conversations/{conversation}") as response,
    ):
        response.raise_for_status()


async def without_leases(console: Console) -> Run:
    """The same conversation on a fleet with vLLM's own connector and no registry."""
    engines = one_prefill_one_decode(kvlease=None, prefill_prefix_caching=False)
    settings = FleetSettings(engines=engines, registry=False)

    async def shown(number: int, turn: Turn) -> None:
        _show(console, number, turn)

    async with _running(console, settings, "Starting engines and router, without leases") as fleet:
        console.print("Warming up: a short conversation")
        await hold(fleet.router_url, WARM_UP, seed=SEED + 1, after_turn=shown)
        console.print("The same conversation, without leases")
        return Run(turns=await hold(fleet.router_url, GROWING, seed=SEED, after_turn=shown))


def _show(console: Console, number: int, turn: Turn) -> None:
    console.print(f"  turn {number}: {turn.prompt_tokens} prompt tokens, first token after {turn.ttft_s * 1000:.0f} ms")


def rows(leased: Run, plain: Run) -> list[Row]:
    """The table's rows."""
    return [
        Row(
            number=number,
            prompt_tokens=one.prompt_tokens,
            reused_tokens=reuse.tokens,
            bytes_read=reuse.bytes_read,
            outcome=reuse.outcome,
            with_s=one.ttft_s,
            without_s=other.ttft_s,
        )
        for number, (one, other, reuse) in enumerate(zip(leased.turns, plain.turns, leased.reuses, strict=True), 1)
    ]


def verdict(leased: Run, plain: Run) -> list[str]:
    """What is wrong with the two runs; empty if all is well."""
    faults = differences(leased.turns, plain.turns)
    if len(leased.reuses) != len(leased.turns):
        faults.append(f"spans tell of {len(leased.reuses)} turns, the client had {len(leased.turns)}")
    faults += [
        f"turn {number} reused nothing: {reuse.outcome}"
        for number, reuse in enumerate(leased.reuses, 1)
        if number > 1 and not reuse.tokens
    ]
    faults += [f"lease {lease.lease_id} of turn {lease.turn} has no end" for lease in leased.stories if not lease.ended]
    return faults


async def demo(console: Console) -> int:
    """Both runs and the comparison; returns the exit status."""
    leased = await with_leases(console)
    plain = await without_leases(console)
    console.print()
    faults = verdict(leased, plain)
    if len(leased.reuses) == len(leased.turns) == len(plain.turns):
        console.print(turn_table(rows(leased, plain)))
    console.print(story_table(leased.stories))
    for fault in faults:
        console.print(f"FAILED: {fault}", style="bold red")
    if faults:
        return 1
    console.print("Both runs gave the same answers, token by token and log-prob by log-prob.", style="green")
    return 0


async def _until_stopped(console: Console) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await demo(console)


def main() -> int:
    """Exit status as above."""
    argparse.ArgumentParser(prog="python -m tests.demo", description=__doc__).parse_args()
    console = Console()
    try:
        return asyncio.run(_until_stopped(console))
    except (ChildFailed, OpenAIError, aiohttp.ClientError) as error:
        console.print(f"FAILED: {error}", style="bold red", markup=False)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; everything is stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
