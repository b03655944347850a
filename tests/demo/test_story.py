"""The demo tells the truth: its story and its verdict, from spans made by hand and from a real exporter.

No engines here; `make demo` is the test of the whole.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

import pytest
from kvlease.registry.telemetry import configure_tracing
from rich.console import Console

from tests.demo.__main__ import Run, rows, verdict
from tests.demo.conversation import Turn, differences
from tests.demo.screen import Progress, story_table, turn_table
from tests.demo.spans import Attribute, SeenSpan, SpanReceiver
from tests.demo.story import Reuse, lease_stories, reuse_of, turns

CHAT: Final = "conversation-1"
MS: Final = 1_000_000


def span(name: str, trace: str, at_ms: int, service: str = "engine", **attributes: Attribute) -> SeenSpan:
    return SeenSpan(
        name=name,
        service=service,
        trace_id=trace,
        span_id=f"{name}-{at_ms}",
        start_ns=(at_ms - 2) * MS,
        end_ns=at_ms * MS,
        attributes={f"kvlease.{key}": value for key, value in attributes.items()},
    )


SPANS: Final = [
    # Arrival is not the order of events: each process exports on its own.
    span("read", "t2", 52, lease_id="L1", tokens_reused=128, bytes_read=2**20, outcome="borrowed"),
    span("turn", "t2", 90, conversation=CHAT),
    span("turn", "t1", 20, conversation=CHAT),
    span("publish", "t1", 21, lease_id="L1", conversation=CHAT, tokens=128, blocks=4),
    span("publish", "t1", 22, "registry", lease_id="L1"),
    span("resolve", "t2", 50, lease_id="L1", tokens_matched=128, outcome="hit"),
    span("resolve", "t2", 49, "registry", lease_id="L1", tokens_matched=128),
    span("prove", "t2", 53, lease_id="L1", seals=1, outcome="borrowed"),
    span("publish", "t2", 91, lease_id="L2", conversation=CHAT, tokens=256, blocks=8),
    span("end", "t1", 93, lease_id="L1", end_reason="superseded"),
    span("turn", "other", 5, conversation="conversation-0"),
    span("publish", "other", 6, lease_id="L0", tokens=64, blocks=2),
]


TRACES: Final = ["t1", "t2"]


def test_turns_are_in_order_of_time() -> None:
    assert [turned.trace_id for turned in turns(SPANS)] == ["other", *TRACES]
    assert [turned.trace_id for turned in turns(SPANS, skip=1)] == TRACES


def test_reuse_of_a_turn() -> None:
    assert reuse_of(SPANS, "t2") == Reuse(tokens=128, bytes_read=2**20, outcome="borrowed")
    assert reuse_of(SPANS, "t1") == Reuse(outcome="nothing resolved")
    missed = [span("resolve", "t3", 9, outcome="diverged", tokens_matched=0)]
    assert reuse_of(missed, "t3") == Reuse(outcome="diverged")
    refused = [span("read", "t3", 9, tokens_reused=0, bytes_read=64, outcome="seal_broken")]
    assert reuse_of(refused, "t3") == Reuse(bytes_read=64, outcome="seal_broken")


def test_story_of_each_lease() -> None:
    first, second = lease_stories(SPANS, TRACES)
    assert [(event.what, event.turn, event.at_ms) for event in first.events] == [
        ("published", 1, 0.0),
        ("resolved", 2, 29.0),
        ("read", 2, 31.0),
        ("proven", 2, 32.0),
        ("ended", None, 72.0),
    ]
    assert first.events[-1].detail == "superseded"
    assert (first.lease_id, first.turn, first.tokens, first.ended) == ("L1", 1, 128, True)
    assert (second.lease_id, second.turn, second.ended) == ("L2", 2, False)


def test_broken_seal_is_told_as_refused() -> None:
    story, *_ = lease_stories([*SPANS, span("prove", "t2", 54, lease_id="L1", outcome="seal_broken")], TRACES)
    assert "refused" in [event.what for event in story.events]


def turn(*logprobs: float, prompt_tokens: int = 100) -> Turn:
    words = tuple(f" word{number}" for number in range(len(logprobs)))
    return Turn(prompt_tokens=prompt_tokens, text="".join(words), tokens=words, logprobs=logprobs, ttft_s=0.1)


def test_answers_are_compared_by_log_probs() -> None:
    assert not differences([turn(-1.0, -2.0)], [turn(-1.000001, -2.0)])
    assert differences([turn(-1.0, -2.0)], [turn(-1.0, -2.001)])
    assert differences([turn(-1.0)], [turn(-1.0, -2.0)])
    assert differences([turn(-1.0)], [turn(-1.0), turn(-1.0)])
    assert differences([turn(-1.0)], [turn(-1.0, prompt_tokens=101)])
    assert differences([turn()], [turn()]), "no tokens, nothing compared"


def good() -> Run:
    ended = [*SPANS, span("end", "t2", 99, lease_id="L2", end_reason="released")]
    return Run(
        turns=[turn(-1.0), turn(-2.0)],
        reuses=[reuse_of(ended, trace) for trace in TRACES],
        stories=lease_stories(ended, TRACES),
    )


def test_verdict() -> None:
    plain = Run(turns=good().turns)
    assert verdict(good(), plain) == []
    nothing = replace(good(), reuses=[Reuse(), Reuse(outcome="suspect")])
    assert verdict(nothing, plain) == ["turn 2 reused nothing: suspect"]
    assert verdict(replace(good(), reuses=[]), plain) == ["spans tell of 0 turns, the client had 2"]
    assert verdict(replace(good(), stories=lease_stories(SPANS, TRACES)), plain) == ["lease L2 of turn 2 has no end"]
    assert verdict(good(), replace(plain, turns=[turn(-1.0), turn(-2.5)]))


def test_tables_show_every_turn_and_event() -> None:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(turn_table(rows(good(), Run(turns=good().turns))))
        console.print(story_table(good().stories))
    shown = capture.get()
    for wanted in ("128 (128%)", "1.0 MiB", "1.0 ×", "published", "proven", "superseded", "released"):
        assert wanted in shown


def test_progress_without_a_terminal_is_one_line_a_change() -> None:
    console = Console(force_terminal=False, width=80)
    with console.capture() as capture, Progress(console, "Starting") as progress:
        progress("registry", "starting")
        progress("registry", "ready after 1 s")
    assert capture.get().splitlines() == ["Starting", "  registry: starting", "  registry: ready after 1 s"]


async def test_receiver_gets_what_a_real_exporter_sends() -> None:
    async with SpanReceiver() as receiver:
        tracing = configure_tracing("kvlease-test", otlp_endpoint=receiver.endpoint)
        with tracing.tracer.start_as_current_span("turn") as parent:
            parent.set_attribute("kvlease.conversation", CHAT)
            with tracing.tracer.start_as_current_span("read") as child:
                child.set_attribute("kvlease.bytes_read", 7)
        await asyncio.to_thread(tracing.close)
        assert await receiver.wait(lambda spans: len(spans) == 2, timeout_s=10)
        assert not await receiver.wait(lambda spans: len(spans) > 2, timeout_s=0.01)
        read, turned = sorted(receiver.spans, key=lambda seen: seen.name)
        assert (read.service, read.name, turned.name) == ("kvlease-test", "read", "turn")
        assert (read.parent_id, read.trace_id) == (turned.span_id, turned.trace_id)
        assert read.number("kvlease.bytes_read") == 7
        assert turned.text("kvlease.conversation") == CHAT
        assert turned.ms >= read.ms >= 0


@pytest.mark.parametrize("value", ["text", 3, 1.5, True])
async def test_attributes_keep_their_types(value: Attribute) -> None:
    async with SpanReceiver() as receiver:
        tracing = configure_tracing("kvlease-test", otlp_endpoint=receiver.endpoint)
        tracing.tracer.start_span("one", attributes={"key": value}).end()
        await asyncio.to_thread(tracing.close)
        assert await receiver.wait(bool, timeout_s=10)
        assert receiver.spans[0].attributes["key"] == value
        assert type(receiver.spans[0].attributes["key"]) is type(value)
