"""A borrower's line to its lender: where records come from, and which NIXL agent stands behind the engine's name.

Stands where registry and handshake stand in a deployment. A lender that is gone is found out by its closed socket; the
one that takes its place is greeted anew and gets the READs of records old and new alike.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Client, Connection

from tests.nixl.agent import Agent
from tests.nixl.messages import Greeting, Offer, Offers, Wants

GREETING_S = 0.5
"""A lender that stands still accepts and does not greet."""


class LenderMissing(RuntimeError):
    """No lender answered within the borrower's patience."""


class Link:
    """At most one lender at a time."""

    def __init__(self, path: str, agent: Agent, patience_s: float) -> None:
        self._path = path
        self._agent = agent
        self._patience_s = patience_s
        self._peer: Connection | None = None
        self._asked = False
        self._down_since = time.monotonic()
        self.agent_name: str | None = None
        self.memory_address = 0
        self.incarnation = b""
        self.incarnations = 0

    @property
    def up(self) -> bool:
        return self._peer is not None

    def connect(self) -> bool:
        """Tries once; True if a lender has greeted. Raises LenderMissing out of patience."""
        try:
            peer = Client(self._path, family="AF_UNIX")
            if not peer.poll(GREETING_S):
                raise EOFError("no greeting")
            greeting = peer.recv()
        except (OSError, EOFError):
            if time.monotonic() - self._down_since > self._patience_s:
                raise LenderMissing(f"no lender at {self._path} for {self._patience_s:.0f} s") from None
            return False
        if not isinstance(greeting, Greeting):
            raise LenderMissing(f"{self._path} does not greet like a lender")
        if self.agent_name is not None:
            self._agent.remove_remote_agent(self.agent_name)
        name = self._agent.add_remote_agent(greeting.agent_metadata)
        self.agent_name = name.decode() if isinstance(name, bytes) else name
        self.memory_address = greeting.memory_address
        self.incarnation = greeting.incarnation
        self.incarnations += 1
        self._peer, self._asked = peer, False
        return True

    def ask(self, count: int) -> None:
        """Asks for offers unless an answer is due already."""
        if self._peer is not None and not self._asked:
            try:
                self._peer.send(Wants(count=count))
                self._asked = True
            except OSError:
                self._lost()

    def answers(self, wait_s: float) -> tuple[Offer, ...]:
        """Offers that have come; waits this long at most."""
        if self._peer is None:
            return ()
        try:
            if not self._peer.poll(wait_s):
                return ()
            answer = self._peer.recv()
        except (OSError, EOFError):
            self._lost()
            return ()
        self._asked = False
        return answer.offers if isinstance(answer, Offers) else ()

    def _lost(self) -> None:
        if self._peer is not None:
            self._peer.close()
        self._peer = None
        self._down_since = time.monotonic()
