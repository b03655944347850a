"""A whole fleet on loopback: engines, registry and router as real processes, started together and stopped together.

`Fleet` is for tests and the demo; `python -m tests.engines.fleet up|down` keeps one running for work by hand
(`fleet_cli.py`). Invariant: leaving `async with Fleet(...)` by any way ends every process it started. All ports are
free ones of loopback, so fleets can run side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import aiohttp

from tests.engines import leaks
from tests.engines.children import Child, ChildSettings, python_module
from tests.engines.engine import EngineSettings, Json, Role, engine_command, engine_environment
from tests.engines.model import CACHE, model_dir
from tests.engines.openai_client import OpenAIClient, RefusedTurn
from tests.ports import free_ports

READY_TIMEOUT_S: Final = 600.0
"""Two engines, registry and router need 25-60 s on two cores; a busy machine needs much more."""
PROBE_TIMEOUT_S: Final = 2.0
REGISTRY: Final = "registry"
ROUTER: Final = "router"

Progress = Callable[[str, str], None]
"""Called with the name of a process and what it is doing now."""


def silent(_name: str, _state: str) -> None:
    """Progress for those who do not care."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Which processes make up the fleet."""

    engines: Sequence[EngineSettings]
    registry: bool = True
    router: bool = True
    registry_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    otlp_endpoint: str | None = None
    """http://host:port of an OTLP gRPC receiver that all processes export spans to."""
    log_dir: Path = field(default_factory=lambda: CACHE / "fleet" / f"run-{secrets.token_hex(4)}")
    ready_timeout_s: float = READY_TIMEOUT_S

    def __post_init__(self) -> None:
        names = [engine.engine_id for engine in self.engines]
        if len({*names, REGISTRY, ROUTER}) != len(names) + 2:
            raise ValueError(f"engine ids must differ and not be {REGISTRY!r} or {ROUTER!r}: {names}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where one engine listens."""

    port: int
    side_channel_port: int

    @property
    def url(self) -> str:
        """Base URL of its HTTP API, without /v1."""
        return f"http://127.0.0.1:{self.port}"


def one_prefill_one_decode(
    *,
    kvlease: Mapping[str, Json] | None,
    prefill_prefix_caching: bool = True,
    decode_kv_blocks: int | None = None,
    shutdown_timeout_s: int = 0,
) -> tuple[EngineSettings, EngineSettings]:
    """The smallest fleet, 1P1D, with engine ids that no other fleet has. `kvlease=None` runs the stock connector."""
    unique = secrets.token_hex(3)
    return (
        EngineSettings(
            engine_id=f"prefill-{unique}",
            role=Role.PREFILL,
            kvlease=kvlease,
            prefix_caching=prefill_prefix_caching,
            shutdown_timeout_s=shutdown_timeout_s,
        ),
        EngineSettings(
            engine_id=f"decode-{unique}",
            role=Role.DECODE,
            kvlease=kvlease,
            kv_blocks=decode_kv_blocks,
            shutdown_timeout_s=shutdown_timeout_s,
        ),
    )


class Fleet:
    """Starts everything on `async with`; names are engine ids, "registry" and "router"."""

    def __init__(self, settings: FleetSettings, progress: Progress = silent) -> None:
        self.settings = settings
        self._progress = progress
        self._children: dict[str, Child] = {}
        self._engines = {engine.engine_id: engine for engine in settings.engines}
        self._addresses: dict[str, Address] = {}
        self._registry_ports: tuple[int, int] = (0, 0)
        self._router_port = 0
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._progress("model", "making")
        await asyncio.to_thread(model_dir)
        self._progress("model", "ready")
        ports = free_ports(3 + 2 * len(self._engines))
        self._registry_ports, self._router_port = (ports[0], ports[1]), ports[2]
        for engine_id, port, side in zip(self._engines, ports[3::2], ports[4::2], strict=True):
            self._addresses[engine_id] = Address(port=port, side_channel_port=side)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S))
        try:
            async with asyncio.TaskGroup() as group:
                for name in self.names:
                    group.create_task(self.start(name))
        except BaseException as error:
            await self._stop_all()
            raise _first_failure(error) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and leaks.ON:
                await leaks.judge(self)
        finally:
            await self._stop_all()

    @property
    def engine_ids(self) -> tuple[str, ...]:
        return tuple(self._engines)

    @property
    def names(self) -> tuple[str, ...]:
        """Every process of the fleet."""
        optional = [(REGISTRY, self.settings.registry), (ROUTER, self.settings.router)]
        return (*(name for name, wanted in optional if wanted), *self._engines)

    @property
    def registry_endpoint(self) -> str | None:
        """host:port of the registry's gRPC service; None if the fleet has none."""
        return f"127.0.0.1:{self._registry_ports[0]}" if self.settings.registry else None

    @property
    def registry_metrics_url(self) -> str:
        return f"http://127.0.0.1:{self._registry_ports[1]}/metrics"

    @property
    def router_url(self) -> str:
        """Base URL of the router's HTTP API, without /v1."""
        return f"http://127.0.0.1:{self._router_port}"

    def ids(self, role: Role) -> tuple[str, ...]:
        """Engine ids of one role, in the order of the settings."""
        return tuple(engine.engine_id for engine in self._engines.values() if engine.role is role)

    def engine_url(self, engine_id: str) -> str:
        """Base URL of an engine's HTTP API, without /v1."""
        return self._addresses[engine_id].url

    @property
    def prefill_url(self) -> str:
        """Of the first prefill engine."""
        return self.engine_url(self.ids(Role.PREFILL)[0])

    @property
    def decode_url(self) -> str:
        """Of the first decode engine."""
        return self.engine_url(self.ids(Role.DECODE)[0])

    def child(self, name: str) -> Child:
        """The process behind a name, to signal it or to read its log."""
        return self._children[name]

    def log(self, name: str) -> Path:
        return self.settings.log_dir / f"{name}.log"

    async def start(self, name: str) -> None:
        """Start a process and wait until it serves; also after `stop`, on the same ports. Raises ChildFailed."""
        settings = ChildSettings(
            name=name,
            command=self._command(name),
            log=self.log(name),
            env={**self._tracing(name), **self._environment(name)},
            cores=self._engines[name].cores if name in self._engines else None,
        )
        self._progress(name, "starting")
        child = self._children[name] = await Child.start(settings)
        started = time.monotonic()
        await child.ready(lambda: self._serves(name), self.settings.ready_timeout_s)
        if name in self._engines:
            self._progress(name, "warming up")
            await self._warm_up(name)
        self._progress(name, f"ready after {time.monotonic() - started:.0f} s")

    async def _warm_up(self, name: str) -> None:
        """The first request compiles kernels, for seconds. Shorter than a stride, so nothing is lent for it."""
        async with OpenAIClient(self.engine_url(name)) as client:
            try:
                await client.complete("one two three", max_tokens=2)
            except (aiohttp.ClientError, RefusedTurn, TimeoutError) as error:
                raise self._children[name].failure(f"refused its first request ({error})") from error

    async def stop(self, name: str) -> None:
        """Stop one process in good order."""
        self._progress(name, "stopping")
        await self._children[name].stop()
        self._progress(name, "stopped")

    def _command(self, name: str) -> tuple[str, ...]:
        if name == REGISTRY:
            grpc, metrics = self._registry_ports
            listen = ("--listen", f"127.0.0.1:{grpc}", "--metrics-listen", f"127.0.0.1:{metrics}")
            return python_module("kvlease.cli", "registry", *listen, *self.settings.registry_args)
        if name == ROUTER:
            targets: list[str] = []
            for engine_id in self.ids(Role.PREFILL):
                targets += ["--prefill", self.engine_url(engine_id)]
            for engine_id in self.ids(Role.DECODE):
                targets += ["--decode", f"{engine_id}@{self.engine_url(engine_id)}"]
            listen = ("--listen", f"127.0.0.1:{self._router_port}", "--registry", self.registry_endpoint or "none")
            return python_module("kvlease.cli", "router", *listen, *targets, *self.settings.router_args)
        return engine_command(self._engines[name], port=self._addresses[name].port, registry=self.registry_endpoint)

    def _environment(self, name: str) -> Mapping[str, str]:
        if name not in self._engines:
            return {}
        return engine_environment(self._engines[name], side_channel_port=self._addresses[name].side_channel_port)

    def _tracing(self, name: str) -> Mapping[str, str]:
        if self.settings.otlp_endpoint is None:
            return {"OTEL_SDK_DISABLED": "true"}
        return {
            "OTEL_SERVICE_NAME": name,
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.settings.otlp_endpoint,
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }

    async def _serves(self, name: str) -> bool:
        if name == REGISTRY:
            return await _accepts(self._registry_ports[0])
        url = self.router_url if name == ROUTER else self.engine_url(name)
        assert self._http is not None
        try:
            async with self._http.get(f"{url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _stop_all(self) -> None:
        """The router first, so that no turn is in flight; the registry last, so that lenders can say goodbye."""
        if self._http is not None:
            await self._http.close()
        for names in ([ROUTER], list(self._engines), [REGISTRY]):
            children = [self._children[name] for name in names if name in self._children]
            await asyncio.gather(*(child.stop() for child in children))


async def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        _, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), PROBE_TIMEOUT_S)
        writer.close()
        return True
    return False


def _first_failure(error: BaseException) -> BaseException:
    """The reason behind a TaskGroup's group: the one thing a reader wants to see."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def until(condition: Callable[[], bool], timeout_s: float, poll_s: float = 0.05) -> None:
    """Wait for a condition that nobody announces. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s")
        await asyncio.sleep(poll_s)


if __name__ == "__main__":
    from tests.engines.fleet_cli import main

    raise SystemExit(main())
