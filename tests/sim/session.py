"""The lender's session with the registry: what is said on the line, and the lender's end of it.

The product's mirror decides what is said; this is its shell, reduced to its rules: hello and, once welcome, snapshot
first, numbered messages, heartbeats, every message acknowledged, a silent registry left, connect again after a break.
Invariant: what is told after a snapshot happened after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvlease.registry.errors import KvleaseError, RegistryUnavailable
from kvlease.registry.lender_mirror import Batch, LenderMirror
from kvlease.registry.values import EndReason, Engine, LeaseId, Publication, PublishResult, PublishStatus, RenewStatus

from tests.sim.endpoint import Endpoint
from tests.sim.network import Line, Network
from tests.sim.plan import Plan
from tests.sim.world import Party


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    engine: Engine
    now_lender_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    leases: tuple[Publication, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    now_lender_ms: int
    free_blocks: int
    total_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    pass


Said = Hello | Snapshot | Heartbeat | Goodbye | Batch
Numbered = tuple[int, Said]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    results: tuple[PublishResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAsked:
    lease_id: LeaseId
    reason: EndReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewAsked:
    lease_id: LeaseId
    ttl_ms: int


Pushed = Welcome | Ack | EndAsked | RenewAsked
SessionLine = Line[Numbered, Pushed]


class Registry(Party):
    """What a lender can do to a registry: open a line to it."""

    def accept(self, line: SessionLine) -> None:
        raise NotImplementedError


class Lender(Protocol):
    """What the session asks of its lender."""

    def engine(self) -> Engine: ...
    def lender_now_ms(self) -> int: ...
    def free_and_total(self) -> tuple[int, int]: ...
    def end_asked(self, lease_id: LeaseId, reason: EndReason) -> None: ...
    def renew_asked(self, lease_id: LeaseId, ttl_ms: int) -> None: ...
    def published(self, result: PublishResult) -> None: ...
    def session_over(self, why: KvleaseError) -> bool: ...


class LenderSession:
    """One incarnation's session: connected, or waiting to connect again."""

    def __init__(
        self,
        network: Network,
        party: Party,
        lender: Lender,
        endpoint: Endpoint[Registry],
        mirror: LenderMirror,
        plan: Plan,
    ) -> None:
        self._network = network
        self._party = party
        self._lender = lender
        self._endpoint = endpoint
        self._plan = plan
        self._line: SessionLine | None = None
        self._sent = 0
        self._welcome = False
        self._heard_ms = 0
        self._closing = False
        self.mirror: Final = mirror

    @property
    def line(self) -> SessionLine | None:
        return self._line

    def start(self) -> None:
        self._connect()
        self._beat()

    def flush(self) -> None:
        """Says what the registry has yet to hear. Before the welcome that is nothing: the snapshot will say it."""
        while (batch := self.mirror.next_batch()) is not None:
            self._say(batch)

    def leave(self) -> None:
        self.flush()
        self._say(Goodbye())
        self._closing = True

    def _say(self, said: Said) -> None:
        if self._line is not None:
            self._sent += 1
            self._line.up((self._sent, said))

    def _connect(self) -> None:
        registry = self._endpoint.registry()
        if not registry.up:
            self._after(10, self._connect)
            return
        line: SessionLine = Line(self._network, self._party, registry)
        line.on_down = self._pushed
        life = registry.life
        line.on_client_closed = lambda: self._lost(line, restarted=registry.life != life)
        registry.accept(line)
        self._line, self._sent, self._welcome = line, 0, False
        self._heard_ms = self._network.world.now_ms
        self._say(Hello(engine=self._lender.engine(), now_lender_ms=self._lender.lender_now_ms()))

    def _lost(self, line: SessionLine, *, restarted: bool) -> None:
        if self._line is not line:
            return
        self._line = None
        self.mirror.disconnected()
        if line.fault is not None:
            self._closing = self._closing or self._lender.session_over(line.fault)
        if not restarted and (isinstance(line.fault, RegistryUnavailable) or self._network.world.chance(0.5)):
            self._endpoint.move()  # else the endpoint sees for itself
        if not self._closing:
            self._after(self._network.world.between(5, 20), self._connect)

    def _beat(self) -> None:
        if self._closing:
            return
        if self._line is not None and self._network.world.now_ms - self._heard_ms > self._plan.silence_ms:
            self._line.close()
        if self._welcome:
            free, total = self._lender.free_and_total()
            self._say(Heartbeat(now_lender_ms=self._lender.lender_now_ms(), free_blocks=free, total_blocks=total))
        self._after(self._plan.heartbeat_ms, self._beat)

    def _pushed(self, pushed: Pushed) -> None:
        self._heard_ms = self._network.world.now_ms
        match pushed:
            case Welcome():
                self._welcome = True
                self._say(Snapshot(leases=self.mirror.present()))
            case EndAsked(lease_id=lease_id, reason=reason):
                if self.mirror.told_to_end(lease_id, reason):
                    self._lender.end_asked(lease_id, reason)
            case RenewAsked(lease_id=lease_id, ttl_ms=ttl_ms):
                if self.mirror.holds(lease_id):
                    self._lender.renew_asked(lease_id, ttl_ms)
                else:
                    self.mirror.refuse_renewal(lease_id, RenewStatus.UNKNOWN)
            case Ack(results=results):
                for result in results:
                    self._answered(result)
        self.flush()

    def _answered(self, result: PublishResult) -> None:
        news, superseded = self.mirror.answered(result)
        if news:
            self._lender.published(result)
        if news and result.status is not PublishStatus.PUBLISHED:
            self._lender.end_asked(result.lease_id, EndReason.QUOTA)
        for lease_id in superseded:
            self._lender.end_asked(lease_id, EndReason.SUPERSEDED)

    def _after(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._network.world.after(delay_ms, self._party, action)
