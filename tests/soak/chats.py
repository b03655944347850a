"""Chats made by seed, each turn with the answer that a reference engine gave: what a soak plays and judges by.

A chat is held once with the reference, so its history has the reference's own answers and can be played again and
again. Nothing here knows the fleet under test. Invariant: no greedy decision of a recorded answer is closer than
`CLEAR`, so that rounding cannot turn a right answer into another one.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from tests.engines.model import MODEL_NAME, WORDS
from tests.soak.answers import Body, Choice, Said

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
CLEAR: Final = 2e-4
"""Natural logarithm; the judge's tolerance is 1e-4."""
TRIES: Final = 12

Ask = Callable[[str, Body], Awaitable[Said]]
"""Sends a body to a path of the reference engine."""


class Kind(StrEnum):
    """What is special about a turn."""

    PLAIN = "plain"
    STOP = "stop"
    """Ends at a stop string."""
    TOOL = "tool"
    """Ends at a string that stays in the answer, as the end of a tool call does; the next message is the tool's."""
    SEVERAL = "several"
    """n > 1: sampled, from one candidate, so that the answer is known."""
    BRANCH = "branch"
    """Goes on from an earlier turn with another message."""
    EDITED = "edited"
    """An answer in the history was shortened, as when a client leaves thoughts out."""
    LIST = "list"
    """A list of prompts in one request."""


_CHAT_KINDS: Final = {Kind.PLAIN: 10, Kind.STOP: 2, Kind.TOOL: 2, Kind.SEVERAL: 2, Kind.BRANCH: 2, Kind.EDITED: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn: the request without what a client adds at the time (salt, stream, conversation), and the answer."""

    kind: Kind
    path: str
    body: Body
    prompt_tokens: int
    choices: tuple[Choice, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Step:
        choices = tuple(
            Choice(
                text=one["text"],
                tokens=tuple(one["tokens"]),
                logprobs=tuple(one["logprobs"]),
                finish_reason=one["finish_reason"],
            )
            for one in fields["choices"]
        )
        return cls(**{**fields, "kind": Kind(fields["kind"]), "choices": choices})


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _first_size(rng: random.Random) -> int:
    low, high = rng.choices([(5, 60), (100, 500), (800, 2_000)], weights=[3, 5, 3])[0]
    return rng.randint(low, high)


def _next_size(rng: random.Random) -> int:
    return rng.randint(150, 500) if rng.random() < 0.15 else rng.randint(3, 60)


def _max_tokens(rng: random.Random) -> int:
    return rng.randint(60, 140) if rng.random() < 0.12 else rng.randint(3, 40)


def _edited(history: list[Body], rng: random.Random) -> list[Body]:
    answers = [index for index, message in enumerate(history) if message["role"] == "assistant"]
    at = rng.choice(answers)
    text = history[at]["content"].split()
    shorter = " " + " ".join(text[len(text) // 2 :])
    return [*history[:at], {**history[at], "content": shorter}, *history[at + 1 :]]


async def record_chat(seed: str, ask: Ask) -> list[Step]:
    """Hold the chat of this seed with the reference."""
    rng = random.Random(seed)
    if rng.random() < 0.12:
        return await _record_text(rng, ask)
    shared = random.Random(rng.randint(0, 2))  # a few system prompts that many chats have in common
    history: list[Body] = [{"role": "system", "content": words(shared, 90)}] if rng.random() < 0.5 else []
    extra: Body = {"chat_template_kwargs": {"enable_thinking": False}} if rng.random() < 0.15 else {}
    before: list[list[Body]] = []
    steps: list[Step] = []
    for number in range(rng.randint(2, 7)):
        kind = rng.choices(list(_CHAT_KINDS), weights=list(_CHAT_KINDS.values()))[0]
        if not before and kind in (Kind.BRANCH, Kind.EDITED):
            kind = Kind.PLAIN
        if kind is Kind.BRANCH:
            history = list(rng.choice(before))
        if kind is Kind.EDITED:
            history = _edited(history, rng) if any(one["role"] == "assistant" for one in history) else history
        before.append(list(history))
        size = _next_size(rng) if number else _first_size(rng)
        role = "tool" if history and history[-1].get("tool_calls") else "user"

        def body(history: list[Body] = history, role: str = role, size: int = size) -> Body:
            message: Body = {"role": role, "content": words(rng, size)}
            if role == "tool":
                message["tool_call_id"] = "call-1"
            return {"messages": [*history, message], "logprobs": True, "top_logprobs": 2, **extra}

        step = await _record(rng, ask, kind, CHAT, body)
        chosen = rng.choice(step.choices)
        answer: Body = {"role": "assistant", "content": chosen.text}
        if kind is Kind.TOOL:
            answer["tool_calls"] = [
                {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            ]
        history = [*step.body["messages"], answer]
        steps.append(step)
    return steps


async def _record_text(rng: random.Random, ask: Ask) -> list[Step]:
    prompt, steps = "", list[Step]()
    for number in range(rng.randint(2, 5)):
        kind = rng.choices([Kind.PLAIN, Kind.STOP, Kind.LIST], weights=[5, 2, 1])[0]
        size = _next_size(rng) if number else _first_size(rng)

        def body(prompt: str = prompt, size: int = size, kind: Kind = kind) -> Body:
            text = f"{prompt} {words(rng, size)}"
            return {"prompt": [text, f"{text} {words(rng, 3)}"] if kind is Kind.LIST else text, "logprobs": 2}

        step = await _record(rng, ask, kind, TEXT, body)
        asked = step.body["prompt"]
        prompt = (asked[0] if kind is Kind.LIST else asked) + step.choices[0].text
        steps.append(step)
    return steps


async def _record(rng: random.Random, ask: Ask, kind: Kind, path: str, make: Callable[[], Body]) -> Step:
    for _ in range(TRIES):
        body = {"model": MODEL_NAME, "temperature": 0, "max_tokens": _max_tokens(rng), **make()}
        if kind is Kind.SEVERAL:
            body |= {"n": rng.randint(2, 3), "temperature": 1, "top_k": 1}  # vLLM refuses n > 1 at temperature 0
        said = await ask(path, body)
        if kind in (Kind.STOP, Kind.TOOL):
            tokens = said.choices[0].tokens
            body["stop"] = [tokens[rng.randrange(len(tokens))]]
            if kind is Kind.TOOL:
                body["include_stop_str_in_output"] = True
            said = await ask(path, body)
        if said.gap > CLEAR:
            return Step(kind=kind, path=path, body=body, prompt_tokens=said.prompt_tokens, choices=said.choices)
    raise RuntimeError(f"{TRIES} prompts in a row whose answers are too close to call")


async def record_probe(seed: str, ask: Ask) -> list[Step]:
    """A chat whose answers alone are worth a READ: whoever gets its next turn must borrow."""
    rng = random.Random(seed)
    history: list[Body] = []
    steps: list[Step] = []
    for _ in range(3):

        def body(history: list[Body] = history) -> Body:
            message: Body = {"role": "user", "content": words(rng, 60 if history else 500)}
            return {"messages": [*history, message], "logprobs": True, "top_logprobs": 2, "max_tokens": 170}

        step = await _record(rng, ask, Kind.PLAIN, CHAT, body)
        history = [*step.body["messages"], {"role": "assistant", "content": step.choices[0].text}]
        steps.append(step)
    return steps
