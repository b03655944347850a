"""A router as one object: everything opened in order, and closed in the opposite one.

Order of closing: no new connections; /health says 503; turns in flight end; those that have not after
`drain_timeout_ms` are broken off with an error; the feed of the lease copy, probes and background work end; connections
to engines and to the registry close.

Constructing does no I/O; `async with` opens and closes. Enter and leave it in the same task.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Self

from aiohttp import web
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_channel import ClientLimits
from kvlease.registry.clock import Clock, SystemClock
from kvlease.registry.flags import split_address
from kvlease.registry.lease_copy import LeaseCopy
from kvlease.registry.lease_copy_feed import LIST_PAGE, LeaseCopyFeed
from kvlease.registry.values import LeaseFilter
from kvlease.router.app import Connection, RouterApp
from kvlease.router.background import Background
from kvlease.router.drain import Drain
from kvlease.router.health import Probes
from kvlease.router.leases import Leases
from kvlease.router.legs import Legs
from kvlease.router.metrics import RouterMetrics
from kvlease.router.routes import Routes
from kvlease.router.settings import RouterSettings
from kvlease.router.turns import Turns
from kvlease.router.upstream import Upstream
from opentelemetry.trace import NoOpTracerProvider, Tracer

_LOG: Final = logging.getLogger(__name__)
_MAX_HEADER_BYTES: Final = 64 * 1024
"""Of one header of a request. Engines take as much; aiohttp's own 8 KiB are too few for some identity tokens."""

_LAST_WORDS_S: Final = 0.5
"""For answers to turns that were broken off, after `drain_timeout_ms`; aiohttp waits twice as long."""


class StartError(Exception):
    """The router cannot start; the message says what to change."""


class RouterServer:
    """Serves turns while open. `tracer` None: no traces."""

    def __init__(self, settings: RouterSettings, *, tracer: Tracer | None = None, clock: Clock | None = None) -> None:
        self._settings = settings
        self._tracer = tracer if tracer is not None else NoOpTracerProvider().get_tracer("kvlease")
        self._clock = clock if clock is not None else SystemClock()
        self._stack = AsyncExitStack()
        self.routes: Final = Routes(settings.targets(), cooldown_ms=settings.cooldown_ms)
        self.copy: Final = LeaseCopy(limit=settings.max_copied_leases)
        self.metrics: Final = RouterMetrics(self.routes, self.copy, self._clock)
        self.host = ""
        self.port = 0

    async def __aenter__(self) -> Self:
        """Raises StartError."""
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _open(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        client: RegistryClient | None = None
        if settings.leases:
            # Twice what the copy holds, so that a list that is too long is found to be that.
            limits = ClientLimits(max_pages=2 * settings.max_copied_leases // LIST_PAGE + 1)
            client = RegistryClient(settings.registry, credentials=settings.credentials, limits=limits)
            await stack.enter_async_context(client)
            self.metrics.follow(client)
        upstream = await stack.enter_async_context(Upstream(connect_timeout_ms=settings.connect_timeout_ms))
        group = await asyncio.TaskGroup().__aenter__()
        # An error of the caller is not the group's: it passes as it is, not inside an ExceptionGroup.
        stack.push_async_callback(group.__aexit__, None, None, None)
        leases = Leases(
            client,
            self.metrics,
            self.copy,
            self._clock,
            tenant=settings.tenant_id,
            copy_staleness_ms=settings.copy_staleness_ms,
            locate_timeout_ms=settings.locate_timeout_ms,
            call_timeout_ms=settings.registry_timeout_ms,
        )
        probes = Probes(
            self.routes,
            upstream,
            leases,
            interval_ms=settings.health_interval_ms,
            timeout_ms=settings.health_timeout_ms,
        )
        background = Background(group)
        stack.callback(background.cancel)
        stack.callback(group.create_task(probes.run()).cancel)
        if client is not None and settings.copy_staleness_ms:
            feed = LeaseCopyFeed(client, self.copy, clock=self._clock, selection=LeaseFilter(tenant=settings.tenant_id))
            background.start(feed.run())  # guarded: a router without a copy asks the registry
        legs = Legs(
            settings=settings,
            routes=self.routes,
            upstream=upstream,
            leases=leases,
            metrics=self.metrics,
            background=background,
            tracer=self._tracer,
            clock=self._clock,
        )
        drain = Drain(timeout_ms=settings.drain_timeout_ms)
        turns = Turns(
            settings=settings,
            routes=self.routes,
            leases=leases,
            legs=legs,
            metrics=self.metrics,
            background=background,
            drain=drain,
            tracer=self._tracer,
            clock=self._clock,
        )
        app = RouterApp(
            settings=settings,
            routes=self.routes,
            upstream=upstream,
            leases=leases,
            metrics=self.metrics,
            probes=probes,
            turns=turns,
            drain=drain,
            clock=self._clock,
        )
        await self._serve(stack, app)

    async def _serve(self, stack: AsyncExitStack, app: RouterApp) -> None:
        runner = web.AppRunner(
            app.build(),
            handler_cancellation=True,  # a client that leaves cancels its turn, and so the engines' work
            shutdown_timeout=_LAST_WORDS_S,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        server, loop = runner.server, asyncio.get_running_loop()
        assert server is not None
        host, port = split_address(self._settings.listen)
        try:
            listener = await loop.create_server(
                lambda: Connection(server, loop=loop, max_header_bytes=_MAX_HEADER_BYTES), host, port
            )
        except OSError as error:
            unknown = isinstance(error, socket.gaierror)  # its numbers are not those of errno
            said = "this name cannot be looked up" if unknown else os.strerror(error.errno or 0)
            raise StartError(f"--listen {self._settings.listen}: {said}") from error
        stack.callback(listener.close)
        self.host, self.port = listener.sockets[0].getsockname()[:2]
        _LOG.info("router serves on %s:%d", self.host, self.port)
