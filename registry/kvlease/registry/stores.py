"""Opens the store that the settings name.

No behaviour of its own. etcd's client is loaded only where it is used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from kvlease.etcd import CredentialsInvalid, EtcdCredentials, EtcdError
from kvlease.registry.etcd_store import EtcdStore, EtcdStoreSettings
from kvlease.registry.settings import MEMORY, RegistrySettings, etcd_endpoints
from kvlease.registry.store import MemoryStore, Store


class StoreUnusable(Exception):
    """The store cannot be opened as configured; the message names the setting."""


@asynccontextmanager
async def open_store(settings: RegistrySettings, replica_id: str) -> AsyncIterator[Store]:
    """Open while the context lasts; etcd itself may be away meanwhile. Raises StoreUnusable."""
    if settings.store == MEMORY:
        yield MemoryStore()
        return
    try:
        store = EtcdStore(etcd_settings(settings, session_ttl_ms=settings.session_ttl_ms), replica_id=replica_id)
        await store.__aenter__()
    except EtcdError as error:
        raise StoreUnusable(f"--store {settings.store}: {error.message}") from error
    try:
        yield store
    finally:
        await store.__aexit__(None, None, None)


class StorePlace(Protocol):
    """Where a store is and who we are there: RegistrySettings, or the flags of a command."""

    @property
    def store(self) -> str: ...
    @property
    def store_prefix(self) -> str: ...
    @property
    def store_ca(self) -> str: ...
    @property
    def store_cert(self) -> str: ...
    @property
    def store_key(self) -> str: ...
    @property
    def store_user(self) -> str: ...
    @property
    def store_password_file(self) -> str: ...


def etcd_settings(settings: StorePlace, *, session_ttl_ms: int) -> EtcdStoreSettings:
    """Raises StoreUnusable, EtcdError, ValueError if `store` is not etcd."""
    credentials = EtcdCredentials(
        tls_ca=settings.store_ca,
        tls_cert=settings.store_cert,
        tls_key=settings.store_key,
        user=settings.store_user,
        password_file=settings.store_password_file,
    )
    try:
        credentials.read_password()
    except CredentialsInvalid as error:
        raise StoreUnusable(f"--store-password-file {error.message}") from error
    return EtcdStoreSettings(
        endpoints=etcd_endpoints(settings.store),
        credentials=credentials,
        prefix=settings.store_prefix,
        engine_ttl_s=max(5, -(-session_ttl_ms // 1000)),
    )
