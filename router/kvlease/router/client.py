"""The client's side of a turn: where an answer goes, and how a failure is put to whoever waits for it.

Knows no HTTP server: `app.py` implements `Client`, and the tests of the shell could.
Invariant: once `begin` was called, what was sent cannot be taken back; a failure is then told inside the stream.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from kvlease.registry.values import ConversationId
from kvlease.router.errors import EngineBroken, EngineTimeout, EngineUnreachable, RouterError
from kvlease.router.upstream import EngineFailure, FailureReason, WholeAnswer


class ClientGone(Exception):
    """The client has closed its connection; nothing more can be written."""


class Client(Protocol):
    """Where an answer goes. Each call raises ClientGone once the client has left."""

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        ...

    def belongs_to(self, conversation: ConversationId) -> None:
        """Says which conversation the turn is part of, before anything else."""
        ...

    async def begin(self, status: int, headers: Sequence[tuple[str, str]], *, length: int | None) -> None:
        """Sends the head; `length` of the body in bytes, None for a stream."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def end(self) -> None: ...

    async def fail(self, error: RouterError) -> None:
        """Ends a stream that has begun with an error event. For an answer that is no stream, it is too late."""
        ...


async def relay(client: Client, answer: WholeAnswer) -> None:
    """Passes a whole answer on as it came. Raises ClientGone."""
    await client.begin(answer.status, answer.headers, length=len(answer.body))
    await client.write(answer.body)
    await client.end()


def client_error(failure: EngineFailure | None) -> RouterError:
    """What a client is told of `failure`; of None, that there was no engine to ask."""
    match failure.reason if failure is not None else FailureReason.UNREACHABLE:
        case FailureReason.UNREACHABLE:
            return EngineUnreachable("no decode engine could be reached")
        case FailureReason.TIMEOUT:
            return EngineTimeout("the decode engine did not answer in time")
        case FailureReason.TOO_LARGE:
            return EngineBroken("the decode engine's answer exceeds max_answer_bytes")
        case FailureReason.BROKEN | FailureReason.STATUS:
            return EngineBroken("the decode engine failed")


def is_openai_error(body: bytes) -> bool:
    """Whether `body` is an error object that a client can read as it is."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and isinstance(fields.get("error"), dict)
