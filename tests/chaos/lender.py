"""The lender process of a chaos run: the pair's lender, at a pace, whose leases go to a real registry.

`python -m tests.chaos.lender SETTINGS`, with ChaosLenderSettings as JSON. The product's core, seal table and
connector's thread decide and tell; what is here writes blocks, and says on standard output what became of each lease.
Commands on standard input: `rest`, `work`, `held NUMBER`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvlease.connector.journal import Journal
from kvlease.connector.lender import LeaseHolder
from kvlease.connector.lender_effects import AnnounceEnded, AnnounceLapsed, AnnounceRenewed, Effect, RefuseRenewal
from kvlease.connector.link import Link
from kvlease.connector.probe import LenderProbe, Peer
from kvlease.connector.record import record_hash
from kvlease.connector.seal_table import SealTable, sweep
from kvlease.connector.settings import ConnectorSettings
from kvlease.registry.clock import SystemClock
from kvlease.registry.lender_session import LenderSession
from kvlease.registry.telemetry import configure_tracing
from kvlease.registry.values import (
    ConversationId,
    EndReason,
    Engine,
    EngineId,
    LeaseId,
    Publication,
    PublishResult,
    PublishStatus,
    RenewStatus,
)

from tests.chaos.messages import ChaosLenderSettings, News, to_line
from tests.nixl import content
from tests.nixl.agent import Memory, die_with_parent, open_agent, same_addresses_at_each_start
from tests.nixl.content import STRIDE_BLOCKS, Prompt
from tests.nixl.lender import Lender, now_ms
from tests.nixl.lending import Lending
from tests.nixl.messages import LenderSettings

NEWS_EVERY_S: Final = 0.1
LOOK_S: Final = 0.01
HASH_SHOWN: Final = 16
SHORT_TTL_MS: Final = 2_000
LONG_TTL_MS: Final = 600_000


class AnyLender:
    """A side channel that answers for everybody: the handshake is the pair's own."""

    async def answers_for(self, peer: Peer) -> bool:
        return True

    async def close(self) -> None:
        pass


def open_link(registry: str, part: str, resolve_wait_ms: int = 50) -> Link:
    """The connector's thread, as an engine has it."""
    clock = SystemClock()
    settings = ConnectorSettings.load({"registry": registry, "resolve_wait_ms": resolve_wait_ms})
    probe = LenderProbe(AnyLender(), clock, settings.probe_ms)
    return WatchedLink(settings, clock, Journal(configure_tracing(part)), probe)


class WatchedLink(Link):
    """Says what the session reports, too. Appends only: another thread takes it out."""

    def __init__(self, settings: ConnectorSettings, clock: SystemClock, journal: Journal, probe: LenderProbe) -> None:
        super().__init__(settings, clock, journal, probe)
        self.results: deque[PublishResult] = deque()
        self.ordered: deque[tuple[LeaseId, EndReason]] = deque()
        self.connects = 0

    def on_result(self, result: PublishResult) -> None:
        super().on_result(result)
        self.results.append(result)

    def on_end(self, lease_id: LeaseId, reason: EndReason) -> None:
        super().on_end(lease_id, reason)
        self.ordered.append((lease_id, reason))

    def on_connected(self) -> None:
        super().on_connected()
        self.connects += 1


class LendingToRegistry(Lending):
    """Tells the registry, as the connector's adapter does."""

    link: WatchedLink
    news: News

    def tell(self, effect: Effect) -> None:
        match effect:
            case AnnounceEnded(lease_id=lease_id, reason=reason):
                self.say(lambda session: session.ended(lease_id, reason))
                self.news.ended.append((lease_id, reason.value))
            case AnnounceLapsed(lease_id=lease_id):
                self.say(lambda session: session.lapsed(lease_id))
            case AnnounceRenewed(lease_id=lease_id, deadline_ms=deadline_ms):
                self.say(lambda session: session.renewed(lease_id, deadline_ms))
            case RefuseRenewal(lease_id=lease_id, status=status):
                self.say(lambda session: session.refuse_renewal(lease_id, status))

    def say(self, action: Callable[[LenderSession], None]) -> None:
        self.link.call(self.link.with_session, action)


class ChaosLender(Lender):
    """One incarnation."""

    def __init__(self, settings: ChaosLenderSettings, memory: Memory, table: SealTable) -> None:
        self._news = News(pid=os.getpid())
        self._link = open_link(settings.registry, "chaos-lender")
        assert isinstance(self._link, WatchedLink)
        self._watched: WatchedLink = self._link
        super().__init__(
            LenderSettings(
                socket=settings.socket,
                seed=settings.seed,
                engine=settings.engine,
                blocks=settings.blocks,
                block_bytes=settings.block_bytes,
            ),
            memory,
            table,
        )
        self._chaos = settings
        self._hashes: dict[str, str] = {}
        self._commands: deque[str] = deque()
        self._resting = False
        # No two incarnations write the same words for the same prompt.
        self._generation = secrets.randbits(40)
        self._link.break_seal = self._break_from_elsewhere
        self._link.renew = self._promise_from_elsewhere

    def make_lending(self, holder: LeaseHolder) -> Lending:
        made = LendingToRegistry(holder, self._pool, self._table, self._announced)
        made.link, made.news = self._watched, self._news
        return made

    def engine_params(self, generations: list[int]) -> bytes:
        return json.dumps(
            {
                "generations": generations,
                "remote_engine_id": self._chaos.engine,
                "remote_request_id": "kvl:lease",
                "remote_host": "lender",
                "remote_port": 1,
            }
        ).encode()

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        self._link.start()
        self._link.lend_as(
            Engine(
                engine_id=EngineId(self._chaos.engine),
                incarnation=self.incarnation,
                api_url=f"http://{self._chaos.engine}",
                fingerprint=content.FINGERPRINT,
            )
        )
        turn_at = news_at = time.monotonic()
        while not self._stopped:
            self.serve(LOOK_S)
            while self._commands:
                self._obey(self._commands.popleft())
            self._do_orders()
            if not self._resting and time.monotonic() >= turn_at:
                turn_at = time.monotonic() + self._random.uniform(0, 2 * self._chaos.turn_ms / 1_000)
                self._turn()
            if time.monotonic() >= news_at:
                news_at = time.monotonic() + NEWS_EVERY_S
                self._say_news()
        self._lending.carry_out(self._lending.holder.end_all(EndReason.DRAINED))
        self._link.close()
        self._table.break_all()

    def _turn(self) -> None:
        """Perhaps an end or a renewal, then blocks taken, written and lent."""
        holder, carry_out, dice = self._lending.holder, self._lending.carry_out, self._random.random()
        if self._offers and dice < 0.15:
            lease_id = self._random.choice(self._offers).lease_id
            if dice < 0.08:
                carry_out(holder.end(lease_id, EndReason.RELEASED))
            else:
                carry_out(holder.renew(lease_id, LONG_TTL_MS, now_ms()))
        prompt = self._next_prompt()
        hit = self._pool.prefix(content.block_hashes(prompt))
        self._pool.touch(hit)
        wanted = prompt.blocks - len(hit)
        if wanted > self._pool.free_blocks:
            carry_out(holder.relieve(wanted - self._pool.free_blocks))
        self._recent.append(prompt)
        blocks = hit + self._write(prompt, len(hit), remember=self._random.random() < 0.8)
        conversation: ConversationId | None = None
        if not prompt.variant and dice < 0.5:
            conversation = ConversationId(f"{self._chaos.engine}-{os.getpid()}-{prompt.conversation}")
        ttl_ms = SHORT_TTL_MS if self._random.random() < 0.3 else LONG_TTL_MS
        name = LeaseId(f"{self._chaos.engine}.{os.getpid()}.{self._generation}")
        self._lend(name, prompt, blocks, conversation, ttl_ms)
        self._pool.free(blocks[::-1])

    def _next_prompt(self) -> Prompt:
        """Conversations of an engine are its own: the same prefix may still be with earlier incarnations of it."""
        prompt = super()._next_prompt()
        if prompt.blocks > 8:
            self._conversations += 1
            return Prompt(conversation=self._conversations, blocks=2 * STRIDE_BLOCKS)
        return prompt

    def _announced(self, publication: Publication) -> None:
        super()._announced(publication)
        self._hashes[publication.lease_id] = record_hash(publication.record).hex()[:HASH_SHOWN]
        self._link.call(self._link.with_session, lambda session: session.publish(publication))

    def _do_orders(self) -> None:
        holder, carry_out = self._lending.holder, self._lending.carry_out
        while self._link.orders:
            order = self._link.orders.popleft()
            carry_out(holder.end(order.lease_id, order.reason))
        while self._link.renewals:
            lease_id, (ttl_ms, promised_ms) = self._link.renewals.popitem()
            if promised_ms is None:
                carry_out(holder.renew(lease_id, ttl_ms, now_ms()))
            else:
                carry_out(holder.keep_promise(lease_id, promised_ms, now_ms()))
        carry_out(holder.tick(now_ms()))
        free = self._pool.free_blocks
        self._link.call(self._link.with_session, lambda session: session.pool(free, self._chaos.blocks))

    def _break_from_elsewhere(self, lease_id: LeaseId) -> bool:
        slot = self._lending.holder.slot_of(lease_id)
        if slot is not None:
            self._table.break_seal(slot)
        return slot is not None

    def _promise_from_elsewhere(self, lease_id: LeaseId, ttl_ms: int) -> RenewStatus | int | None:
        return self._lending.holder.promise(lease_id, ttl_ms, now_ms())

    # -- what is said and heard -----------------------------------------------------------------------------------

    def _listen(self) -> None:
        for line in sys.stdin:
            self._commands.append(line.strip())

    def _obey(self, command: str) -> None:
        match command.split():
            case ["rest"]:
                self._resting = True
            case ["work"]:
                self._resting = False
            case ["held", number]:
                self._hashes = {i: h for i, h in self._hashes.items() if LeaseId(i) in self._lending.holder}
                self._news.held, self._news.answers = {**self._hashes}, int(number)
                self._say_news()

    def _say_news(self) -> None:
        news, link = self._news, self._watched
        while link.results:
            result = link.results.popleft()
            if result.status is PublishStatus.PUBLISHED:
                news.acknowledged.append(result.lease_id)
            else:
                news.refused.append((result.lease_id, result.status.value))
        while link.ordered:
            lease_id, reason = link.ordered.popleft()
            news.ordered.append((lease_id, reason.value))
        news.connects, news.wall_s = link.connects, time.time()
        print(to_line(news), flush=True)
        for told in (news.acknowledged, news.refused, news.ordered, news.ended, news.held):
            told.clear()
        news.answers = 0


def main() -> None:
    die_with_parent()
    same_addresses_at_each_start()
    settings = ChaosLenderSettings(**json.loads(sys.argv[1]))
    sweep()
    table = SealTable.create(slots=settings.slots)
    try:
        memory = Memory(settings.blocks, settings.block_bytes)
        lender = ChaosLender(settings, memory, table)
        signal.signal(signal.SIGTERM, lender.stop)
        agent = open_agent(f"lender-{os.getpid()}", [memory.region, (table.address, table.size, 0, "")])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(settings.socket)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(settings.socket)
            listener.listen()
            lender.listen(listener, agent.get_agent_metadata())
            lender.run()
    finally:
        table.close()


if __name__ == "__main__":
    main()
