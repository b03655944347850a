"""How messages travel: datagrams that are lost, late, doubled or overtaken, and lines that keep order until they break.

A line's ends learn of a break each in their own time, and what was under way is lost. Nothing here reads a message.
Invariant: what comes out of one end of an open line is a prefix of what went in at the other, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from kvlease.registry.errors import KvleaseError

from tests.sim.plan import Faults
from tests.sim.world import Action, Party, World

Up = TypeVar("Up")
Down = TypeVar("Down")


class Network:
    """The faults that are in force, which the simulation heals for its last phase."""

    def __init__(self, world: World, faults: Faults) -> None:
        self.world: Final = world
        self.faults = faults

    def datagram(self, to: Party, action: Action) -> None:
        """Carries `action` to whoever answers at `to` when it arrives, if it arrives, perhaps twice."""
        world, faults = self.world, self.faults
        if world.chance(faults.drop):
            return
        for _ in range(2 if world.chance(faults.duplicate) else 1):
            world.deliver(self._latency(), to, action)

    def latency(self) -> int:
        return self.world.between(1, 3)

    def _latency(self) -> int:
        if self.world.chance(self.faults.delayed):
            return self.world.between(1, self.faults.long_ms)
        return self.latency()


class Line(Generic[Up, Down]):
    """An ordered stream between a client and a server: `Up` goes to the server, `Down` to the client."""

    def __init__(self, network: Network, client: Party, server: Party) -> None:
        self._network = network
        self._client, self._server = client, server
        self._client_life, self._server_life = client.life, server.life
        self._up_ms = self._down_ms = 0
        self.open = True
        self.fault: KvleaseError | None = None
        """Why the server closed it, if it did."""
        self.on_up: Callable[[Up], None] = _nobody
        self.on_down: Callable[[Down], None] = _nobody
        self.on_client_closed: Action = _nothing
        self.on_server_closed: Action = _nothing

    def up(self, message: Up) -> None:
        self._up_ms = self._send(self._server, self._up_ms, lambda: self.on_up(message))

    def down(self, message: Down) -> None:
        self._down_ms = self._send(self._client, self._down_ms, lambda: self.on_down(message))

    def close(self, fault: KvleaseError | None = None) -> None:
        """The stream breaks, or the server ends it with `fault`; both ends will be told."""
        if not self.open:
            return
        self.open, self.fault = False, fault
        network = self._network
        for party, life, told in (
            (self._client, self._client_life, lambda: self.on_client_closed()),
            (self._server, self._server_life, lambda: self.on_server_closed()),
        ):
            if party.life == life and party.up:
                network.world.after(network.latency() * 3, party, told)

    def _send(self, to: Party, last_ms: int, action: Action) -> int:
        network = self._network
        at_ms = max(last_ms, network.world.now_ms + network.latency())
        if self.open:
            network.world.deliver(at_ms - network.world.now_ms, to, lambda: self._arrive(action))
        return at_ms

    def _arrive(self, action: Action) -> None:
        if not self.open:
            return
        if self._client.life != self._client_life or self._server.life != self._server_life:
            self.close()
            return
        action()


def _nobody(message: object) -> None:
    del message


def _nothing() -> None:
    return
