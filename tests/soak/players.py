"""Clients of the soak: each plays recorded chats through the router, as people and programs do, at a bounded rate.

They stream or not, name their conversation or not, leave in the middle, ask again, send nonsense, and think between
turns. Judges nothing itself. Invariant: every request is bounded by the judge's limit, and none begins while the gate
is closed.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from tests.engines.model import MODEL_NAME
from tests.engines.openai_client import http_session
from tests.soak.answers import Body, Cut, Refused, ask
from tests.soak.chats import CHAT, TEXT, Step
from tests.soak.judge import HANG_S, Judge

CONVERSATION: Final = "x-kvlease-conversation"
ERRORS: Final = (Refused, Cut, aiohttp.ClientError, OSError, TimeoutError)
LONGEST_THINK_S: Final = 40.0
RETRY_S: Final = 2.0
NONSENSE: Final[Sequence[tuple[str, Body]]] = (
    (CHAT, {"model": MODEL_NAME, "messages": []}),
    (CHAT, {"model": MODEL_NAME, "messages": "no list"}),
    (CHAT, {"model": "nobody's", "messages": [{"role": "user", "content": "hello"}]}),
    (CHAT, {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": -1}),
    (CHAT, {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}], "temperature": "warm"}),
    (CHAT, {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}], "conversation_id": "no id"}),
    (TEXT, {"model": MODEL_NAME, "prompt": "the river " * 5_000, "max_tokens": 4}),
    (CHAT, {"model": MODEL_NAME, "messages": [{"role": "user", "content": "the stone " * 5_000}], "max_tokens": 4}),
)


class Gate:
    """Lets requests through while it is open, and knows how many are under way."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.under_way = 0

    @asynccontextmanager
    async def through(self) -> AsyncIterator[None]:
        await self._open.wait()
        self.under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.under_way -= 1
            if not self.under_way:
                self._idle.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Nothing is under way inside. Requests are bounded, so the wait is."""
        self._open.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            self._open.set()


class Players:
    """`count` clients that together ask for about `rate` turns a second."""

    def __init__(
        self, *, url: str, chats: Sequence[list[Step]], judge: Judge, gate: Gate, seed: int, count: int, rate: float
    ) -> None:
        self._url = url
        self._chats = chats
        self._judge = judge
        self._gate = gate
        self._seed = seed
        self._count = count
        self._pause_s = count / rate
        self._next = 0

    async def run(self) -> None:
        """Until cancelled."""
        async with http_session(HANG_S) as http, asyncio.TaskGroup() as group:
            for number in range(self._count):
                rng = random.Random(f"player {self._seed} {number}")
                group.create_task(_Player(self, http, rng).play_for_ever())

    def deal(self) -> list[Step]:
        """The next chat."""
        self._next += 1
        return self._chats[(self._next - 1) % len(self._chats)]


class _Player:
    def __init__(self, players: Players, http: aiohttp.ClientSession, rng: random.Random) -> None:
        self._players = players
        self._judge = players._judge
        self._gate = players._gate
        self._http = http
        self._rng = rng

    async def play_for_ever(self) -> None:
        await asyncio.sleep(self._rng.random() * self._players._pause_s)
        while True:
            await self._play(self._players.deal())

    async def _play(self, chat: list[Step]) -> None:
        """One chat, as one client holds it."""
        rng = self._rng
        salt = rng.choice([None, "tenant-a", "tenant-b", "tenant-c", *[secrets.token_hex(8)] * 4])
        named = rng.choice([None, None, "header", "body"])
        conversation = secrets.token_hex(8)
        for step in chat:
            body: Body = dict(step.body)
            headers: dict[str, str] = {}
            if salt:
                body["cache_salt"] = salt
            if named == "body":
                body["conversation_id"] = conversation
            if named == "header":
                headers[CONVERSATION] = conversation
            await self._turn(step, body, headers)
            await self._think()

    async def _think(self) -> None:
        pause_s = self._players._pause_s
        await asyncio.sleep(min(LONGEST_THINK_S, self._rng.expovariate(1 / pause_s)))

    async def _turn(self, step: Step, body: Body, headers: dict[str, str]) -> None:
        what = self._rng.random()
        if what < 0.10:
            await self._leave(step, body, headers)
            if self._rng.random() < 0.5:
                await self._think()
        elif what < 0.13:
            await self._nonsense()
        if what > 0.97:
            await asyncio.gather(*(self._ask(step, body, headers) for _ in range(2)))
        else:
            await self._ask(step, body, headers)
        if 0.13 < what < 0.19:
            self._judge.counts["regenerated"] += 1
            await self._think()
            await self._ask(step, body, headers)

    def _streamed(self, body: Body) -> Body:
        if self._rng.random() < 0.4:
            return dict(body)
        return {**body, "stream": True, "stream_options": {"include_usage": True}}

    async def _ask(self, step: Step, body: Body, headers: dict[str, str]) -> None:
        """Until it is answered: a client whose request failed asks again."""
        sent = self._streamed(body)
        what = f"{step.kind} turn of {step.prompt_tokens} tokens, {'streamed' if 'stream' in sent else 'whole'}"
        for _ in range(60):
            async with self._gate.through():
                began_s = time.monotonic()
                try:
                    said = await ask(self._http, self._players._url + step.path, sent, headers)
                except ERRORS as error:
                    now_s = time.monotonic()
                    self._judge.failed(began_s, now_s, f"{what}: {type(error).__name__} {error}")
                else:
                    self._judge.answered(step, said, time.monotonic() - began_s, what)
                    return
            await asyncio.sleep(RETRY_S)

    async def _leave(self, step: Step, body: Body, headers: dict[str, str]) -> None:
        """The client goes away at some point of its turn."""
        self._judge.counts["clients that left"] += 1
        sent = self._streamed(body)
        if self._rng.random() < 0.5:
            sent |= {"max_tokens": 400, "stop": []}
        began_s = time.monotonic()
        async with self._gate.through():
            try:
                async with asyncio.timeout(self._rng.random() ** 2 * 3):
                    await ask(self._http, self._players._url + step.path, sent, headers)
            except TimeoutError:
                pass  # left
            except ERRORS as error:
                self._judge.failed(began_s, time.monotonic(), f"a turn to be left: {type(error).__name__} {error}")

    async def _nonsense(self) -> None:
        path, body = self._rng.choice(NONSENSE)
        async with self._gate.through():
            began_s = time.monotonic()
            status: int | None = None
            try:
                await ask(self._http, self._players._url + path, body)
            except Refused as error:
                status = error.status
            except ERRORS as error:
                self._judge.failed(began_s, time.monotonic(), f"nonsense: {type(error).__name__} {error}")
                return
            if status is not None and status >= 500:
                self._judge.failed(began_s, time.monotonic(), f"nonsense: status {status}")
                return
            self._judge.bad_request(status, f"{path} with {sorted(body)}")
