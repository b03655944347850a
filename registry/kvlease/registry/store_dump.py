"""What is in a shared store, read without a registry: for operators whose registries are gone, or not to be believed.

Reads once and writes nothing. The leases are put into a table of their own, so that they are listed as a registry
would list them. Times left are as of the last beats that are in the store: upper bounds.
"""

from __future__ import annotations

from kvlease.etcd import EtcdClient, EtcdError
from kvlease.registry.errors import RegistryUnavailable
from kvlease.registry.etcd_codec import Keys
from kvlease.registry.etcd_reader import EtcdReader
from kvlease.registry.etcd_store import EtcdStoreSettings
from kvlease.registry.table import LeaseTable
from kvlease.registry.values import MAX_PAGE, LeaseFilter, LeaseId, LeaseList, LeaseView


async def dump_leases(settings: EtcdStoreSettings, wanted: LeaseFilter) -> LeaseList:
    """Every lease that matches; the revision is etcd's. Raises RegistryUnavailable, naming the members."""
    keys = Keys(settings.prefix)
    reader = EtcdReader(keys, "nobody")
    revision = 0
    try:
        async with EtcdClient(settings.endpoints, credentials=settings.credentials) as etcd:
            async for page in etcd.pages(keys.prefix):
                revision = revision or page.header.revision
                reader.load(page.kvs)
    except EtcdError as error:
        raise RegistryUnavailable(f"etcd at {', '.join(settings.endpoints)}: {error.message}") from error
    table = LeaseTable()
    table.replace(reader.view(), (), now_ms=0)
    leases: list[LeaseView] = []
    after: LeaseId | None = None
    while True:
        page_of, after = table.list_leases(wanted, after=after, limit=MAX_PAGE, now_ms=0)
        leases.extend(page_of)
        if after is None:
            return LeaseList(revision=revision, leases=tuple(leases))
