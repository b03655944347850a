"""The judge of a soak: what was wrong, which errors are excused, and the verdict. Pure; it is told what happened.

An error is excused only where the same chat without leases would have had it: the decode engine or the router was
killed while the request was under way. Prefill engines and the registry may go at any time without an error. Invariant:
a soak without turns, without reuse, without a red negative control or without a block ever seen held fails.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tests.engines.logprobs import TOLERANCE
from tests.soak.answers import Choice, Said
from tests.soak.chats import Step

HANG_S: Final = 150.0
"""No request takes so long on a machine that others use as well, whatever was killed or stopped."""
GRACE_S: Final = 0.5


class Fault(StrEnum):
    """What fails a soak."""

    WRONG = "wrong answer"
    ERROR = "error"
    ACCEPTED = "bad request accepted"
    HANG = "hang"
    LEAK = "leak"
    NO_REUSE = "no reuse"
    LATE_REUSE = "no reuse after a restart"
    DIED = "a process ended by itself"
    CONNECTOR = "fault inside the connector"
    BLIND = "blind judge"


@dataclass(slots=True, kw_only=True)
class Outage:
    """A process was killed; over once it serves again. Seconds of one monotonic clock."""

    name: str
    excuses: bool
    began_s: float
    ended_s: float = math.inf

    def covers(self, began_s: float, ended_s: float) -> bool:
        return self.excuses and began_s < self.ended_s + GRACE_S and ended_s > self.began_s


def difference(one: Choice, other: Choice) -> float:
    """Largest difference of a token's log-prob; infinite if tokens, text or the reason of the end differ."""
    same = (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
    if not same or not one.logprobs or len(one.logprobs) != len(other.logprobs):
        return math.inf
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def answer_difference(step: Step, said: Said) -> float:
    """Over all choices; infinite if their number or the prompt's length differs."""
    if len(said.choices) != len(step.choices) or said.prompt_tokens != step.prompt_tokens:
        return math.inf
    return max(difference(a, b) for a, b in zip(said.choices, step.choices, strict=True))


@dataclass(slots=True, kw_only=True)
class Judge:
    """Collects what happened."""

    faults: list[tuple[Fault, str]] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    longest_s: float = 0.0
    largest_difference: float = 0.0
    """Of right answers."""
    saw_blocks_held: bool = False
    """Whether the look at free blocks found some that live leases held."""
    _control_was_red: bool = False

    def fault(self, fault: Fault, what: str) -> None:
        self.faults.append((fault, what))

    def answered(self, step: Step, said: Said, took_s: float, what: str) -> None:
        """A turn came to its end."""
        self.counts["turns"] += 1
        self.kinds[step.kind] += 1
        self.prompt_tokens += said.prompt_tokens
        self._took(took_s, what)
        found = answer_difference(step, said)
        if found > TOLERANCE:
            self.fault(Fault.WRONG, f"{what}: {_told(step, said, found)}")
        else:
            self.largest_difference = max(self.largest_difference, found)

    def control(self, step: Step, said: Said) -> None:
        """The answer to a prompt that is not the step's: must be judged wrong."""
        if answer_difference(step, said) > TOLERANCE:
            self._control_was_red = True
        else:
            self.fault(Fault.BLIND, "an answer to another prompt was judged right")

    def failed(self, began_s: float, ended_s: float, what: str) -> None:
        """A request ended with an error, or was given up after HANG_S."""
        self._took(ended_s - began_s, what)
        if any(outage.covers(began_s, ended_s) for outage in self.outages):
            self.counts["errors excused"] += 1
        elif ended_s - began_s < HANG_S:
            self.fault(Fault.ERROR, what)

    def bad_request(self, status: int | None, what: str) -> None:
        """A request that must be refused got this status; None: it was answered."""
        self.counts["bad requests"] += 1
        if status is None:
            self.fault(Fault.ACCEPTED, what)
        elif not 400 <= status < 500:
            self.fault(Fault.ERROR, f"{what}: status {status}, not 4xx")

    def probed(self, reused: list[float], after: str) -> None:
        """Tokens that each turn of a new chat reused, after `after` came back: the second must."""
        self.counts["probes"] += 1
        if len(reused) < 2 or not reused[1]:
            self.fault(Fault.LATE_REUSE, f"{after}: tokens reused by turn: {[int(one) for one in reused]}")

    def end(self, reused_tokens: float) -> None:
        """Last of all."""
        if not self.counts["turns"]:
            self.fault(Fault.BLIND, "no turn was judged")
        if not self._control_was_red:
            self.fault(Fault.BLIND, "the judge was never seen red")
        if not self.saw_blocks_held:
            self.fault(Fault.BLIND, "leases were never seen to hold a block")
        if not reused_tokens:
            self.fault(Fault.NO_REUSE, "no token was reused in the whole run")

    def _took(self, took_s: float, what: str) -> None:
        self.longest_s = max(self.longest_s, took_s)
        if took_s >= HANG_S:
            self.fault(Fault.HANG, f"{what}: {took_s:.0f} s")


def _told(step: Step, said: Said, found: float) -> str:
    if math.isfinite(found):
        return f"log-probs differ by {found:.6f}, tolerance {TOLERANCE}"
    for index, (a, b) in enumerate(zip(said.choices, step.choices, strict=False)):
        at = next((n for n, pair in enumerate(zip(a.tokens, b.tokens, strict=False)) if pair[0] != pair[1]), None)
        if math.isinf(difference(a, b)):
            return (
                f"choice {index}: {len(a.tokens)} tokens, {a.finish_reason}; expected {len(b.tokens)}, "
                f"{b.finish_reason}; first other token at {at}"
            )
    counted = f"{len(said.choices)} choices and {said.prompt_tokens} prompt tokens"
    return f"{counted}; expected {len(step.choices)} and {step.prompt_tokens}"
