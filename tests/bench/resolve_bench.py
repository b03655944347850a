"""What a resolve costs over the wire, beside an echo of the same sizes: unary, on the stream, batched, and Locate.

The registry holds `leases` leases of each size; questions are those of the next turns of random ones, and every answer
is checked for its length against a hit that was decoded once.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

from kvlease.registry.wire_resolve import encode_locate, encode_query
from kvlease.v1 import registry_pb2 as pb

from tests.bench.contest import Contest, Contestant, Role, Scripts, latency_figures, rate_figures
from tests.bench.echo_server import BYTES_SERVICE, MESSAGES_SERVICE, SIZE_BYTES
from tests.bench.effort import Effort
from tests.bench.figures import Figure, at_least, at_most
from tests.bench.payloads import NEXT_TURN_STRIDES, TOKENS, Turn
from tests.bench.wire import BATCH, AnswerTooShort, Script

REGISTRY: Final = "kvlease.v1.Registry"
CALLERS: Final = 32
WINDOW: Final = 8
"""Batched messages without an answer: enough that neither side waits for the other."""
DISTINCT: Final = 64
"""Different messages that are sent in turns."""
# Over either echo: what the spread of runs allows, and beside it what was aimed at. DESIGN.md says what lies between.
UNARY: Final = at_least(0.45, goal=0.90)
ONE_CALLER: Final = at_most(1.50, goal=1.15)
BATCHED: Final = {"1k": at_least(0.30, goal=0.80), "8k": at_least(0.40, goal=0.80), "24k": at_least(0.55, goal=0.80)}


def echo_of(requests: Sequence[bytes], answer_bytes: int) -> list[bytes]:
    """Requests of the same sizes that ask for answers of this size."""
    head = answer_bytes.to_bytes(SIZE_BYTES, "little")
    return [head + bytes(max(0, len(request) - SIZE_BYTES)) for request in requests]


def batches(queries: Sequence[bytes], source: random.Random) -> list[bytes]:
    """Messages of BATCH resolves each."""
    messages: list[bytes] = []
    for _ in range(DISTINCT // 4):
        message = pb.ResolveStreamRequest()
        for correlation_id, query in enumerate(source.choices(queries, k=BATCH), start=1):
            item = message.requests.add(correlation_id=correlation_id)
            item.request.ParseFromString(query)
        messages.append(message.SerializeToString())
    return messages


class ResolveBench:
    """All contests about resolves between one echo and one registry."""

    def __init__(self, contestants: Sequence[Contestant], effort: Effort, *, seed: int) -> None:
        wires = {contestant.role: contestant.wire for contestant in contestants}
        self._echo: Final = wires[Role.MESSAGES]
        self._registry: Final = wires[Role.REGISTRY]
        self._effort: Final = effort
        self._random: Final = random.Random(seed)
        self._contest: Final = Contest(contestants, effort.rounds)

    async def run(self, turns: Mapping[str, Sequence[Turn]]) -> list[Figure]:
        """`turns`: those that the registry holds, by the name of their size."""
        figures: list[Figure] = []
        for size, held in turns.items():
            figures += await self._size(size, held)
        return figures + await self._locate(next(iter(turns.values())))

    async def _size(self, size: str, turns: Sequence[Turn]) -> list[Figure]:
        effort, section = self._effort, f"resolve, {size}-token leases"
        chosen = self._random.sample(turns, min(DISTINCT, len(turns)))
        queries = [encode_query(turn.query).SerializeToString() for turn in chosen]
        single = await self._scripts(f"/{REGISTRY}/Resolve", queries, "Unary")
        messages = batches(queries, self._random)
        batched = await self._stream_scripts(messages, single)
        one_each = [_one(query) for query in queries]
        streamed = await self._stream_scripts(one_each, single)
        share = TOKENS["1k"] / TOKENS[size]
        per_round = max(4, int(effort.messages * max(share, 0.25)))

        figures = latency_figures(section, "unary", await self._contest.unary_latency(single, effort.calls))
        rate = await self._contest.unary_rate(single, effort.many_calls, callers=CALLERS)
        figures += rate_figures(section, f"unary, {CALLERS} callers", rate, budget=UNARY)
        latency = await self._contest.stream_latency(streamed, effort.calls)
        figures += latency_figures(section, "stream, one caller", latency, budget=ONE_CALLER)
        rate = await self._contest.stream_rate(batched, per_round, window=WINDOW, items=BATCH)
        return figures + rate_figures(section, f"stream, {BATCH} a message", rate, budget=BATCHED[size])

    async def _locate(self, turns: Sequence[Turn]) -> list[Figure]:
        section = "locate (router, over the wire)"
        chosen = self._random.sample(turns, min(DISTINCT, len(turns)))
        requests = [
            encode_locate(turn.query.tenant, turn.query.conversation, ()).SerializeToString() for turn in chosen
        ]
        method = f"/{REGISTRY}/Locate"
        answer = await self._registry.once(method, requests[0])
        if not pb.LocateResponse.FromString(answer).found:
            raise AnswerTooShort("the registry does not locate what it holds")
        scripts = {
            Role.ECHO: self._bytes("Unary", requests, len(answer)),
            Role.REGISTRY: Script(method=method, requests=requests, least_bytes=len(answer) // 2),
        }
        figures = latency_figures(section, "unary", await self._contest.unary_latency(scripts, self._effort.calls))
        rate = await self._contest.unary_rate(scripts, self._effort.many_calls, callers=CALLERS)
        return figures + rate_figures(section, f"unary, {CALLERS} callers", rate)

    async def _scripts(self, method: str, requests: Sequence[bytes], echo: str) -> Scripts:
        """Asks the registry once, teaches the echo its answer, and checks that it was the hit it should be."""
        query = pb.ResolveRequest.FromString(requests[0])
        raw = await self._registry.once(method, requests[0])
        answer = pb.ResolveResponse.FromString(raw)
        expected = len(query.digests) // 16 - NEXT_TURN_STRIDES
        if not answer.HasField("hit") or answer.hit.matched_strides != expected:
            raise AnswerTooShort(f"the registry does not find what it holds: {answer.WhichOneof('answer')}")
        await self._echo.once(f"/{MESSAGES_SERVICE}/Learn", raw)
        least = int(len(raw) * 0.9)
        return {
            Role.ECHO: self._bytes(echo, requests, len(raw)),
            Role.MESSAGES: Script(method=f"/{MESSAGES_SERVICE}/{echo}", requests=requests, least_bytes=least),
            Role.REGISTRY: Script(method=method, requests=requests, least_bytes=least),
        }

    async def _stream_scripts(self, messages: Sequence[bytes], single: Scripts) -> Scripts:
        count = len(pb.ResolveStreamRequest.FromString(messages[0]).requests)
        answer = int(single[Role.REGISTRY].least_bytes / 0.9 + 8) * count
        least = single[Role.REGISTRY].least_bytes * count
        return {
            Role.ECHO: self._bytes("Stream", messages, answer),
            Role.MESSAGES: Script(method=f"/{MESSAGES_SERVICE}/Stream", requests=messages, least_bytes=least),
            Role.REGISTRY: Script(method=f"/{REGISTRY}/ResolveStream", requests=messages, least_bytes=least),
        }

    @staticmethod
    def _bytes(echo: str, requests: Sequence[bytes], answer_bytes: int) -> Script:
        return Script(
            method=f"/{BYTES_SERVICE}/{echo}", requests=echo_of(requests, answer_bytes), least_bytes=answer_bytes
        )


def _one(query: bytes) -> bytes:
    message = pb.ResolveStreamRequest()
    message.requests.add(correlation_id=1).request.ParseFromString(query)
    return message.SerializeToString()
