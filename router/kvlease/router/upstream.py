"""HTTP to engines: one request, one bounded answer or stream, and every way it can fail as one typed error.

aiohttp's client is used here and in no other file. Nothing is retried and nothing chosen here (turn.py does that).

Invariant: leaving an `open` block in any way, cancellation included, closes the connection unless the answer was read
to its end; an engine takes that as an abort and frees the request's blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from io import BytesIO
from types import SimpleNamespace, TracebackType
from typing import Final, Self

import aiohttp
from kvlease.router.routes import Target

_KEEPALIVE_S: Final = 2.0
"""Below the 5 s after which vLLM's HTTP server closes an idle connection, so that no request is sent into the close."""
_MAX_HELD_CHUNK: Final = 256 * 1024
"""Bytes of one HTTP chunk put together before they go on; a longer chunk goes on in parts."""
_READ_BUFFER: Final = 256 * 1024
_LARGE_BODY: Final = 1024 * 1024
"""Bytes from which a body is written piece by piece, so that other turns get their share of the loop."""
_SMALL_ANSWER: Final = 4 * 1024 * 1024
_HOP_BY_HOP: Final = frozenset(
    (
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
"""Answer headers that are about one connection, or that the router writes itself."""


class FailureReason(StrEnum):
    """How a request to an engine failed."""

    UNREACHABLE = "unreachable"
    """No connection."""
    TIMEOUT = "timeout"
    BROKEN = "broken"
    """Connection lost, or an answer that is not HTTP."""
    STATUS = "status"
    """429, 5xx, or anything else that is neither 2xx nor 4xx."""
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeAnswer:
    """An answer read to its end. `headers` are end to end."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def refused(self) -> bool:
        """The engine will not serve this request, and no other one would: its 4xx, but for 429."""
        return 400 <= self.status < 500 and self.status != 429


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a request came; written by the connection, read by whoever was interrupted."""

    sent: bool = False
    """The engine may have seen the request."""


class EngineFailure(Exception):
    """An engine failed a request.

    `sent` is whether the engine may have seen it; `answer` is what it said, if it said anything.
    """

    def __init__(
        self, target: Target, reason: FailureReason, *, sent: bool = True, answer: WholeAnswer | None = None
    ) -> None:
        super().__init__(f"{target.role} engine {target.url}: {reason}")
        self.target = target
        self.reason = reason
        self.sent = sent
        self.answer = answer


class Answer:
    """An engine's answer whose head has come. Read it with `whole` or `chunks`, once."""

    def __init__(self, target: Target, response: aiohttp.ClientResponse, progress: Progress) -> None:
        self.target = target
        self._progress = progress
        self._response = response
        self.status = response.status
        self.headers = tuple((k, v) for k, v in response.headers.items() if k.lower() not in _HOP_BY_HOP)
        self.streams = response.status == 200 and response.content_type == "text/event-stream"

    async def whole(self, *, max_bytes: int, timeout_ms: int) -> WholeAnswer:
        """The rest of the answer.

        Raises EngineFailure if it breaks off, is late or longer than `max_bytes`, and for any status but 2xx and 4xx
        (429 excepted).
        """
        body = bytearray()
        with _failures(self.target, self._progress):
            async with asyncio.timeout(timeout_ms / 1000):
                async for piece in self._response.content.iter_any():
                    body += piece
                    if len(body) > max_bytes:
                        raise EngineFailure(self.target, FailureReason.TOO_LARGE)
        answer = WholeAnswer(status=self.status, headers=self.headers, body=bytes(body))
        if not (200 <= answer.status < 300 or answer.refused):
            raise EngineFailure(self.target, FailureReason.STATUS, answer=answer)
        return answer

    async def chunks(self, *, first_timeout_ms: int, idle_timeout_ms: int) -> AsyncGenerator[bytes, None]:
        """The stream, HTTP chunk by HTTP chunk as the engine cut it. Raises EngineFailure.

        Only the parts of one chunk are put together: its sender had all of it, so the rest is on its way.
        """
        chunked = self._response.headers.get("Transfer-Encoding", "").lower() == "chunked"
        content = self._response.content
        held = b""
        timeout_ms = first_timeout_ms
        while True:
            with _failures(self.target, self._progress):
                async with asyncio.timeout(timeout_ms / 1000):
                    data, ended = await content.readchunk()
            if not data and not ended:
                break
            held = held + data if held else data
            if held and (ended or not chunked or len(held) >= _MAX_HELD_CHUNK):
                yield held
                held = b""
            timeout_ms = idle_timeout_ms
        if held:
            yield held

    def broken(self) -> EngineFailure:
        """The failure to raise for an answer that is complete HTTP and still no answer."""
        return EngineFailure(self.target, FailureReason.BROKEN)


class Upstream:
    """The router's connections to all engines. `async with` opens and closes them."""

    def __init__(self, *, connect_timeout_ms: int) -> None:
        self._connect_timeout_ms = connect_timeout_ms
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_mark_sent)
        connect_s = self._connect_timeout_ms / 1000
        self._session = aiohttp.ClientSession(
            # No limit of its own: `max_turns` bounds the requests that can be in flight.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s),
            trace_configs=[trace],
            auto_decompress=False,
            read_bufsize=_READ_BUFFER,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def open(
        self,
        target: Target,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        timeout_ms: int,
        progress: Progress | None = None,
    ) -> AsyncIterator[Answer]:
        """POSTs `body`; the block gets the answer as soon as its head has come, at most `timeout_ms` later.

        `progress` tells, also after a cancellation, whether the engine may have seen the request.
        Raises EngineFailure.
        """
        progress = progress if progress is not None else Progress()
        request = self._opened().post(
            target.url + path,
            data=body if len(body) < _LARGE_BODY else BytesIO(body),
            headers={**headers, "Content-Type": "application/json", "Accept-Encoding": "identity"},
            trace_request_ctx=progress,
            allow_redirects=False,
        )
        with _failures(target, progress):
            async with asyncio.timeout(timeout_ms / 1000):
                response = await request
        try:
            yield Answer(target, response, progress)
        finally:
            response.close()  # no effect on a connection whose answer was read to its end: that one is kept

    async def whole(
        self, target: Target, path: str, body: bytes, headers: Mapping[str, str], *, timeout_ms: int, max_bytes: int
    ) -> WholeAnswer:
        """POSTs `body` and reads the whole answer: `timeout_ms` for its head, and again for the rest.

        Raises EngineFailure as `open` and `Answer.whole` do.
        """
        async with self.open(target, path, body, headers, timeout_ms=timeout_ms) as answer:
            return await answer.whole(max_bytes=max_bytes, timeout_ms=timeout_ms)

    async def get(self, target: Target, path: str, headers: Mapping[str, str], *, timeout_ms: int) -> WholeAnswer:
        """GETs a small answer within `timeout_ms`. Raises EngineFailure as `whole` does."""
        progress = Progress()
        with _failures(target, progress):
            async with asyncio.timeout(timeout_ms / 1000):
                response = await self._opened().get(
                    target.url + path, headers=headers, trace_request_ctx=progress, allow_redirects=False
                )
        try:
            return await Answer(target, response, progress).whole(max_bytes=_SMALL_ANSWER, timeout_ms=timeout_ms)
        finally:
            response.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("Upstream is not open: use `async with`")
        return self._session


async def _mark_sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    context.trace_request_ctx.sent = True


@contextmanager
def _failures(target: Target, progress: Progress) -> Iterator[None]:
    """Turns whatever aiohttp and the socket raise into EngineFailure."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise EngineFailure(target, FailureReason.UNREACHABLE, sent=False) from error
    except TimeoutError as error:
        raise EngineFailure(target, FailureReason.TIMEOUT, sent=progress.sent) from error
    except (aiohttp.ClientError, OSError) as error:
        reason = FailureReason.BROKEN if progress.sent else FailureReason.UNREACHABLE
        raise EngineFailure(target, reason, sent=progress.sent) from error
