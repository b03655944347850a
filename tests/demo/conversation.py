"""One conversation of growing turns, held with the unmodified `openai` client, streaming.

The client knows nothing of kvlease: no extra field, no id. The prompts are the same in every run, because they come
from a seed; the histories are the same as long as the answers are, which `differences` checks by log-probs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.engines.logprobs import TOLERANCE
from tests.engines.model import MODEL_NAME, WORDS

TURN_TIMEOUT_S: Final = 120.0
ANSWER_TOKENS: Final = 32

Sizes = Sequence[int]
GROWING: Final[Sizes] = (2000, 600, 600, 600, 600, 600)
"""Words that the user adds in each turn, a long text first and then questions; a word is a token."""
WARM_UP: Final[Sizes] = (120, 120)
"""Two short turns: handshakes between engines and first uses are not what is to be measured."""
SHORT: Final[Sizes] = (3,)
"""With its answer less than a stride of 64 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the client saw of one turn."""

    prompt_tokens: int
    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    ttft_s: float
    """From sending the request to the first piece of the answer."""


AfterTurn = Callable[[int, Turn], Awaitable[None]]


async def hold(base_url: str, sizes: Sizes, *, seed: int, after_turn: AfterTurn) -> list[Turn]:
    """Hold a conversation of `len(sizes)` turns; raises openai.OpenAIError. `after_turn` gets the number, from 1."""
    words = random.Random(seed)
    history: list[ChatCompletionMessageParam] = []
    turns: list[Turn] = []
    async with AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="unused", max_retries=0, timeout=TURN_TIMEOUT_S
    ) as client:
        for number, size in enumerate(sizes, 1):
            history.append({"role": "user", "content": " ".join(words.choices(WORDS, k=size))})
            turn = await _ask(client, history)
            history.append({"role": "assistant", "content": turn.text})
            turns.append(turn)
            await after_turn(number, turn)
    return turns


async def _ask(client: AsyncOpenAI, history: Sequence[ChatCompletionMessageParam]) -> Turn:
    text, tokens, logprobs = "", list[str](), list[float]()
    prompt_tokens, first = 0, None
    sent = time.monotonic()
    stream = await client.chat.completions.create(
        model=MODEL_NAME,
        messages=list(history),
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.usage is not None:
            prompt_tokens = chunk.usage.prompt_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                first = first or time.monotonic()
                text += choice.delta.content
            for entry in (choice.logprobs.content if choice.logprobs else None) or ():
                tokens.append(entry.token)
                logprobs.append(entry.logprob)
    return Turn(
        prompt_tokens=prompt_tokens,
        text=text,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        ttft_s=(first or time.monotonic()) - sent,
    )


def differences(one: Sequence[Turn], other: Sequence[Turn]) -> list[str]:
    """In which turns two runs did not say the same, judged by each token's log-prob; empty if they did."""
    found: list[str] = []
    if len(one) != len(other):
        found.append(f"{len(one)} turns against {len(other)}")
    for number, (a, b) in enumerate(zip(one, other, strict=False), 1):
        if not a.tokens or a.prompt_tokens != b.prompt_tokens or a.tokens != b.tokens:
            found.append(f"turn {number}: other tokens")
            continue
        largest = max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))
        if largest > TOLERANCE:
            found.append(f"turn {number}: log-probs differ by {largest:.6f}, more than {TOLERANCE}")
    return found
