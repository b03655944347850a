"""The fleet of a soak: its settings, its metrics, and the checks between disturbances.

`recovered` plays a short chat of its own while nobody else asks, and sees whether its second turn was borrowed;
`emptied` ends all leases and waits until every engine's blocks are free. Invariant: both leave the fleet as it was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
from kvlease.registry.client import RegistryClient
from kvlease.registry.errors import KvleaseError
from kvlease.registry.values import DEFAULT_TENANT

from tests.engines.engine import EngineSettings, Json, Role
from tests.engines.fleet import REGISTRY, Fleet, FleetSettings
from tests.engines.model import MODEL_NAME
from tests.ports import free_ports
from tests.soak.answers import ask
from tests.soak.chats import Step
from tests.soak.counters import Counters, scrape
from tests.soak.judge import Fault, Judge
from tests.soak.players import CONVERSATION, ERRORS, Gate

MAX_MODEL_LEN: Final = 8_192
SHUTDOWN_S: Final = 10
"""With vLLM's own 0 a terminated engine hangs with its streams for ever, stock or not."""
EMPTY_TIMEOUT_S: Final = 90.0
"""A prefill that nobody fetches is kept for 30 s by vLLM itself."""
USAGE: Final = "vllm:kv_cache_usage_perc"
REUSED: Final = "kvlease_borrower_reused_tokens_total"
BETWEEN_TURNS_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of the soak with a fleet of its own."""

    name: str
    prefills: int
    transports: str
    kvlease: dict[str, Json]
    decode_blocks: int | None


PHASES: Final[Sequence[Phase]] = (
    Phase(
        name="1P1D",
        prefills=1,
        transports="tcp,self",
        kvlease={"lease_ttl_ms": 120_000},
        decode_blocks=800,
    ),
    Phase(name="2P1D", prefills=2, transports="sm,tcp,self", kvlease={"mode": "elastic"}, decode_blocks=None),
)


class Scene:
    """A running fleet of one phase, its metrics and its judge."""

    def __init__(
        self, fleet: Fleet, phase: Phase, http: aiohttp.ClientSession, counters: Counters, judge: Judge
    ) -> None:
        self.fleet = fleet
        self.phase = phase
        self.http = http
        self.counters = counters
        self.judge = judge
        self.gate = Gate()

    @property
    def engines(self) -> tuple[str, ...]:
        return (*self.fleet.ids(Role.PREFILL), *self.fleet.ids(Role.DECODE))

    async def recovered(self, probe: Sequence[Step], after: str) -> None:
        """The second turn of a new chat borrows; while it is played nobody else asks."""
        async with self.gate.closed():
            salt, conversation, reused = secrets.token_hex(8), secrets.token_hex(8), list[float]()
            for step in probe:
                await self.counters.update()
                before, began_s = self.counters.total(REUSED), time.monotonic()
                url, body = self.fleet.router_url + step.path, {**step.body, "cache_salt": salt}
                try:
                    said = await ask(self.http, url, body, {CONVERSATION: conversation})
                except ERRORS as error:
                    what = f"probe after {after}: {type(error).__name__} {error}"
                    self.judge.failed(began_s, time.monotonic(), what)
                    continue
                self.judge.answered(step, said, time.monotonic() - began_s, f"probe after {after}")
                await self.counters.update()
                reused.append(self.counters.total(REUSED) - before)
                await asyncio.sleep(BETWEEN_TURNS_S)
            self.judge.probed(reused, after)

    async def emptied(self, when: str) -> float:
        """Once all leases have ended, every block is free; returns the seconds that took."""
        endpoint = self.fleet.registry_endpoint
        assert endpoint is not None
        async with self.gate.closed():
            began_s = time.monotonic()
            held = await self._held()
            self.judge.saw_blocks_held |= bool(held)
            while time.monotonic() - began_s < EMPTY_TIMEOUT_S:
                try:
                    async with RegistryClient(endpoint) as client:
                        await client.end_tenant(DEFAULT_TENANT, timeout_ms=5_000)
                except KvleaseError as error:
                    held = {f"registry: {type(error).__name__}": 1}
                    await asyncio.sleep(1)
                    continue
                held = await self._held()
                if not held:
                    self.judge.counts["times all blocks were free"] += 1
                    return time.monotonic() - began_s
                await asyncio.sleep(1)
            self.judge.fault(Fault.LEAK, f"{when}: still held after {EMPTY_TIMEOUT_S:.0f} s: {held}")
            return time.monotonic() - began_s

    async def _held(self) -> dict[str, float]:
        """What is not free, by process and metric. Engines act in their next step, so each gets one."""
        held: dict[str, float] = {}
        for name in self.engines:
            url = self.fleet.engine_url(name)
            try:
                await ask(self.http, f"{url}/v1/completions", {"model": MODEL_NAME, "prompt": "one", "max_tokens": 2})
            except ERRORS as error:
                held[f"{name}: {type(error).__name__}"] = 1
                continue
            page = await scrape(self.http, f"{url}/metrics")
            usage = [value for key, value in page.items() if key.partition("{")[0] == USAGE]
            held |= {f"{name} {USAGE}": value for value in usage if value} if usage else {f"{name} no {USAGE}": 1}
        await self.counters.update()
        for metric in ("kvlease_borrower_quarantined_blocks", "kvlease_lender_leased_blocks"):
            held |= {f"{name} {metric}": value for name, value in self.counters.now(metric).items() if value}
        return held


def fleet_settings(phase: Phase, ports: Sequence[int], unique: str) -> FleetSettings:
    """`ports`: for the metrics of each engine's connector, prefill engines first."""
    engines = []
    for number, port in enumerate(ports):
        role = Role.PREFILL if number < phase.prefills else Role.DECODE
        engines.append(
            EngineSettings(
                engine_id=f"{role}{number}-{unique}",
                role=role,
                kvlease={**phase.kvlease, "resolve_wait_ms": 1_000, "metrics": f"127.0.0.1:{port}"},
                kv_blocks=phase.decode_blocks if role is Role.DECODE else None,
                max_model_len=MAX_MODEL_LEN,
                prefix_caching=role is Role.DECODE or number == 1,
                transports=phase.transports,
                shutdown_timeout_s=SHUTDOWN_S,
                env={"VLLM_SERVER_DEV_MODE": "1"},
            )
        )
    return FleetSettings(engines=engines, router_args=("--locate-timeout-ms", "1000"))


def metric_pages(fleet: Fleet, ports: Sequence[int]) -> dict[str, str]:
    """Where each process shows its metrics."""
    names = (*fleet.ids(Role.PREFILL), *fleet.ids(Role.DECODE))
    pages = {name: f"http://127.0.0.1:{port}/metrics" for name, port in zip(names, ports, strict=True)}
    return {**pages, "router": f"{fleet.router_url}/metrics", REGISTRY: fleet.registry_metrics_url}


def connector_ports(phase: Phase) -> list[int]:
    return free_ports(phase.prefills + 1)


def chosen(phases: str) -> list[Phase]:
    """Phases by name, with commas between. Raises ValueError."""
    known = {phase.name: phase for phase in PHASES}
    unknown = [name for name in phases.split(",") if name not in known]
    if unknown:
        raise ValueError(f"unknown phases {unknown}; there are {sorted(known)}")
    return [dataclasses.replace(known[name]) for name in phases.split(",")]
