"""What etcd as the store costs: publishes through it, how soon another registry knows, how much it carries.

One and three members on this machine, two registries on them. A turn at the store is one lease published and the one
before it superseded, as in a conversation that goes on. Disks decide much of it: etcd writes its log before it answers.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.errors import RegistryUnavailable
from kvlease.registry.etcd_codec import encode_lease_put
from kvlease.registry.table_changes import LeasePut
from kvlease.registry.values import Hit

from tests.bench.effort import Effort
from tests.bench.figures import Figure, Unit, at_most, over_rounds, quantile
from tests.bench.lenders import Lender
from tests.bench.payloads import TOKENS, Turn, Turns, engine
from tests.bench.registry_sections import LIFE_MS, port_of
from tests.bench.served import Program
from tests.bench.wire import AnswerTooShort
from tests.etcd.cluster import ClusterSettings, etcd_cluster

RESOLVE_MS: Final = 2_000
VISIBLE_S: Final = 5.0
SERVES_S: Final = 30.0
LENDERS: Final = 200
IDLE_S: Final = 4.0
STORED_BYTES: Final = 16_000
"""Of a 24k-token lease, at most."""
HOSTS: Final = {1: ("127.0.0.1",), 3: ("127.0.0.1", "127.0.0.1", "127.0.0.1")}


async def measure(effort: Effort, seed: int, progress: Callable[[str], None]) -> list[Figure]:
    """Raises ProgramFailed, NotPublished, AnswerTooShort, KvleaseError, EtcdMissing."""
    figures = [_stored(seed)]
    for members in HOSTS:
        progress(f"etcd, {members} members")
        with tempfile.TemporaryDirectory() as folder:
            settings = ClusterSettings(folder=Path(folder), hosts=HOSTS[members])
            async with etcd_cluster(settings) as cluster:
                figures += await _Run(members, cluster.endpoints, effort, seed).figures()
    return figures


def _stored(seed: int) -> Figure:
    owner = engine("lender", seed=seed)
    turn = Turns(owner, seed=seed, deadline_ms=LIFE_MS).make(TOKENS["24k"])
    put = LeasePut(engine_id=owner.engine_id, incarnation=owner.incarnation, publication=turn.publication)
    return over_rounds(
        "etcd",
        "a 24k-token lease as it is stored",
        Unit.BYTES,
        [len(encode_lease_put(put))],
        budget=at_most(STORED_BYTES),
    )


class _Run:
    """One cluster and two registries on it."""

    def __init__(self, members: int, endpoints: Sequence[str], effort: Effort, seed: int) -> None:
        self._section: Final = f"etcd, {members} member{'s' if members > 1 else ''}"
        self._store: Final = "etcd://" + ",".join(endpoints)
        self._effort: Final = effort
        self._seed: Final = seed

    async def figures(self) -> list[Figure]:
        async with AsyncExitStack() as stack:
            flags = ("--store", self._store)
            home = await stack.enter_async_context(Program("tests.bench.registry_server", *flags))
            other = await stack.enter_async_context(Program("tests.bench.registry_server", *flags))
            clients = [
                await stack.enter_async_context(RegistryClient(f"127.0.0.1:{await port_of(program)}"))
                for program in (home, other)
            ]
            for client in clients:
                await _serves(client)
            deadline_ms = SystemClock().now_ms() + LIFE_MS
            owner = engine("lender-publishing", seed=self._seed)
            lender = await stack.enter_async_context(Lender(clients[0], owner))
            turns = Turns(owner, seed=self._seed, deadline_ms=deadline_ms)
            figures: list[Figure] = []
            for size, tokens in TOKENS.items():
                figures += await self._one_by_one(clients, lender, turns, size, tokens)
                figures.append(await self._many(lender, turns, size, tokens))
            figures += await self._idle(stack, home, clients[0])
            return figures

    async def _one_by_one(
        self, clients: Sequence[RegistryClient], lender: Lender, turns: Turns, size: str, tokens: int
    ) -> list[Figure]:
        here: list[float] = []
        there: list[float] = []
        for _ in range(self._effort.rounds):
            mine: list[float] = []
            others: list[float] = []
            made = list(turns.many(tokens, max(4, self._effort.publishes // 32)))
            for turn in made:
                began = time.perf_counter()
                await lender.publish([turn.publication])
                await _found(clients[0], turn)
                mine.append((time.perf_counter() - began) * 1e3)
                await _found(clients[1], turn)
                others.append((time.perf_counter() - began) * 1e3)
            here.append(quantile(mine, 0.5))
            there.append(quantile(others, 0.5))
            lender.end([turn.publication for turn in made])
        return [
            over_rounds(
                self._section,
                f"{size}: publish to resolvable, p50",
                Unit.MILLISECONDS,
                here,
                budget=at_most(15.0),
                note="the resolve that finds it included",
            ),
            over_rounds(
                self._section, f"{size}: publish to resolvable at the other registry, p50", Unit.MILLISECONDS, there
            ),
        ]

    async def _many(self, lender: Lender, turns: Turns, size: str, tokens: int) -> Figure:
        rates: list[float] = []
        for _ in range(max(1, self._effort.rounds // 3)):
            made = [turn.publication for turn in turns.many(tokens, self._effort.publishes)]
            began = time.perf_counter()
            await lender.publish(made)
            rates.append(len(made) / (time.perf_counter() - began))
            lender.end(made)
        return over_rounds(
            self._section,
            f"{size}: publishes through one registry",
            Unit.PER_SECOND,
            rates,
            note="lender, registries and etcd share these cores",
        )

    async def _idle(self, stack: AsyncExitStack, home: Program, client: RegistryClient) -> list[Figure]:
        """What lenders cost that only have a session: their heartbeats, and the one beat a second to etcd for all."""
        count = LENDERS if self._effort.rounds > 1 else 8
        before_ns = home.cpu_ns()
        await asyncio.sleep(IDLE_S)
        alone = (home.cpu_ns() - before_ns) / 1e6 / IDLE_S
        for number in range(count):
            await stack.enter_async_context(Lender(client, engine(f"lender-{number}", seed=number)))
        await asyncio.sleep(1.0)
        before_ns = home.cpu_ns()
        await asyncio.sleep(IDLE_S)
        many = (home.cpu_ns() - before_ns) / 1e6 / IDLE_S
        return [
            over_rounds(
                self._section,
                "a registry's processor time a second for each idle lender",
                Unit.MICROSECONDS,
                [max(0.0, many - alone) * 1e3 / count],
                note=f"{count} lenders",
            )
        ]


async def _serves(client: RegistryClient) -> None:
    """Returns when the registry has loaded its store. Raises RegistryUnavailable after SERVES_S."""
    until = time.perf_counter() + SERVES_S
    while True:
        try:
            await client.list_engines()
        except RegistryUnavailable:
            if time.perf_counter() > until:
                raise
            await asyncio.sleep(0.05)
        else:
            return


async def _found(client: RegistryClient, turn: Turn) -> None:
    """Returns with the first hit. Raises AnswerTooShort after VISIBLE_S."""
    until = time.perf_counter() + VISIBLE_S
    while time.perf_counter() < until:
        answer = await client.resolve(turn.query, timeout_ms=RESOLVE_MS)
        if isinstance(answer, Hit) and answer.lease_id == turn.publication.lease_id:
            return
    raise AnswerTooShort("a lease that was published is not found")
