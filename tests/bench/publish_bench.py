"""What a publish costs: beside an echo over the wire, and from a lender's `publish` to the first resolve that finds it.

Every publish is of a new lease; those of a round end before the next, so that the registry stays the same size. The
last part uses the product's client and session, as a connector does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from kvlease.registry.client import RegistryClient
from kvlease.registry.values import Engine, Hit
from kvlease.registry.wire import encode_publication
from kvlease.v1 import registry_pb2 as pb

from tests.bench.contest import Contestant, Outcome, Outcomes, Role, latency_figures, rate_figures
from tests.bench.echo_server import BYTES_SERVICE, MESSAGES_SERVICE
from tests.bench.effort import Effort
from tests.bench.figures import Figure, Unit, at_most, over_rounds, quantile
from tests.bench.lenders import Lender
from tests.bench.payloads import TOKENS, Turn, Turns
from tests.bench.resolve_bench import REGISTRY, echo_of
from tests.bench.wire import BATCH, AnswerTooShort, Script

RESOLVE_MS: Final = 2_000
PUBLISHED_BYTES: Final = 30
"""A result has at least a lease id of 32 characters."""


def publish_messages(engine: Engine, turns: Sequence[Turn], each: int) -> list[bytes]:
    """Publish requests of `each` leases."""
    items = [encode_publication(turn.publication) for turn in turns]
    return [
        pb.PublishRequest(
            engine_id=engine.engine_id, incarnation=engine.incarnation, leases=items[start : start + each]
        ).SerializeToString()
        for start in range(0, len(items), each)
    ]


class PublishBench:
    """Contests and waits about publishes of one lender that holds nothing else."""

    def __init__(
        self, contestants: Sequence[Contestant], client: RegistryClient, lender: Lender, turns: Turns, effort: Effort
    ) -> None:
        self._contestants: Final = contestants
        self._client: Final = client
        self._lender: Final = lender
        self._turns: Final = turns
        self._effort: Final = effort

    async def run(self) -> list[Figure]:
        figures: list[Figure] = []
        for size, tokens in TOKENS.items():
            section = f"publish, {size}-token leases"
            alone = await self._wire(tokens, each=1, callers=1)
            figures += latency_figures(section, "unary, one lease a call", alone)
            batched = await self._wire(tokens, each=BATCH, callers=4)
            figures += rate_figures(section, f"unary, {BATCH} leases a call", batched)
            figures += await self._session(section, tokens)
        return figures

    async def _wire(self, tokens: int, *, each: int, callers: int) -> Outcomes:
        outcomes = {contestant.role: Outcome() for contestant in self._contestants}
        count = self._effort.publishes if each > 1 else self._effort.publishes // 8
        for number in range(self._effort.rounds):
            turns = list(self._turns.many(tokens, count))
            messages = publish_messages(self._lender.engine, turns, each)
            start = number % len(self._contestants)
            for contestant in [*self._contestants[start:], *self._contestants[:start]]:
                script = self._script(contestant.role, messages, each)
                await self._measure(contestant, script, outcomes[contestant.role], each=each, callers=callers)
            await self._client.end_engine(self._lender.engine.engine_id)
        return outcomes

    async def _measure(
        self, contestant: Contestant, script: Script, outcome: Outcome, *, each: int, callers: int
    ) -> None:
        count = len(script.requests)
        if callers == 1:
            samples = await contestant.wire.unary_latencies(script, count)
            outcome.p50_us.append(quantile(samples, 0.5))
            outcome.p99_us.append(quantile(samples, 0.99))
            return
        before_ns = contestant.program.cpu_ns()
        seconds = await contestant.wire.unary_seconds(script, count, callers=callers)
        outcome.cpu_us.append((contestant.program.cpu_ns() - before_ns) / 1e3 / (count * each))
        outcome.per_second.append(count * each / seconds)

    @staticmethod
    def _script(role: Role, messages: Sequence[bytes], each: int) -> Script:
        least = PUBLISHED_BYTES * each
        match role:
            case Role.ECHO:
                answer = (PUBLISHED_BYTES + 8) * each
                return Script(method=f"/{BYTES_SERVICE}/Unary", requests=echo_of(messages, answer), least_bytes=answer)
            case Role.MESSAGES:
                return Script(method=f"/{MESSAGES_SERVICE}/Publish", requests=messages, least_bytes=least)
            case Role.REGISTRY:
                return Script(method=f"/{REGISTRY}/Publish", requests=messages, least_bytes=least)

    async def _session(self, section: str, tokens: int) -> list[Figure]:
        """One after another, from publish to the hit; then all at once, to the last answer."""
        acknowledged: list[float] = []
        visible: list[float] = []
        rates: list[float] = []
        for _ in range(self._effort.rounds):
            turns = list(self._turns.many(tokens, max(4, self._effort.publishes // 16)))
            answered_ms: list[float] = []
            resolved_ms: list[float] = []
            for turn in turns:
                began_ns = time.perf_counter_ns()
                await self._lender.publish([turn.publication])
                answered_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
                answer = await self._client.resolve(turn.query, timeout_ms=RESOLVE_MS)
                resolved_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
                if not isinstance(answer, Hit) or answer.lease_id != turn.publication.lease_id:
                    raise AnswerTooShort(f"a lease that was published is not found: {answer}")
            acknowledged.append(quantile(answered_ms, 0.5))
            visible.append(quantile(resolved_ms, 0.5))
            many = [turn.publication for turn in self._turns.many(tokens, self._effort.publishes)]
            began = time.perf_counter()
            await self._lender.publish(many)
            rates.append(len(many) / (time.perf_counter() - began))
            self._lender.end([*many, *(turn.publication for turn in turns)])
        return [
            over_rounds(section, "session, publish to answer, p50", Unit.MILLISECONDS, acknowledged),
            over_rounds(
                section,
                "session, publish to resolvable, p50",
                Unit.MILLISECONDS,
                visible,
                budget=at_most(5.0),
                note="the resolve that finds it included",
            ),
            over_rounds(section, "session, all at once", Unit.PER_SECOND, rates, note="client's work included"),
        ]
