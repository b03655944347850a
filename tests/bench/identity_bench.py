"""What it costs that callers say who they are: the same resolves by the same client, from registries that know callers
in different ways.

Four registries run side by side and are asked in alternating rounds: nobody need say who they are, bearer tokens, TLS
without identity, certificates (mTLS). TLS alone stands there to tell encryption from identity. The client's part is in
the latencies and rates; the server's processor time is given beside them.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvlease.registry.client import RegistryClient
from kvlease.registry.client_credentials import Credentials
from kvlease.registry.clock import SystemClock
from kvlease.registry.values import Hit, Miss

from tests.bench.effort import Effort
from tests.bench.figures import Figure, Unit, over_rounds, quantile
from tests.bench.lenders import Lender
from tests.bench.payloads import TOKENS, Turn, Turns, engine
from tests.bench.registry_sections import LIFE_MS, port_of
from tests.bench.served import Program
from tests.bench.wire import AnswerTooShort
from tests.integration.certificates import Authority, put

SECTION: Final = "identity, 1k-token leases"
CALLERS: Final = 64
DISTINCT: Final = 64
LENDER: Final = "lender-known"
GRANTS: Final = tuple(f"kvlease://{role}/{LENDER}" for role in ("lender", "borrower"))
RESOLVE_MS: Final = 5_000


class Way(StrEnum):
    """How a registry knows its callers."""

    NONE = "no identity"
    TOKENS = "tokens"
    TLS = "TLS, no identity"
    CERTIFICATES = "certificates"


@dataclass(slots=True)
class Rounds:
    """One measurement of one registry, round by round."""

    value: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    """The server's processor time for one resolve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One registry, a client that it knows, and what it holds."""

    way: Way
    program: Program
    client: RegistryClient
    turns: Sequence[Turn]


async def measure(effort: Effort, seed: int, progress: Callable[[str], None]) -> list[Figure]:
    """Raises ProgramFailed, NotPublished, AnswerTooShort, KvleaseError."""
    with tempfile.TemporaryDirectory(prefix="kvlease-bench-") as folder:
        async with AsyncExitStack() as stack:
            progress("starting registries that know their callers in four ways")
            asked = [await _start(stack, way, Path(folder), seed) for way in Way]
            figures: list[Figure] = []
            for name, unit, ask, count in (
                (f"stream, {CALLERS} callers", Unit.PER_SECOND, _joined, effort.many_calls),
                ("stream, one caller, p50", Unit.MICROSECONDS, _streamed, effort.calls),
                ("unary, p50", Unit.MICROSECONDS, _unary, effort.calls),
            ):
                progress(f"identity: {name}")
                figures += _figures(name, unit, await _in_turn(asked, effort.rounds, ask, count))
            return figures


async def _start(stack: AsyncExitStack, way: Way, folder: Path, seed: int) -> Asked:
    flags, credentials = _credentials(way, folder / way.name)
    program = await stack.enter_async_context(Program("tests.bench.registry_server", *flags))
    endpoint = f"127.0.0.1:{await port_of(program)}"
    client = await stack.enter_async_context(RegistryClient(endpoint, credentials=credentials))
    lender = await stack.enter_async_context(Lender(client, engine(LENDER, seed=seed)))
    made = Turns(lender.engine, seed=seed, deadline_ms=SystemClock().now_ms() + LIFE_MS)
    turns = list(made.many(TOKENS["1k"], DISTINCT))
    await lender.publish([turn.publication for turn in turns])
    random.Random(seed).shuffle(turns)
    return Asked(way=way, program=program, client=client, turns=turns)


def _credentials(way: Way, folder: Path) -> tuple[list[str], Credentials | None]:
    """A registry's flags, and what a client of it shows."""
    folder.mkdir()
    if way is Way.NONE:
        return [], None
    if way is Way.TOKENS:
        token, path, own = secrets.token_hex(32), folder / "tokens", folder / "own"
        put(path, f"sha256:{hashlib.sha256(token.encode()).hexdigest()} {' '.join(GRANTS)}\n".encode())
        put(own, token.encode())
        return ["--token-file", str(path)], Credentials(token_file=str(own))
    authority = Authority(folder)
    server = authority.server()
    flags = ["--tls-cert", str(server.cert), "--tls-key", str(server.key)]
    if way is Way.TLS:
        return flags, Credentials(tls_ca=str(server.ca))
    return [*flags, "--tls-ca", str(server.ca)], authority.client("bench", *GRANTS).credentials


Ask = Callable[[Asked, int], Awaitable[float]]


async def _in_turn(asked: Sequence[Asked], rounds: int, ask: Ask, count: int) -> dict[Way, Rounds]:
    """Each round asks every registry once, in a rotating order."""
    found = {one.way: Rounds() for one in asked}
    for one in asked:
        await ask(one, max(1, count // 4))
    for number in range(rounds):
        start = number % len(asked)
        for one in [*asked[start:], *asked[:start]]:
            before_ns = one.program.cpu_ns()
            found[one.way].value.append(await ask(one, count))
            found[one.way].cpu_us.append((one.program.cpu_ns() - before_ns) / 1e3 / count)
    return found


async def _joined(asked: Asked, count: int) -> float:
    """Resolves a second by many callers, whose questions the client joins into messages."""
    left = iter([asked.turns[index % len(asked.turns)] for index in range(count)])

    async def caller() -> None:
        for turn in left:
            _check(await asked.client.resolve(turn.query, timeout_ms=RESOLVE_MS))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(caller())
    return count / (time.perf_counter() - began)


async def _streamed(asked: Asked, count: int) -> float:
    return await _one_by_one(asked, count, lambda turn: asked.client.resolve(turn.query, timeout_ms=RESOLVE_MS))


async def _unary(asked: Asked, count: int) -> float:
    return await _one_by_one(asked, count, lambda turn: asked.client.resolve_unary(turn.query, timeout_ms=RESOLVE_MS))


async def _one_by_one(asked: Asked, count: int, resolve: Callable[[Turn], Awaitable[Hit | Miss]]) -> float:
    """The median of `count` resolves, in microseconds."""
    samples: list[float] = []
    for index in range(count):
        began_ns = time.perf_counter_ns()
        answer = await resolve(asked.turns[index % len(asked.turns)])
        samples.append((time.perf_counter_ns() - began_ns) / 1e3)
        _check(answer)
    return quantile(samples, 0.5)


def _check(answer: Hit | Miss) -> None:
    if not isinstance(answer, Hit):
        raise AnswerTooShort(f"the registry does not find what it holds: {answer}")


def _figures(name: str, unit: Unit, found: dict[Way, Rounds]) -> list[Figure]:
    """For each way the figure itself, with the server's processor time, and the same over that without identity."""
    figures: list[Figure] = []
    for way, rounds in found.items():
        cpu_us = quantile(rounds.cpu_us, 0.5)
        note = f"server's CPU: {cpu_us:,.0f} us each"
        figures.append(over_rounds(SECTION, f"{way}: {name}", unit, rounds.value, note=note))
        if way is not Way.NONE:
            pairs = zip(rounds.value, found[Way.NONE].value, strict=True)
            ratios = [mine / plain for mine, plain in pairs]
            figures.append(over_rounds(SECTION, f"{way}: {name} / no identity", Unit.RATIO, ratios))
    return figures
