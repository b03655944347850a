"""`python -m tests.bench.peers`: kvlease beside other places to keep where KV is; same payload, one run.

Each peer is a process of its own on loopback, started and stopped here; one that is not installed is named as not
measured. What is compared is one write and one read of the same bytes; what each does with them, and promises, is in
`PROMISES`, for the rates mean nothing without it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Final

from kvlease.registry.wire import encode_publication
from rich.console import Console
from rich.table import Table

from tests.bench.figures import Figure, Unit, over_rounds, quantile
from tests.bench.payloads import Turn, Turns, engine
from tests.bench.peer_stores import NotInstalled, Peer, etcd, kvlease, kvlease_stream, mooncake, redis
from tests.bench.report import Report, write_json

LEASE_TOKENS: Final = 4_096
"""256 blocks of 16 tokens."""
ROUNDS: Final = 7
CALLS: Final = 200
MANY_CALLS: Final = 800
CALLERS: Final = 32
SEED: Final = 20_262
SECTION: Final = "peers, a 4k-token lease"

PROMISES: Final = {
    "kvlease, unary": "longest prefix of a token chain, or by name; ends by the lender's clock, pushed to the lender; "
    "watch; nothing on disk: lenders present again what they hold",
    "kvlease, stream": "the same, one message each way on a stream that is open already",
    "etcd": "one exact key; on the disks of a majority (here: of one) before it answers; ttl by its own clock; watch",
    "Redis": "one exact key; in memory, written to disk later or never; ttl by its own clock; no ordered watch",
    "Mooncake": "one exact key; the value is copied into the store, and a lease keeps that copy from eviction; a "
    "resolve here asks for the place of the copy; its client answers one call at a time",
}
WHY_FASTER: Final = {
    "etcd": "a Go server reads one key from a map; kvlease's unary calls pay for Python's event loop on both sides",
    "Redis": "a C server, one line of text each way and no HTTP/2: the floor of what a round trip costs here",
    "Mooncake": "a C++ server and client, one hash lookup; kvlease parses, searches and answers in Python",
}
"""What it is that makes a peer faster, where it is."""
PEERS: Final[Sequence[Callable[[], AbstractAsyncContextManager[Peer]]]] = (
    kvlease,
    kvlease_stream,
    etcd,
    redis,
    mooncake,
)


async def run(progress: Callable[[str], None]) -> Report:
    began, load = time.monotonic(), os.getloadavg()[0]
    figures: list[Figure] = []
    skipped: list[tuple[str, str]] = []
    async with AsyncExitStack() as stack:
        peers: list[Peer] = []
        for start in PEERS:
            progress(f"starting {start.__name__}")
            try:
                peers.append(await stack.enter_async_context(start()))
            except NotInstalled as error:
                skipped.append((start.__name__, str(error)))
        source = Turns(engine("lender-1", seed=SEED), seed=SEED, deadline_ms=2**40)
        samples: dict[str, dict[str, list[float]]] = {peer.name: {} for peer in peers}
        for number in range(ROUNDS):
            for peer in peers[number % len(peers) :] + peers[: number % len(peers)]:
                progress(f"round {number + 1} of {ROUNDS}: {peer.name}")
                for name, value in (await _round(peer, source)).items():
                    samples[peer.name].setdefault(name, []).append(value)
    for peer_name, measured in samples.items():
        for name, values in measured.items():
            unit = Unit.PER_SECOND if name.endswith("callers") else Unit.MICROSECONDS
            figures.append(over_rounds(SECTION, f"{peer_name}: {name}", unit, values, note=PROMISES[peer_name]))
    return Report(
        quick=False,
        seconds=time.monotonic() - began,
        load=load,
        figures=tuple(figures),
        skipped=tuple(skipped),
    )


async def _round(peer: Peer, source: Turns) -> dict[str, float]:
    turns = list(source.many(LEASE_TOKENS, CALLS))
    payload = [encode_publication(turn.publication).SerializeToString() for turn in turns]
    pairs = list(zip(turns, payload, strict=True))

    async def publish(pair: tuple[Turn, bytes]) -> None:
        await peer.publish(*pair)

    async def resolve(pair: tuple[Turn, bytes]) -> None:
        await peer.resolve(pair[0], len(pair[1]))

    many = list(source.many(LEASE_TOKENS, MANY_CALLS))
    others = [(turn, encode_publication(turn.publication).SerializeToString()) for turn in many]
    return {
        "publish, p50": await _p50(publish, pairs),
        "resolve, p50": await _p50(resolve, pairs),
        f"publish, {CALLERS} callers": await _rate(publish, others),
        f"resolve, {CALLERS} callers": await _rate(resolve, others),
    }


async def _p50(call: Callable[[tuple[Turn, bytes]], Awaitable[None]], pairs: Sequence[tuple[Turn, bytes]]) -> float:
    samples: list[float] = []
    for pair in pairs:
        began = time.perf_counter_ns()
        await call(pair)
        samples.append((time.perf_counter_ns() - began) / 1e3)
    return quantile(samples, 0.5)


async def _rate(call: Callable[[tuple[Turn, bytes]], Awaitable[None]], pairs: Sequence[tuple[Turn, bytes]]) -> float:
    left = iter(pairs)

    async def caller() -> None:
        for pair in left:
            await call(pair)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(caller())
    return len(pairs) / (time.perf_counter() - began)


def show(report: Report, console: Console) -> None:
    """One line for each peer, and below what it promises."""
    rows: dict[str, list[str]] = {}
    for figure in report.figures:
        peer, _, _ = figure.name.partition(": ")
        text = f"{figure.value:,.0f}{'/s' if figure.unit is Unit.PER_SECOND else ' us'}"
        rows.setdefault(peer, []).append(f"{text} ({figure.low:,.0f}-{figure.high:,.0f})")
    table = Table(title="a 4k-token lease; median of rounds (quartiles)", title_justify="left")
    for column in ("", "publish p50", "resolve p50", f"publish, {CALLERS} callers", f"resolve, {CALLERS} callers"):
        table.add_column(column)
    for peer, cells in rows.items():
        table.add_row(peer, *cells)
    console.print(table)
    for peer in rows:
        console.print(f"{peer}: {PROMISES[peer]}")
    for line in slower(report.figures):
        console.print(line)
    for name, why in report.skipped:
        console.print(f"not measured: {name}: {why}")


def slower(figures: Sequence[Figure]) -> list[str]:
    """Where a peer does better than the faster of kvlease's two ways, by how much, and why."""
    best: dict[str, float] = {}
    lines: dict[str, list[str]] = {}
    for figure in figures:
        peer, _, name = figure.name.partition(": ")
        if peer not in WHY_FASTER:
            best[name] = min(_cost(figure), best.get(name, _cost(figure)))
    for figure in figures:
        peer, _, name = figure.name.partition(": ")
        if peer in WHY_FASTER and _cost(figure) < best[name]:
            lines.setdefault(peer, []).append(f"{name} {best[name] / _cost(figure):.1f} x")
    return [f"kvlease is slower than {peer}: {', '.join(found)}; {WHY_FASTER[peer]}" for peer, found in lines.items()]


def _cost(figure: Figure) -> float:
    return 1 / figure.value if figure.unit is Unit.PER_SECOND else figure.value


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description="kvlease beside its peers.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument(
        "--check",
        action="store_true",
        default=os.environ.get("CHECK", "") not in ("", "0"),
        help="exit with status 1 if a peer could not be measured (also: CHECK=1)",
    )
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    with console.status("starting") as status:
        report = asyncio.run(run(status.update))
    show(report, console)
    if options.json is not None:
        write_json(report, options.json)
    return 1 if options.check and report.skipped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
