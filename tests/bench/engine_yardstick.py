"""What vLLM's own scheduler spends on a step: the measure of what kvlease adds to one.

A time in microseconds says as much about the machine as about the code; the same thread's own work, on the same machine
in the same run, does not. No connector is configured, the model is played, and between two steps the thread sleeps as
it does while a model runs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from tests.bench.figures import Figure, Unit, over_calls, quantile
from tests.engines.engine import BLOCK_TOKENS
from tests.engines.inprocess import DeskSettings, Played, tokens, without_connector

SECTION: Final = "vLLM's own part of an engine step"
RUNNING: Final = 32
"""Requests in the batch."""
PROMPT_TOKENS: Final = 1_024
WARM_STEPS: Final = 50
ROOM: Final = 8
"""Times the prompts' blocks: for all that is decoded after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """Wall time of `schedule` and `update_from_output` for a decode batch of RUNNING requests, in microseconds."""

    samples_us: tuple[float, ...]

    @property
    def p99_us(self) -> float:
        return quantile(self.samples_us, 0.99)

    def figures(self) -> list[Figure]:
        return [self._figure("p50", 0.5), self._figure("p99", 0.99)]

    def _figure(self, which: str, share: float) -> Figure:
        name = f"decode step of {RUNNING} requests, no connector, {which}"
        note = f"{len(self.samples_us)} steps"
        return over_calls(SECTION, name, Unit.MICROSECONDS, self.samples_us, share, note=note)


def measure(steps: int, sleep_s: float) -> Yardstick:
    """Times `steps` decode steps, `sleep_s` between two of them."""
    settings = DeskSettings(
        role="kv_both",
        blocks=ROOM * RUNNING * PROMPT_TOKENS // BLOCK_TOKENS,
        max_batched_tokens=RUNNING * PROMPT_TOKENS,
        max_model_len=16_384,
        engine={"max_num_seqs": RUNNING},
    )
    with without_connector(settings) as played:
        for number in range(RUNNING):
            played.add(f"running-{number}", tokens(PROMPT_TOKENS, seed=number), max_tokens=steps + WARM_STEPS + 10)
        played.step()
        for _ in range(WARM_STEPS):
            played.step()
        return Yardstick(samples_us=tuple(_step_us(played, sleep_s) for _ in range(steps)))


def _step_us(played: Played, sleep_s: float) -> float:
    """One step; what stands for the model's execution is not timed."""
    time.sleep(sleep_s)
    began_ns = time.perf_counter_ns()
    output = played.schedule()
    scheduled_ns = time.perf_counter_ns()
    assert len(output.num_scheduled_tokens) == RUNNING, "the batch has ended, or does not fit"
    executed = played.executed(output)
    updated_ns = time.perf_counter_ns()
    played.scheduler.update_from_output(output, executed)
    return (time.perf_counter_ns() - updated_ns + scheduled_ns - began_ns) / 1e3
