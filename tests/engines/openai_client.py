"""A small typed client for OpenAI-compatible servers, for tests: one call is one turn and brings one frozen `Answer`.

It speaks plain HTTP, so it can also send what no SDK does: `kv_transfer_params`, `cache_salt`, broken bodies. Nothing
here knows vLLM's or kvlease's meaning of those fields. Invariant: every call has a bound, and an error of the server
is `RefusedTurn`, never a half-filled answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeAlias, TypedDict, cast

import aiohttp

from tests.engines.engine import Json
from tests.engines.model import MODEL_NAME

TURN_TIMEOUT_S: Final = 120.0

Body: TypeAlias = Mapping[str, Json]


class Message(TypedDict):
    """One message of a chat."""

    role: str
    content: str


class RefusedTurn(RuntimeError):
    """The server answered with an error: HTTP status and body, also when it came inside a stream (status 200)."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one turn brought."""

    text: str
    tokens: tuple[str, ...] = ()
    """Only if log-probs were asked for; so are the next two."""
    logprobs: tuple[float, ...] = ()
    """Natural logarithm, one per token."""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that the engine did not compute, as it says itself; None if it does not say."""
    kv_transfer_params: Body | None = None
    ttft_s: float = 0.0
    """From sending to the first token; without streaming, to the whole answer."""
    total_s: float = 0.0
    chunks: int = 0
    headers: Mapping[str, str]


def _object(value: Json) -> Body:
    """The value as an object; absent ones are empty."""
    return value if isinstance(value, Mapping) else {}


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _number(value: Json) -> int:
    return value if isinstance(value, int) else 0


class _Gathering:
    """An answer that is still coming."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.first: float | None = None
        self.text = ""
        self.chunks = 0
        self.tokens: list[str] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.usage: Body = {}
        self.kv_transfer_params: Body | None = None

    def add(self, body: Body) -> None:
        """Take in a whole answer or one chunk of it; only the first choice counts."""
        now = time.monotonic()
        self.chunks += 1
        if params := _object(body.get("kv_transfer_params")):
            self.kv_transfer_params = params
        if usage := _object(body.get("usage")):
            self.usage = usage
        for choice in map(_object, _list(body.get("choices"))):
            if choice.get("index", 0) != 0:
                continue
            message = _object(choice.get("delta")) or _object(choice.get("message"))
            text = choice.get("text", message.get("content"))
            if isinstance(text, str) and text:
                self.text += text
                self.first = self.first or now
            if isinstance(reason := choice.get("finish_reason"), str):
                self.finish_reason = reason
            self._add_logprobs(_object(choice.get("logprobs")))

    def _add_logprobs(self, logprobs: Body) -> None:
        """Chat lists one object per token; completions list tokens and numbers side by side."""
        for entry in map(_object, _list(logprobs.get("content"))):
            self.tokens.append(str(entry["token"]))
            self.logprobs.append(float(cast(float, entry["logprob"])))
        self.tokens += [str(token) for token in _list(logprobs.get("tokens"))]
        self.logprobs += [float(cast(float, one)) for one in _list(logprobs.get("token_logprobs"))]

    def answer(self, headers: Mapping[str, str]) -> Answer:
        now = time.monotonic()
        details = _object(self.usage.get("prompt_tokens_details"))
        cached = details.get("cached_tokens")
        return Answer(
            text=self.text,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            prompt_tokens=_number(self.usage.get("prompt_tokens")),
            completion_tokens=_number(self.usage.get("completion_tokens")),
            cached_tokens=cached if isinstance(cached, int) else None,
            kv_transfer_params=self.kv_transfer_params,
            ttft_s=(self.first or now) - self.started,
            total_s=now - self.started,
            chunks=self.chunks,
            headers=headers,
        )


def http_session(timeout_s: float) -> aiohttp.ClientSession:
    """For engines: they close a connection that was idle for 5 s, and a request sent just then is lost."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s))


class OpenAIClient:
    """Talks to one base URL (without /v1). `async with` opens and closes its connections."""

    def __init__(self, url: str, *, model: str = MODEL_NAME, timeout_s: float = TURN_TIMEOUT_S) -> None:
        self.url = url
        self.model = model
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = http_session(self._timeout_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int = 8, logprobs: bool = True, **fields: Json
    ) -> Answer:
        """/v1/completions, greedy. `fields` go into the body as they are: stream, cache_salt, kv_transfer_params ..."""
        body: dict[str, Json] = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            **({"logprobs": 1} if logprobs else {}),
        }
        return await self.post("/v1/completions", {**body, **fields})

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int = 8, logprobs: bool = True, **fields: Json
    ) -> Answer:
        """/v1/chat/completions, greedy. `fields` as in `complete`."""
        body: dict[str, Json] = {
            "messages": [{"role": message["role"], "content": message["content"]} for message in messages],
            "max_tokens": max_tokens,
            **({"logprobs": True} if logprobs else {}),
        }
        return await self.post("/v1/chat/completions", {**body, **fields})

    async def post(self, path: str, body: Body, headers: Mapping[str, str] | None = None) -> Answer:
        """Send a body and gather the answer, streamed or not. Raises RefusedTurn, aiohttp.ClientError, TimeoutError."""
        assert self._session is not None, "use async with"
        sent: dict[str, Json] = {"model": self.model, "temperature": 0, **body}
        if sent.get("stream"):
            sent.setdefault("stream_options", {"include_usage": True})
        gathering = _Gathering()
        async with self._session.post(self.url + path, json=sent, headers=headers) as response:
            if response.status != 200:
                raise RefusedTurn(response.status, await response.text())
            if response.content_type == "text/event-stream":
                async for event in _events(response):
                    if "error" in event:
                        raise RefusedTurn(response.status, json.dumps(event))
                    gathering.add(event)
            else:
                gathering.add(cast(Body, await response.json()))
            return gathering.answer(dict(response.headers))

    async def send(self, path: str, body: Body) -> tuple[int, str]:
        """Status and body of a POST that is no turn."""
        assert self._session is not None, "use async with"
        async with self._session.post(self.url + path, json=dict(body)) as response:
            return response.status, await response.text()

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        assert self._session is not None, "use async with"
        async with self._session.get(self.url + path) as response:
            return response.status, await response.text()


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Body]:
    async for line in response.content:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield cast(Body, json.loads(data))


KEEPALIVE_S: Final = 2.0
"""An idle connection is given up by us before the server does it."""
PREFILL_ONLY: Final[Body] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router sends to a prefill engine: compute the prompt's KV and keep it for a decode engine."""


async def two_legs(
    prefill: OpenAIClient, decode: OpenAIClient, path: str, body: Body, kvlease: Body | None = None
) -> tuple[Answer, Answer]:
    """One turn as a router does it, without a router: prefill, then decode with what prefill said.

    `kvlease` is added to the `kv_transfer_params` of both legs. Returns both answers.
    """
    added: dict[str, Json] = {} if kvlease is None else {"kvlease": kvlease}
    first: dict[str, Json] = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    first |= {"max_tokens": 1, "kv_transfer_params": {**PREFILL_ONLY, **added}}
    prefilled = await prefill.post(path, first)
    if prefilled.kv_transfer_params is None:
        raise RefusedTurn(200, "the prefill engine returned no kv_transfer_params")
    second: dict[str, Json] = {**body, "kv_transfer_params": {**prefilled.kv_transfer_params, **added}}
    return prefilled, await decode.post(path, second)
