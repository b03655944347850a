"""`kvlease leases --from-store`: the leases as they are in etcd, without asking a registry.

From flags to settings, and faults, only; what is read and how is in `kvlease.registry.store_dump`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from kvlease.etcd import EtcdError
from kvlease.registry.errors import InvalidRequest
from kvlease.registry.settings import ETCD
from kvlease.registry.store_dump import dump_leases
from kvlease.registry.stores import StoreUnusable, etcd_settings
from kvlease.registry.values import LeaseFilter, LeaseList


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    store: str
    store_prefix: str
    store_ca: str
    store_cert: str
    store_key: str
    store_user: str
    store_password_file: str


async def leases_from_store(options: argparse.Namespace, wanted: LeaseFilter) -> LeaseList:
    """Raises InvalidRequest for flags that cannot be used, RegistryUnavailable."""
    if not options.from_store.startswith(ETCD):
        raise InvalidRequest("--from-store must be etcd://HOST:PORT,HOST:PORT", field="from-store")
    place = _Place(
        store=options.from_store,
        store_prefix=options.store_prefix,
        store_ca=options.store_ca,
        store_cert=options.store_cert,
        store_key=options.store_key,
        store_user=options.store_user,
        store_password_file=options.store_password_file,
    )
    try:
        settings = etcd_settings(place, session_ttl_ms=60_000)
    except EtcdError as error:
        raise InvalidRequest(f"--from-store: {error.message}", field="from-store") from error
    except (StoreUnusable, ValueError) as error:
        raise InvalidRequest(f"--from-store: {error}", field="from-store") from error
    return await dump_leases(settings, wanted)
