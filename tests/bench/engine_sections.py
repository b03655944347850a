"""What is measured in processes with an engine's libraries: the connector's hooks on vLLM's block pool, and
seals over NIXL.

Starts those programs beside a registry or a lender, and takes their figures. Imports neither vLLM nor NIXL.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from tests.bench.effort import QUICK, Effort
from tests.bench.figures import Figure, decode
from tests.bench.registry_sections import port_of
from tests.bench.served import Program

SILENCE_S: Final = 180.0
TRANSPORTS: Final = {"sm": "sm,tcp,self", "tcp": "tcp,self"}
"""UCX_TLS for each way to a lender: the same host's memory, and the network."""


async def connector(effort: Effort, progress: Callable[[str], None]) -> list[Figure]:
    """Raises ProgramFailed, FigureInvalid."""
    progress("connector: starting a registry, importing vLLM")
    async with Program("tests.bench.registry_server") as registry:
        endpoint = f"127.0.0.1:{await port_of(registry)}"
        async with Program("tests.bench.engine_steps", endpoint, _named(effort)) as program:
            return [decode(said) async for said in program.lines(timeout_s=SILENCE_S)]


async def seals(effort: Effort, progress: Callable[[str], None]) -> list[Figure]:
    """Raises ProgramFailed, FigureInvalid."""
    figures: list[Figure] = []
    for name, transports in TRANSPORTS.items():
        progress(f"seals over {name}")
        environment = {"UCX_TLS": transports, "UCX_LOG_LEVEL": "error"}
        async with Program("tests.bench.seal_lender", environment=environment) as lender:
            where = json.dumps(await lender.line())
            async with Program("tests.bench.seal_reads", where, _named(effort), environment=environment) as program:
                figures += [decode(said) async for said in program.lines(timeout_s=SILENCE_S)]
    return figures


def _named(effort: Effort) -> str:
    return "quick" if effort is QUICK else "full"
