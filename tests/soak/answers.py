"""One request to an OpenAI-compatible server, and all it said: each choice with its tokens and log-probs.

Unlike `tests.engines.openai_client` it reads several choices and says how close each greedy decision was. Knows
nothing of what an answer should be. Invariant: an answer that did not come to its end is an error, never a short
answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import aiohttp

Body: TypeAlias = dict[str, Any]
DONE: Final = b"[DONE]"


class Refused(RuntimeError):
    """The server answered with an error, as a status or inside a stream."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status


class Cut(RuntimeError):
    """A stream ended before it was whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the sequences that were asked for."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    """Natural logarithm, one per token."""
    finish_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A whole answer. `choices` are in the order of their index."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    gap: float
    """Between the best log-prob and the next, the smallest; infinite if the request asked for fewer than two."""


class _Gathering:
    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.tokens: dict[int, list[str]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.reasons: dict[int, str] = {}
        self.prompt_tokens = 0
        self.gap = math.inf

    def add(self, body: Body) -> None:
        """A whole body or a chunk of a stream."""
        if body.get("error"):
            raise Refused(200, json.dumps(body["error"]))
        self.prompt_tokens = (body.get("usage") or {}).get("prompt_tokens", self.prompt_tokens)
        for choice in body.get("choices") or ():
            index = choice.get("index", 0)
            message = choice.get("delta") or choice.get("message") or choice
            text = message.get("content", message.get("text")) or ""
            self.texts[index] = self.texts.get(index, "") + text
            if choice.get("finish_reason"):
                self.reasons[index] = choice["finish_reason"]
            self._add_logprobs(index, choice.get("logprobs") or {})

    def _add_logprobs(self, index: int, logprobs: Body) -> None:
        tokens = self.tokens.setdefault(index, [])
        values = self.logprobs.setdefault(index, [])
        for entry in logprobs.get("content") or ():
            tokens.append(entry["token"])
            values.append(float(entry["logprob"]))
            self._closest([float(one["logprob"]) for one in entry.get("top_logprobs") or ()])
        tokens += logprobs.get("tokens") or ()
        values += [float(one) for one in logprobs.get("token_logprobs") or ()]
        for top in logprobs.get("top_logprobs") or ():
            self._closest([float(one) for one in (top or {}).values()])

    def _closest(self, values: list[float]) -> None:
        if len(values) > 1:
            best, second = sorted(values, reverse=True)[:2]
            self.gap = min(self.gap, best - second)

    def said(self) -> Said:
        if not self.reasons or len(self.reasons) != len(self.texts):
            raise Cut(f"{len(self.reasons)} of {len(self.texts)} choices came to an end")
        choices = tuple(
            Choice(
                text=self.texts[index],
                tokens=tuple(self.tokens[index]),
                logprobs=tuple(self.logprobs[index]),
                finish_reason=self.reasons[index],
            )
            for index in sorted(self.texts)
        )
        return Said(choices=choices, prompt_tokens=self.prompt_tokens, gap=self.gap)


async def ask(http: aiohttp.ClientSession, url: str, body: Body, headers: Mapping[str, str] | None = None) -> Said:
    """Send `body` and gather the answer. Raises Refused, Cut, aiohttp.ClientError and TimeoutError."""
    gathering = _Gathering()
    async with http.post(url, json=body, headers=headers) as response:
        if response.status != 200:
            raise Refused(response.status, await response.text())
        if response.content_type != "text/event-stream":
            gathering.add(await response.json())
            return gathering.said()
        async for line in response.content:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data == DONE:
                return gathering.said()
            if data:
                gathering.add(json.loads(data))
    raise Cut("the stream ended without [DONE]")
