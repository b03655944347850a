"""A registry that is listening: shell, gRPC edge, health, reflection, metrics and traces put together and taken down.

No behaviour of its own but the order of starting and stopping. `async with RegistryServer(settings) as server` serves
until the block ends; then it shuts down in good order, within SHUTDOWN_S.
Shutdown order: health says NOT_SERVING; no new sessions and watches end; lenders are told to connect elsewhere and
given DRAIN_S; calls in flight get GRACE_S; then identity, load probe, gauges, shell, metrics endpoint, traces.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, NoReturn, Self

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from kvlease.registry.access import Access
from kvlease.registry.calls import CallInterceptor
from kvlease.registry.client_channel import SERVER_OPTIONS
from kvlease.registry.clock import Clock, SystemClock
from kvlease.registry.flags import split_address
from kvlease.registry.instruments import CallMetrics, CountingService, CountingStore, LeaseGauges
from kvlease.registry.load_probe import feel_load
from kvlease.registry.overload import Overload
from kvlease.registry.secret_files import FileUnusable
from kvlease.registry.service import RegistryService
from kvlease.registry.servicer import SERVICE, RegistryServicer, add_to_server
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.shell import RegistryShell
from kvlease.registry.store import Store
from kvlease.registry.stores import StoreUnusable, open_store
from kvlease.registry.table import LeaseTable
from kvlease.registry.telemetry import configure_tracing, serve_metrics
from kvlease.registry.tracing import TracedService
from kvlease.v1 import registry_pb2 as pb
from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry

SHUTDOWN_S: Final = 5.0
DRAIN_S: Final = 1.0
"""For lenders to leave; they need a few milliseconds."""
GRACE_S: Final = 0.5
"""For calls in flight; the longest, a renewal, is refused by then."""
GAUGES_S: Final = 1.0
"""Between two looks at how things stand."""
REVISION_BITS: Final = 48
"""A registry starts counting its events at a random number of so many bits, so that a watcher from before a restart is
told to list again. Fewer than 53, so that JSON readers keep them exact."""

_log = logging.getLogger(__name__)


class StartError(Exception):
    """The registry cannot start; the message says what to change."""


class RegistryServer:
    """One registry on one address. Not reusable: a second start is a second server."""

    def __init__(self, settings: RegistrySettings, *, store: Store | None = None, clock: Clock | None = None) -> None:
        """`store` (open) and `clock` are the ones that the settings say, and the machine's, unless given. No I/O."""
        self._settings: Final = settings
        self._store: Final = store
        self._clock: Final = clock if clock is not None else SystemClock()
        self.replica_id: Final = settings.replica_id or f"registry-{secrets.token_hex(4)}"
        self.metrics: Final = CollectorRegistry()
        self.port = 0
        """Where gRPC is served, once started."""
        self.metrics_port: int | None = None
        """Where Prometheus is served; None if it is switched off."""
        self._stack: Final = AsyncExitStack()

    @property
    def endpoint(self) -> str:
        """HOST:PORT to connect to."""
        return f"{self._settings.listen.rpartition(':')[0]}:{self.port}"

    async def __aenter__(self) -> Self:
        """Raises StartError."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack.push_async_exit(stack.pop_all().__aexit__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        _log.info("registry %s stopped", self.replica_id)

    async def _start(self, stack: AsyncExitStack) -> None:
        """What is pushed here last is taken down first."""
        settings = self._settings
        tracing = configure_tracing("kvlease-registry", otlp_endpoint=settings.otlp_endpoint)
        stack.push_async_callback(asyncio.to_thread, tracing.close)
        traced = not isinstance(tracing.tracer, NoOpTracer)
        if settings.metrics_listen != NO_METRICS:
            host, port = split_address(settings.metrics_listen)
            try:
                endpoint = serve_metrics(self.metrics, host=host, port=port)
            except OSError as error:
                raise StartError(
                    f"--metrics-listen {settings.metrics_listen}: {error.strerror or error}. "
                    "Is another registry running here? Give another port, or none"
                ) from error
            self.metrics_port = endpoint.port
            stack.push_async_callback(asyncio.to_thread, endpoint.close)
        access = Access(settings, self._clock)
        try:
            await access.open()
        except FileUnusable as error:
            raise StartError(str(error)) from error
        calls = CallInterceptor(SERVICE, CallMetrics(self.metrics), join_traces=traced, gate=access.gate)
        # Without so_reuseport, or a second registry would share the port unnoticed.
        options = (*SERVER_OPTIONS, *access.options, ("grpc.so_reuseport", 0))
        server = grpc.aio.server(interceptors=[calls], options=options)
        try:
            self.port = access.add_port(server, settings.listen)
        except RuntimeError as error:
            raise StartError(f"--listen {settings.listen}: the address cannot be used (taken, or not ours)") from error

        table = LeaseTable(settings.table_limits(), revision=1 + secrets.randbits(REVISION_BITS))
        try:
            opened = self._store
            if opened is None:
                opened = await stack.enter_async_context(open_store(settings, self.replica_id))
        except StoreUnusable as error:
            raise StartError(str(error)) from error
        store = CountingStore(opened, self.metrics)
        health_changes: asyncio.Queue[bool] = asyncio.Queue()
        shell = await stack.enter_async_context(
            RegistryShell(
                table,
                store,
                self._clock,
                max_watchers=settings.max_watchers,
                keep_events=settings.keep_events,
                max_staleness_ms=settings.max_staleness_ms,
                on_touch=health_changes.put_nowait,
            )
        )
        gauges = LeaseGauges(shell, self.metrics)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        overload = Overload(limit_ms=settings.shed_above_lag_ms)
        stack.callback(tasks.create_task(_refresh(gauges), name="kvlease gauges").cancel)
        stack.callback(tasks.create_task(feel_load(overload), name="kvlease load").cancel)
        stack.callback(tasks.create_task(access.keep(), name="kvlease identity").cancel)

        counting = CountingService(access.guard(shell, shell.owner), self.metrics)
        service: RegistryService = counting
        if traced:
            service = TracedService(service, tracing.tracer)
        welcome = pb.Welcome(
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            suspect_after_ms=settings.suspect_after_ms,
            session_ttl_ms=settings.session_ttl_ms,
            replica_id=self.replica_id,
        )
        servicer = RegistryServicer(
            service,
            welcome=welcome,
            max_resolve_streams=settings.max_resolve_streams,
            overload=overload,
            on_shed=counting.shed,
        )
        add_to_server(servicer, server)
        health_servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await server.start()
        stack.push_async_callback(_stop, server, health_servicer, shell)
        if not store.shared:
            health_changes.put_nowait(True)
        stack.callback(tasks.create_task(_report(health_servicer, health_changes), name="kvlease health").cancel)
        _log.info("registry %s serves on %s, %s", self.replica_id, self.endpoint, access)


async def _stop(server: grpc.aio.Server, health_servicer: health.aio.HealthServicer, shell: RegistryShell) -> None:
    await health_servicer.enter_graceful_shutdown()
    shell.go_away()
    if not await shell.all_left(wait_s=DRAIN_S):
        _log.info("%d sessions are still open; their lenders will find out", shell.sessions)
    await server.stop(GRACE_S)


async def _report(health_servicer: health.aio.HealthServicer, changes: asyncio.Queue[bool]) -> NoReturn:
    """Health is whether the store answers: clients, load balancers and probes then know which replica to use."""
    states = health_pb2.HealthCheckResponse
    while True:
        answers = await changes.get()
        await health_servicer.set(SERVICE, states.SERVING if answers else states.NOT_SERVING)


async def _refresh(gauges: LeaseGauges) -> NoReturn:
    while True:
        await asyncio.sleep(GAUGES_S)
        gauges.refresh()
