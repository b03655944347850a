"""Who may come in, put together from the settings: the server's credentials, the gate, the guard, and their files.

No decisions of its own. Without identity there is neither gate nor guard, and a call pays nothing for them.
Invariant: files that cannot be used keep a registry from starting, and never change one that runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import grpc.aio
from kvlease.registry.client_channel import Option
from kvlease.registry.clock import Clock
from kvlease.registry.guard import GuardedService
from kvlease.registry.identity import Rpc
from kvlease.registry.identity_gate import Gate
from kvlease.registry.identity_shares import TenantShares
from kvlease.registry.identity_tls import CertifiedCallers, ServerCertificates
from kvlease.registry.identity_tokens import TokenFile
from kvlease.registry.refusals import Refusals
from kvlease.registry.secret_files import RELOAD_S, FileUnusable
from kvlease.registry.service import RegistryService
from kvlease.registry.settings import RegistrySettings
from kvlease.registry.values import LeaseId, TenantId

AGE_GRACE_MS: Final = 1_000
"""For calls on a connection that has reached its age; streams are opened again by whoever wants them."""

_log = logging.getLogger(__name__)


class Refreshed(Protocol):
    """What is read from files."""

    def refresh(self) -> bool:
        """Read again what changed; whether anything did. Raises FileUnusable."""
        ...


class Access:
    """One server's answer to who may come in. `open` it before anything else is asked of it."""

    def __init__(self, settings: RegistrySettings, clock: Clock) -> None:
        self._certificates: Final = (
            ServerCertificates(
                Path(settings.tls_cert), Path(settings.tls_key), Path(settings.tls_ca) if settings.tls_ca else None
            )
            if settings.tls_cert
            else None
        )
        self._tokens: Final = TokenFile(Path(settings.token_file)) if settings.token_file else None
        self._age_ms: Final = settings.connection_age_ms
        self._refusals: Final = Refusals(clock)
        source = self._tokens if self._tokens is not None else CertifiedCallers() if settings.tls_ca else None
        shares = {
            Rpc.WATCH: TenantShares("max_watchers", settings.max_watchers),
            Rpc.RESOLVE_STREAM: TenantShares("max_resolve_streams", settings.max_resolve_streams),
        }
        self.gate: Final = Gate(source, self._refusals, shares) if source is not None else None
        """None: everybody may come in, and do anything."""

    def __str__(self) -> str:
        transport = "encrypted" if self._certificates is not None else "not encrypted"
        if self.gate is None:
            return f"{transport}, callers need not say who they are"
        return f"{transport}, callers are known by {'certificate' if self._tokens is None else 'token'}"

    @property
    def options(self) -> tuple[Option, ...]:
        """For gRPC: a certificate is looked at when a connection opens, so no connection lasts for ever."""
        if self._certificates is None or self.gate is None:
            return ()
        return (("grpc.max_connection_age_ms", self._age_ms), ("grpc.max_connection_age_grace_ms", AGE_GRACE_MS))

    def add_port(self, server: grpc.aio.Server, listen: str) -> int:
        """Let `server` listen, with TLS if there is a certificate; the port. Raises RuntimeError, as grpc does."""
        if self._certificates is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, self._certificates.credentials())

    async def open(self) -> None:
        """Read all files. Raises FileUnusable."""
        for files in self._files():
            await asyncio.to_thread(files.refresh)

    async def keep(self) -> None:
        """Read files again when they change, until cancelled. Streams of callers that are no more are ended."""
        faults: dict[Refreshed, str] = {}
        while self._files():
            await asyncio.sleep(RELOAD_S)
            for files in self._files():
                try:
                    changed = await asyncio.to_thread(files.refresh)
                except FileUnusable as error:
                    if faults.get(files) != str(error):
                        _log.error("what was read before stays in force: %s", error)
                    faults[files] = str(error)
                    continue
                faults.pop(files, None)
                if changed:
                    ended = self.gate.review() if self.gate is not None else 0
                    _log.info("identity files were read again; %d streams ended", ended)

    def guard(self, service: RegistryService, owner: Callable[[LeaseId], TenantId | None]) -> RegistryService:
        """`service` for callers that are known; as it is if nobody need be."""
        return service if self.gate is None else GuardedService(service, self._refusals, owner)

    def _files(self) -> list[Refreshed]:
        return [x for x in (self._certificates, self._tokens) if x is not None]
