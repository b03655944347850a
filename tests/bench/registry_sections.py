"""Everything that is measured against a registry over sockets: starts the servers, fills the registry, runs the parts.

The order is fixed; each part leaves the registry as it found it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from kvlease.registry.client import RegistryClient
from kvlease.registry.clock import SystemClock

from tests.bench.client_bench import ClientBench
from tests.bench.contest import Contestant, Role
from tests.bench.effort import Effort
from tests.bench.figures import Figure
from tests.bench.lenders import Lender
from tests.bench.payloads import TOKENS, Turns, engine
from tests.bench.publish_bench import PublishBench
from tests.bench.resolve_bench import ResolveBench
from tests.bench.served import Program, ProgramFailed
from tests.bench.wire import Wire

LIFE_MS = 3_600_000
"""How long a run may take before its leases lapse."""


async def measure(effort: Effort, seed: int, progress: Callable[[str], None]) -> list[Figure]:
    """Raises ProgramFailed, NotPublished, AnswerTooShort, KvleaseError."""
    async with AsyncExitStack() as stack:
        progress("starting echo and registry")
        echo = await stack.enter_async_context(Program("tests.bench.echo_server"))
        registry = await stack.enter_async_context(Program("tests.bench.registry_server"))
        echo_port, registry_port = await port_of(echo), await port_of(registry)
        echo_wire = await stack.enter_async_context(Wire(echo_port))
        registry_wire = await stack.enter_async_context(Wire(registry_port))
        client = await stack.enter_async_context(RegistryClient(f"127.0.0.1:{registry_port}"))
        contestants = [
            Contestant(role=Role.ECHO, program=echo, wire=echo_wire),
            Contestant(role=Role.MESSAGES, program=echo, wire=echo_wire),
            Contestant(role=Role.REGISTRY, program=registry, wire=registry_wire),
        ]
        deadline_ms = SystemClock().now_ms() + LIFE_MS
        holder = await stack.enter_async_context(Lender(client, engine("lender-holding", seed=seed)))
        publisher = await stack.enter_async_context(Lender(client, engine("lender-publishing", seed=seed + 1)))

        progress(f"publishing {effort.leases} leases of each size")
        turns = Turns(holder.engine, seed=seed, deadline_ms=deadline_ms)
        held = {size: list(turns.many(tokens, effort.leases)) for size, tokens in TOKENS.items()}
        for of_a_size in held.values():
            await holder.publish([turn.publication for turn in of_a_size])

        progress("resolve and locate over the wire")
        figures = await ResolveBench(contestants, effort, seed=seed).run(held)
        progress("resolve by the client")
        figures += await ClientBench(client, echo_wire, effort, seed=seed).run(held)
        progress("publish")
        fresh = Turns(publisher.engine, seed=seed + 1, deadline_ms=deadline_ms)
        return figures + await PublishBench(contestants, client, publisher, fresh, effort).run()


async def port_of(program: Program) -> int:
    """Where it listens. Raises ProgramFailed."""
    said = await program.line()
    port = said.get("port") if isinstance(said, dict) else None
    if not isinstance(port, int):
        raise ProgramFailed(f"a port was expected, not {said!r}")
    return port
