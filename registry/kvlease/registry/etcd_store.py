"""The store for several registries: etcd. One replica's end of it, as `store.py` asks for.

Asyncio, on `kvlease.etcd`; what values look like is in `etcd_codec.py`, what a commit becomes in `etcd_batches.py`.
Engines and their leases hang on one etcd lease for each incarnation, which its home keeps alive: what nobody keeps goes
by itself, and nothing else is decided by it. Every transaction writes this replica's own batch key and compares how
often it was written, so it happens once however often it is sent.
Shutdown order: lease keeper, client. Nothing is revoked: lenders come back through another replica within its time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from types import TracebackType
from typing import Final, Self

from kvlease.etcd import (
    Compacted as EtcdCompacted,
)
from kvlease.etcd import (
    Compare,
    Doubtful,
    EtcdClient,
    EtcdCredentials,
    EtcdError,
    Header,
    HistoryChanged,
    LeaseExists,
    LeaseKeeper,
    LeaseNotFound,
    LostLease,
    Target,
    Unavailable,
    Watch,
)
from kvlease.etcd import (
    LeaseGrant as EtcdGrant,
)
from kvlease.etcd import (
    LeaseId as EtcdLeaseId,
)
from kvlease.registry.errors import Compacted, RegistryUnavailable
from kvlease.registry.etcd_batches import Owner, Parcel, Unfinished, own_batch_key
from kvlease.registry.etcd_codec import Keys, encode_beats, transaction_of
from kvlease.registry.etcd_reader import EtcdReader
from kvlease.registry.store import Followed
from kvlease.registry.table_changes import Batch, EngineBeat, EngineGone, EnginePut, StoreChange
from kvlease.registry.values import EngineId, Incarnation

REPLICA_TTL_S: Final = 30
"""After a replica is gone, its own keys go too."""
SHARED_SLACK_S: Final = 60
"""Aliases that are named within so long of one another share an etcd lease, and so do ends that lenders have yet to
confirm; each lives up to so much longer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdStoreSettings:
    """Where etcd is, who we are there, and where our keys are."""

    endpoints: tuple[str, ...]
    credentials: EtcdCredentials
    prefix: str = "/kvlease/"
    engine_ttl_s: int = 60
    """After an engine's home is gone and no other replica has its session, the engine goes."""


class EtcdStore:
    """See `Store`. An async context manager; opens also while etcd is away."""

    def __init__(self, settings: EtcdStoreSettings, *, replica_id: str) -> None:
        """`replica_id` names this replica in etcd, for operators. Raises EtcdError for settings that cannot be used."""
        self._settings: Final = settings
        self._etcd: Final = EtcdClient(settings.endpoints, credentials=settings.credentials)
        self._keys: Final = Keys(settings.prefix)
        self._writer: Final = f"{replica_id}.{secrets.token_hex(8)}"
        self._stack: Final = AsyncExitStack()
        self._keeper: LeaseKeeper | None = None
        self._kept: Final[set[EtcdLeaseId]] = set()
        self._engines: Final[dict[EngineId, set[Incarnation]]] = {}
        """Whose etcd leases are kept here: those that we are, or are about to become, the home of."""
        self._shared: Final[dict[int, tuple[EtcdLeaseId, float]]] = {}
        self._written = 0
        """The version of this run's batch key."""
        self._transactions: Final = itertools.count(1)
        self._unfinished: Unfinished | None = None

    async def __aenter__(self) -> Self:
        """Raises EtcdError if credentials cannot be read."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._etcd)
            self._keeper = await stack.enter_async_context(self._etcd.lease_keeper(self._lost))
            self._stack.push_async_exit(stack.pop_all().__aexit__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def shared(self) -> bool:
        """See `Store`."""
        return True

    # --- writing

    async def commit(self, changes: Sequence[StoreChange]) -> None:
        """See `Store`. Begun and not finished, the same list goes on where it was."""
        if not changes:
            return
        if self._unfinished is None or self._unfinished.changes is not changes:
            self._unfinished = Unfinished(self._keys, self._writer, changes, self._transactions)
        try:
            while (parcel := self._unfinished.parcel) is not None:
                await self._send(parcel)
                self._unfinished.go_on()
        except LeaseNotFound as error:
            self._kept.clear()  # some etcd lease is gone: all are looked at again when this is repeated
            self._shared.clear()
            raise RegistryUnavailable("an etcd lease has expired") from error
        except EtcdError as error:
            raise RegistryUnavailable(f"etcd: {error.message}") from error
        self._unfinished = None

    async def beat(self, number: int, beats: Sequence[EngineBeat]) -> None:
        """See `Store`."""
        key, value = self._keys.beat(self._writer), encode_beats(number, beats)
        lease = self._replica_lease
        try:
            await self._keep(lease, REPLICA_TTL_S)
            await self._etcd.put(key, value, lease=lease, idempotent=True)
        except LeaseNotFound as error:
            self._kept.discard(lease)
            raise RegistryUnavailable("this replica's etcd lease has expired") from error
        except EtcdError as error:
            raise RegistryUnavailable(f"etcd: {error.message}") from error

    async def _send(self, parcel: Parcel) -> None:
        """One transaction, once: whether an earlier try of it was done, its batch key's version says."""
        key = own_batch_key(self._keys, self._writer)
        for engine_id, incarnation in parcel.hellos:
            self._engines.setdefault(engine_id, set()).add(incarnation)
        leases = {owner: await self._lease_for(owner) for owner in parcel.owners}
        operations = parcel.operations(leases, self._replica_lease)
        first = Compare(key=key, target=Target.VERSION, operand=self._written)
        try:
            done = (await self._etcd.txn((first,), operations)).succeeded
        except Doubtful:
            done = False
        if not done:
            await self._find_out(key, parcel.transaction)
        else:
            self._written += 1

    async def _find_out(self, key: bytes, transaction: int) -> None:
        """Whether the transaction was done after all. Returns if so; raises RegistryUnavailable to have it repeated.

        The key's version does not say: it begins anew when etcd lets the key expire, and goes back if etcd is restored.
        """
        found = (await self._etcd.get(key)).kvs
        self._written = found[0].version if found else 0
        if not found or transaction_of(found[0].value) != transaction:
            raise RegistryUnavailable("etcd did not take the transaction yet")

    # --- etcd leases

    @property
    def _replica_lease(self) -> EtcdLeaseId:
        return self._lease_id("replica", self._writer)

    def _engine_lease(self, engine_id: EngineId, incarnation: Incarnation) -> EtcdLeaseId:
        return self._lease_id("engine", engine_id, incarnation.hex())

    def _lease_id(self, *names: str) -> EtcdLeaseId:
        """The same at every replica, so that an engine's next home takes its etcd lease over without a question."""
        digest = sha256("\0".join((self._settings.prefix, *names)).encode()).digest()
        return EtcdLeaseId(int.from_bytes(digest[:8], "big") >> 2 | 1)

    async def _lease_for(self, owner: Owner) -> EtcdLeaseId:
        if owner.engine is not None:
            engine_id, incarnation = owner.engine
            lease_id = self._engine_lease(engine_id, incarnation)
            if incarnation in self._engines.get(engine_id, ()):
                await self._keep(lease_id, self._settings.engine_ttl_s)
            else:  # a late write: whoever is its home now keeps it
                await self._have(lease_id, self._settings.engine_ttl_s)
            return lease_id
        if owner.shared_ttl_s is not None:
            return await self._shared_lease(owner.shared_ttl_s)
        await self._keep(self._replica_lease, REPLICA_TTL_S)
        return self._replica_lease

    async def _keep(self, lease_id: EtcdLeaseId, ttl_s: int) -> None:
        if lease_id not in self._kept:
            self._renew_from_now(await self._have(lease_id, ttl_s))

    async def _have(self, lease_id: EtcdLeaseId, ttl_s: int) -> EtcdGrant:
        """There is such an etcd lease, and all of its time is left."""
        try:
            return await self._etcd.grant(ttl_s, lease_id=lease_id)
        except LeaseExists:
            await self._etcd.keep_alive_once(lease_id)
            return EtcdGrant(lease_id=lease_id, ttl_s=ttl_s)

    def _renew_from_now(self, grant: EtcdGrant) -> None:
        if self._keeper is not None:
            self._keeper.keep(grant)
            self._kept.add(grant.lease_id)

    def _account(self, changes: Sequence[StoreChange], *, own: bool) -> None:
        """Whose engines are ours to keep is decided where the table decides it: by the store's order."""
        for change in changes:
            if isinstance(change, EnginePut):
                if own:
                    self._hold(change)
                else:
                    self._release(change.engine.engine_id)
            elif isinstance(change, EngineGone) and own:
                self._release(change.engine_id, change.incarnation)

    def _hold(self, put: EnginePut) -> None:
        """We are this engine's home; its etcd lease was there when that was written."""
        engine_id, incarnation = put.engine.engine_id, put.engine.incarnation
        self._engines.setdefault(engine_id, set()).add(incarnation)
        lease_id = self._engine_lease(engine_id, incarnation)
        if lease_id not in self._kept:
            self._renew_from_now(EtcdGrant(lease_id=lease_id, ttl_s=self._settings.engine_ttl_s))

    def _release(self, engine_id: EngineId, incarnation: Incarnation | None = None) -> None:
        """This incarnation, or every one of the engine, is not ours to keep any more.

        Nothing is revoked: another replica may have taken the etcd lease over.
        """
        ours = self._engines.get(engine_id, set())
        for one in [incarnation] if incarnation is not None else list(ours):
            ours.discard(one)
            lease_id = self._engine_lease(engine_id, one)
            self._kept.discard(lease_id)
            if self._keeper is not None:
                self._keeper.forget(lease_id)
        if not ours:
            self._engines.pop(engine_id, None)

    def _lost(self, lost: LostLease) -> None:
        self._kept.discard(lost.lease_id)
        _log.info("etcd lease %x is %s: what hangs on it is written again", lost.lease_id, lost.end.value)

    async def _shared_lease(self, ttl_s: int) -> EtcdLeaseId:
        now_s = asyncio.get_running_loop().time()
        known = self._shared.get(ttl_s)
        if known is not None and now_s < known[1]:
            return known[0]
        for ttl, (_, until_s) in list(self._shared.items()):
            if until_s <= now_s:
                del self._shared[ttl]
        grant = await self._etcd.grant(ttl_s + SHARED_SLACK_S)
        self._shared[ttl_s] = (grant.lease_id, now_s + SHARED_SLACK_S)
        return grant.lease_id

    # --- reading

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[Followed]:
        """See `Store`."""
        reader = EtcdReader(self._keys, self._writer)
        watch = self._etcd.watch(self._keys.prefix, seen=await self._load(reader))
        kept = self._unfinished.kept(reader.transaction) if self._unfinished is not None else 0
        followed = Followed(view=reader.view(), batches=self._batches(watch, reader), kept=kept)
        # Others have moved, or a restored store has forgotten them. None is ours that we did not know to be.
        for engine_id in self._engines.keys() - {x.put.engine.engine_id for x in followed.view.engines if x.own}:
            self._release(engine_id)
        try:
            yield followed
        finally:
            await watch.aclose()

    async def _load(self, reader: EtcdReader) -> Header | None:
        """Everything at one moment; the header says at which."""
        seen: Header | None = None
        try:
            async for page in self._etcd.pages(self._keys.prefix):
                seen = seen or page.header
                reader.load(page.kvs)
        except EtcdCompacted as error:
            raise Compacted("etcd compacted while it was being read") from error
        except EtcdError as error:
            raise RegistryUnavailable(f"etcd: {error.message}") from error
        return seen

    async def _batches(self, watch: Watch, reader: EtcdReader) -> AsyncIterator[Batch]:
        while True:
            try:
                item = await anext(watch)
            except Unavailable as error:
                _log.debug("no member of etcd to watch at: %s", error.message)
                continue
            except (EtcdCompacted, HistoryChanged) as error:
                raise Compacted(f"etcd: {error.message}") from error
            except EtcdError as error:
                raise RegistryUnavailable(f"etcd: {error.message}") from error
            batch = reader.batch(item)
            if batch is None:
                continue
            self._account(batch.changes, own=batch.own)
            yield batch
