"""The gate that every call passes where identity is on: who is it, may that role call this rpc, and for how long.

Edge code around the handlers, put in place by `calls.py`. What a call may be about (tenant, engine) is decided behind
it, in `guard.py`, for the caller that is set here; how many streams callers may have open, in `identity_shares.py`.
Invariant: no handler runs without a caller; a stream does not outlive the credential it was opened with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import grpc.aio
from kvlease.registry.errors import LimitReached, PermissionDenied, Unauthenticated
from kvlease.registry.identity import Identity, Rpc
from kvlease.registry.identity_shares import TenantShares
from kvlease.registry.refusals import Refusals

STREAMS: Final = frozenset({Rpc.SESSION, Rpc.RESOLVE_STREAM, Rpc.WATCH})

# The types of grpc's handlers: messages of any rpc, which this file passes on without looking.
Message = Any
Context = grpc.aio.ServicerContext[Message, Message]
Behavior = Callable[[Message, Context], Awaitable[Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What a call shows of its caller. Secrets may be in it, so it has no repr."""

    metadata: Sequence[tuple[str, str | bytes]] = field(default=(), repr=False)
    names: tuple[str, ...] = ()
    """URIs in the certificate that the connection was opened with."""
    is_certified: bool = False
    """Whether there was a certificate that the transport has verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An identity, and the hash of the credential that it rests on; empty if the transport vouches for it."""

    identity: Identity
    credential: bytes = field(default=b"", repr=False)


class CallerSource(Protocol):
    """How callers prove who they are."""

    def identify(self, call: CallFacts) -> Caller:
        """Raises Unauthenticated."""
        ...

    def stands(self, caller: Caller) -> bool:
        """Whether the caller would be let in as the same today."""
        ...


CALLER: Final[ContextVar[Identity]] = ContextVar("kvlease caller")
"""Whose call this is. Set for each call, and for the tasks that it starts."""


class Gate:
    """Lets callers in. One gate for one server."""

    def __init__(self, source: CallerSource, refusals: Refusals, shares: Mapping[Rpc, TenantShares]) -> None:
        """`shares` of the streams that are counted."""
        self._source: Final = source
        self._refusals: Final = refusals
        self._shares: Final = shares
        self._streams: dict[asyncio.Timeout, Caller] = {}

    def guarded(self, rpc: str, behavior: Behavior) -> Behavior:
        """`behavior` behind the gate. An rpc without a row in the table is not served: ValueError."""
        name = Rpc(rpc)

        async def call(request: Message, context: Context) -> Message:
            caller = self._admit(name, context)
            token = CALLER.set(caller.identity)
            try:
                return await behavior(request, context)
            finally:
                CALLER.reset(token)

        async def stream(request: Message, context: Context) -> Message:
            caller = self._admit(name, context)
            token = CALLER.set(caller.identity)
            scope = asyncio.timeout(None)
            try:
                with self._place(name, caller):
                    async with scope:
                        self._streams[scope] = caller
                        return await behavior(request, context)
            except TimeoutError as error:
                if not scope.expired():
                    raise
                raise Unauthenticated("what this stream was opened with is not accepted any more") from error
            finally:
                self._streams.pop(scope, None)
                CALLER.reset(token)

        return stream if name in STREAMS else call

    def review(self) -> int:
        """End the streams of callers that would not be let in as the same today; how many. After the source changed."""
        now = asyncio.get_running_loop().time()
        gone = [scope for scope, caller in self._streams.items() if not self._source.stands(caller)]
        for scope in gone:
            del self._streams[scope]
            scope.reschedule(now)
        return len(gone)

    @contextmanager
    def _place(self, rpc: Rpc, caller: Caller) -> Iterator[None]:
        """A stream's place in the share of its caller. Raises LimitReached."""
        share = self._shares.get(rpc)
        if share is None:
            yield
            return
        tenants = caller.identity.tenants(rpc)
        try:
            share.take(tenants)
        except LimitReached as error:
            self._refusals.note("%s of %s: %s", rpc, caller.identity.name, error.message)
            raise
        try:
            yield
        finally:
            share.give_back(tenants)

    def _admit(self, rpc: Rpc, context: Context) -> Caller:
        try:
            caller = self._source.identify(call_facts(context))
        except Unauthenticated as error:
            self._refusals.note("%s from %s: %s", rpc, context.peer(), error.message)
            raise
        if not caller.identity.may_call(rpc):
            self._refusals.note("%s from %s: not for %s", rpc, context.peer(), caller.identity.name)
            raise PermissionDenied(f"{rpc} is not for {caller.identity.name}")
        return caller


def call_facts(context: Context) -> CallFacts:
    """What grpc knows of the caller."""
    auth = context.auth_context()
    names = tuple(value.decode("ascii", "replace") for value in auth.get("peer_uri", ()))
    certified = bool(auth.get("x509_pem_cert"))
    return CallFacts(metadata=tuple(context.invocation_metadata() or ()), names=names, is_certified=certified)
