"""Asks a lender's side channel whether the engine that a record names is there, before a READ is offered.

The engine's own handshake waits five seconds on a dead address, on one thread for all peers; asking first, with a
limit of our own, keeps dead lenders away from it. Both outcomes are remembered for a while.

Invariant: `reachable` answers within the probe limit, and a lender known to be bad costs nothing.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from kvlease.connector.record import RecordContent
from kvlease.registry.clock import Clock
from kvlease.registry.values import EngineId, Incarnation

GOOD_FOR_MS: Final = 10_000
BAD_FOR_MS: Final = 2_000
MAX_PEERS: Final = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A lender's side channel."""

    engine_id: EngineId
    incarnation: Incarnation
    host: str
    port: int


class SideChannel(Protocol):
    """How one engine's side channel is asked; the vLLM adapter knows the protocol."""

    async def answers_for(self, peer: Peer) -> bool:
        """Whether this engine answers there, with a configuration compatible with ours. May raise OSError."""
        ...

    async def close(self) -> None: ...


class LenderProbe:
    """Remembers who answered. Used on one event loop."""

    def __init__(self, channel: SideChannel, clock: Clock, limit_ms: int) -> None:
        self._channel = channel
        self._clock = clock
        self._limit_ms = limit_ms
        self._known: dict[Peer, tuple[bool, int]] = {}
        self._asking: dict[Peer, asyncio.Task[bool]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for task in self._asking.values():
            task.cancel()
        await self._channel.close()

    async def reachable(self, content: RecordContent) -> bool:
        """Whether the lender that this record names can be read from; False if it names no side channel."""
        peer = peer_of(content)
        if peer is None:
            return False
        known = self._known.get(peer)
        if known is not None and self._clock.now_ms() < known[1]:
            return known[0]
        asking = self._asking.get(peer)
        if asking is None:
            asking = self._asking[peer] = asyncio.create_task(self._ask(peer))
        return await asyncio.shield(asking)

    async def _ask(self, peer: Peer) -> bool:
        try:
            async with asyncio.timeout(self._limit_ms / 1000):
                good = await self._channel.answers_for(peer)
        except (OSError, TimeoutError, ValueError):
            good = False
        finally:
            del self._asking[peer]
        if len(self._known) >= MAX_PEERS:
            self._known.clear()
        self._known[peer] = (good, self._clock.now_ms() + (GOOD_FOR_MS if good else BAD_FOR_MS))
        return good


def peer_of(content: RecordContent) -> Peer | None:
    """The side channel that a record names; None if it names none."""
    try:
        params = json.loads(content.engine_params)
    except ValueError:
        return None
    if not isinstance(params, dict):
        return None
    host, port = params.get("remote_host"), params.get("remote_port")
    if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 65_536:
        return None
    return Peer(engine_id=content.engine_id, incarnation=content.incarnation, host=host, port=port)
