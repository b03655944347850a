"""Conversations by token ids against real engines, without a router: each prompt and each match is known exactly.

`Turns` plays a router for one conversation; `recompute` is the reference that every answer is compared with: the same
prompt, computed whole by the prefill engine under a salt that nothing else shares.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from tests.engines.engine import Json
from tests.engines.logprobs import assert_same
from tests.engines.openai_client import Answer, OpenAIClient, two_legs

FIRST_ID, LAST_ID = 100, 350
"""Token ids that mean ordinary words to the test model."""
PAUSE_S = 0.1
"""Between an answer and the next turn: the lease is published beside the answer, and not always before it."""
STRIDE = 64
_TOKEN_ID = re.compile(r"token_id:(\d+)\Z")


def ids(count: int, seed: int) -> list[int]:
    """`count` random token ids."""
    rng = random.Random(seed)
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def token_ids(answer: Answer) -> list[int]:
    """The ids of an answer's tokens; the request must have asked for tokens as ids (`complete` below does)."""
    found = [_TOKEN_ID.match(token) for token in answer.tokens]
    assert all(found), answer.tokens
    return [int(match[1]) for match in found if match]


def strides(tokens: int) -> int:
    """Tokens in whole strides."""
    return tokens // STRIDE * STRIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    prompt: list[int]
    prefilled: Answer
    answer: Answer

    @property
    def reused(self) -> int:
        """Prompt tokens that the prefill engine did not compute."""
        assert self.prefilled.cached_tokens is not None
        return self.prefilled.cached_tokens

    @property
    def history(self) -> list[int]:
        return self.prompt + token_ids(self.answer)

    @property
    def lent(self) -> int:
        """Tokens that the lease of this turn covers: whole strides of what was computed (all but the last token)."""
        return strides(len(self.history) - 1)


class Turns:
    """One conversation on one prefill and one decode engine."""

    def __init__(self, prefill: OpenAIClient, decode: OpenAIClient, *, salt: str | None = None) -> None:
        self.prefill = prefill
        self.decode = decode
        self.conversation = secrets.token_hex(8)
        self.salt = salt

    async def turn(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        salt: str | None = None,
        fields: dict[str, Json] | None = None,
        **kvlease: Json,
    ) -> Turn:
        """Both legs of a turn; `kvlease` goes into the connector's parameters."""
        body: dict[str, Json] = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
            **(fields or {}),
        }
        if salt or self.salt:
            body["cache_salt"] = salt or self.salt
        told: dict[str, Json] = {"conversation": self.conversation, **kvlease}
        prefilled, answer = await two_legs(self.prefill, self.decode, "/v1/completions", body, told)
        await asyncio.sleep(PAUSE_S)
        return Turn(prompt=list(prompt), prefilled=prefilled, answer=answer)

    async def recompute(self, prompt: Sequence[int], *, max_tokens: int = 8) -> Answer:
        """The same prompt with nothing reused."""
        return await recompute(self.prefill, prompt, max_tokens=max_tokens)

    async def check(self, turn: Turn, what: str) -> None:
        """Raises DifferentAnswers unless the turn's answer is what computing it gives."""
        reference = await self.recompute(turn.prompt, max_tokens=len(turn.answer.tokens))
        assert reference.cached_tokens in (0, None)
        assert_same(turn.answer, reference, what)


async def recompute(engine: OpenAIClient, prompt: Sequence[int], *, max_tokens: int = 8) -> Answer:
    return await engine.complete(
        list(prompt),
        max_tokens=max_tokens,
        cache_salt=secrets.token_hex(8),
        return_tokens_as_token_ids=True,
        ignore_eos=True,
    )
