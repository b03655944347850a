"""What the router costs: time to the first byte of a streamed turn over calling the engines directly, and a locate in
its copy of the leases.

The engine takes no time, so the difference is the router's, an HTTP hop included. "Directly" is what a turn needs
without a router: a prefill, then a decode. Connections stay open, and the ways take turns, round by round. A turn that
was to be located in the copy and was not ends the run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import aiohttp
from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock
from kvlease.registry.lease_copy import LeaseCopy
from kvlease.registry.lease_copy_feed import LeaseCopyFeed
from kvlease.registry.values import DEFAULT_TENANT, ConversationId
from kvlease.router.leases import Leases, LocatedBy
from kvlease.router.metrics import RouterMetrics
from kvlease.router.routes import Routes

from tests.bench.effort import Effort
from tests.bench.figures import Figure, Unit, at_most, over_rounds, quantile
from tests.bench.lenders import Lender
from tests.bench.payloads import Turns, engine
from tests.bench.registry_sections import LIFE_MS, port_of
from tests.bench.served import Program
from tests.bench.wire import AnswerTooShort

SECTION: Final = "router"
TOKENS: Final = 1_024
MESSAGES: Final = 8
MESSAGE_CHARS: Final = 500
"""With MESSAGES: a chat of about a thousand tokens."""
LOCATES: Final = 20
"""In one sample: a clock read costs as much as a part of a locate."""
ADDED_MS: Final = at_most(goal=2.0)
LOCATE_US: Final = at_most(goal=10.0)
ADDED_OF_DIRECT: Final = at_most(3.0)
COPY_OF_CALL: Final = at_most(0.03)
CALLS_SHARE: Final = 4
"""A locate by a call is asked this many times less often."""
WAIT_S: Final = 30.0
STALE_MS: Final = 10_000

Way = Callable[[str], Awaitable[float]]
"""One turn of a conversation; milliseconds to the first byte of its answer."""


async def measure(effort: Effort, seed: int, progress: Callable[[str], None]) -> list[Figure]:
    """Raises ProgramFailed, NotPublished, AnswerTooShort, KvleaseError."""
    async with AsyncExitStack() as stack:
        progress("router: starting engine, registry and routers")
        registry = await stack.enter_async_context(Program("tests.bench.registry_server"))
        instant = await stack.enter_async_context(Program("tests.bench.instant_engine"))
        endpoint, url = f"127.0.0.1:{await port_of(registry)}", f"http://127.0.0.1:{await port_of(instant)}"
        client = await stack.enter_async_context(RegistryClient(endpoint))
        lender = await stack.enter_async_context(Lender(client, engine("decode-0", seed=seed)))
        turns = Turns(lender.engine, seed=seed, deadline_ms=SystemClock().now_ms() + LIFE_MS)
        held = [turn.publication for turn in turns.many(TOKENS, effort.leases)]
        await lender.publish(held)
        names = [item.conversation for item in held if item.conversation is not None]

        progress("router: locate in the copy")
        figures = await _located(client, effort, names)

        engines = ("--prefill", url, "--decode", f"decode-0@{url}", "--log-level", "error")
        http = await stack.enter_async_context(aiohttp.ClientSession())
        on = await stack.enter_async_context(Program("tests.bench.router_server", "--registry", endpoint, *engines))
        off = await stack.enter_async_context(Program("tests.bench.router_server", "--registry", "none", *engines))
        routers = {"leases on": await port_of(on), "leases off": await port_of(off)}
        await _copied(http, routers["leases on"], len(held))
        ways: dict[str, Way] = {name: _through(http, port) for name, port in routers.items()}

        progress("router: time to first byte")
        found = await _first_bytes(effort, names, _directly(http, url), ways)
        await _surely_by_copy(http, routers["leases on"])
        return figures + found


async def _first_bytes(
    effort: Effort, names: Sequence[ConversationId], directly: Way, ways: dict[str, Way]
) -> list[Figure]:
    plain: list[float] = []
    added: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(effort.rounds):
        base = await _p50(directly, names, effort.calls)
        plain.append(base)
        for name, way in ways.items():
            added[name].append(await _p50(way, names, effort.calls) - base)
    figures = [over_rounds(SECTION, "first byte, engines called directly, p50", Unit.MILLISECONDS, plain)]
    for name, rounds in added.items():
        what = f"first byte, added by the router, {name}, p50"
        ratios = [mine / base for mine, base in zip(rounds, plain, strict=True)]
        figures += [
            over_rounds(SECTION, what, Unit.MILLISECONDS, rounds, budget=ADDED_MS),
            over_rounds(SECTION, f"{what} / called directly", Unit.RATIO, ratios, budget=ADDED_OF_DIRECT),
        ]
    return figures


async def _p50(way: Way, names: Sequence[ConversationId], calls: int) -> float:
    return quantile([await way(names[index % len(names)]) for index in range(calls)], 0.5)


async def _located(client: RegistryClient, effort: Effort, names: Sequence[ConversationId]) -> list[Figure]:
    """In this process: the copy alone, and all that a turn pays for it."""
    async with _fed(client, len(names)) as copy:
        clock, routes = SystemClock(), Routes((), cooldown_ms=1)
        leases = Leases(
            client,
            RouterMetrics(routes, copy, clock),
            copy,
            clock,
            tenant=DEFAULT_TENANT,
            copy_staleness_ms=STALE_MS,
            locate_timeout_ms=1_000,
            call_timeout_ms=1_000,
        )
        alone: list[float] = []
        called: list[float] = []
        whole: list[float] = []
        for _ in range(effort.rounds):
            alone.append(quantile([_copy_us(copy, clock, names, i) for i in range(effort.calls)], 0.5))
            calls = max(4, effort.calls // CALLS_SHARE)
            called.append(quantile([await _call_us(client, names, i) for i in range(calls)], 0.5))
            whole.append(quantile([await _lookup_us(leases, names, i) for i in range(effort.calls)], 0.5))
        return [
            over_rounds(SECTION, "locate in the copy, p50", Unit.MICROSECONDS, alone, budget=LOCATE_US),
            over_rounds(
                SECTION,
                "locate in the copy, p50 / by a call",
                Unit.RATIO,
                [copied / asked for copied, asked in zip(alone, called, strict=True)],
                budget=COPY_OF_CALL,
            ),
            over_rounds(
                SECTION,
                "locate of a turn by the copy, p50",
                Unit.MICROSECONDS,
                whole,
                note="with the look at its staleness, and counted",
            ),
        ]


def _copy_us(copy: LeaseCopy, clock: SystemClock, names: Sequence[ConversationId], start: int) -> float:
    began_ns = time.perf_counter_ns()
    for index in range(start, start + LOCATES):
        if copy.locate(DEFAULT_TENANT, names[index % len(names)], now_ms=clock.now_ms()).lease is None:
            raise AnswerTooShort("the copy does not find what the registry holds")
    return (time.perf_counter_ns() - began_ns) / 1e3 / LOCATES


async def _call_us(client: RegistryClient, names: Sequence[ConversationId], index: int) -> float:
    began_ns = time.perf_counter_ns()
    found = await client.locate(DEFAULT_TENANT, names[index % len(names)], timeout_ms=1_000)
    if found.lease is None:
        raise AnswerTooShort("the registry does not locate what it holds")
    return (time.perf_counter_ns() - began_ns) / 1e3


async def _lookup_us(leases: Leases, names: Sequence[ConversationId], start: int) -> float:
    began_ns = time.perf_counter_ns()
    for index in range(start, start + LOCATES):
        if (await leases.locate(names[index % len(names)], ())).by is not LocatedBy.COPY:
            raise AnswerTooShort("a turn was not located in the copy")
    return (time.perf_counter_ns() - began_ns) / 1e3 / LOCATES


@asynccontextmanager
async def _fed(client: RegistryClient, count: int) -> AsyncIterator[LeaseCopy]:
    copy = LeaseCopy()
    feeding = asyncio.create_task(LeaseCopyFeed(client, copy, clock=SystemClock()).run())
    try:
        async with asyncio.timeout(WAIT_S):
            while len(copy) < count:  # noqa: ASYNC110 - a copy has no event of its own
                await asyncio.sleep(0.01)
        yield copy
    finally:
        feeding.cancel()
        await asyncio.wait([feeding])


def _chat(**fields: object) -> dict[str, Any]:
    texts = [chr(ord("a") + number) * MESSAGE_CHARS for number in range(MESSAGES + 1)]
    roles = ["user", "assistant"] * MESSAGES
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"model": "m", "messages": messages, **fields}


def _through(http: aiohttp.ClientSession, port: int) -> Way:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"

    async def turn(name: str) -> float:
        return await _first_byte(http, url, _chat(stream=True, conversation_id=name), time.perf_counter_ns())

    return turn


def _directly(http: aiohttp.ClientSession, base: str) -> Way:
    url = f"{base}/v1/chat/completions"
    prefill = _chat(max_tokens=1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})

    async def turn(_: str) -> float:
        began_ns = time.perf_counter_ns()
        async with http.post(url, data=json.dumps(prefill).encode()) as answer:
            handoff = (await answer.json())["kv_transfer_params"]
        return await _first_byte(http, url, _chat(stream=True, kv_transfer_params=handoff), began_ns)

    return turn


async def _first_byte(http: aiohttp.ClientSession, url: str, body: dict[str, Any], began_ns: int) -> float:
    async with asyncio.timeout(WAIT_S), http.post(url, data=json.dumps(body).encode()) as answer:
        first = await answer.content.readany()
        took_ms = (time.perf_counter_ns() - began_ns) / 1e6
        rest = await answer.content.read()
    if answer.status != 200 or not (first + rest).endswith(b"data: [DONE]\n\n"):
        raise AnswerTooShort(f"status {answer.status}, {len(first) + len(rest)} bytes")
    return took_ms


async def _copied(http: aiohttp.ClientSession, port: int, count: int) -> None:
    """Wait until the router's copy holds all leases."""
    async with asyncio.timeout(WAIT_S):
        while (await _value(http, port, "kvlease_router_copy_leases")) < count:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def _surely_by_copy(http: aiohttp.ClientSession, port: int) -> None:
    """Raises AnswerTooShort if a turn was located by a call, or not at all."""
    by_copy = await _value(http, port, 'kvlease_router_locates_total{by="copy",outcome="hit"}')
    turns = await _value(http, port, 'kvlease_router_turns_total{outcome="served"}')
    if by_copy != turns:
        raise AnswerTooShort(f"{by_copy:.0f} of {turns:.0f} turns were located in the copy")


async def _value(http: aiohttp.ClientSession, port: int, sample: str) -> float:
    async with http.get(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = [line.rpartition(" ")[2] for line in lines if line.startswith(sample + " ")]
    return float(found[0]) if found else 0.0
