"""The client's front door: one object for one etcd cluster, any number of calls, watches and leases at once.

Constructing does no I/O, opening reads credential files only; etcd is reached when it is first needed, so a client
opens while etcd is away. Invariant: nothing outlives `close`: calls in flight end with ClientClosed, watches are over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Final, Self

from kvlease.etcd import codec
from kvlease.etcd.calls import Calls, Repeat
from kvlease.etcd.credentials import EtcdCredentials
from kvlease.etcd.endpoints import Endpoints
from kvlease.etcd.errors import AnswerTooLarge, Compacted
from kvlease.etcd.lease_keeper import LeaseKeeper, LostLease
from kvlease.etcd.leases import Leases
from kvlease.etcd.limits import EtcdLimits
from kvlease.etcd.login import Login
from kvlease.etcd.methods import COMPACT, DELETE, MEMBER_LIST, PUT, RANGE, STATUS, TXN
from kvlease.etcd.ops import Compare, DeleteOp, GetOp, Op, PutOp, only_reads
from kvlease.etcd.proof import Proof
from kvlease.etcd.values import (
    NO_LEASE,
    DeleteResult,
    GetResult,
    Header,
    LeaseGrant,
    LeaseId,
    LeaseInfo,
    Member,
    PutResult,
    Revision,
    Status,
    TxnResult,
    prefix_end,
    prefix_start,
)
from kvlease.etcd.watch import Watch
from kvlease.etcd.watch_order import WatchOrder
from kvlease.etcdv3 import etcd_pb2 as pb


class EtcdClient:
    """Use as `async with EtcdClient(["host:2379", ...]) as etcd:`.

    Every call takes `timeout_ms`, its time with all tries, and may raise what `errors.py` has: Unavailable if no
    endpoint answered in that time, AuthenticationFailed, PermissionDenied, InvalidRequest, ClientClosed. Changes may
    raise Doubtful and NoSpace as well. Reads are linearizable unless said otherwise, and repeated as often as there is
    time.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        credentials: EtcdCredentials | None = None,
        limits: EtcdLimits | None = None,
    ) -> None:
        """`endpoints` are host:port of members' client addresses. Raises InvalidRequest, CredentialsInvalid."""
        self._credentials: Final = credentials or EtcdCredentials()
        self._credentials.check_endpoints(endpoints)
        self._limits: Final = limits or EtcdLimits()
        self._endpoints: Final = Endpoints(endpoints, self._limits)
        self._calls: Final = Calls(self._endpoints, Login(self._credentials, self._endpoints), self._limits)
        self._leases: Final = Leases(self._calls, self._limits)
        self._watches: Final[set[Watch]] = set()

    async def __aenter__(self) -> Self:
        """Raises CredentialsInvalid if files cannot be used."""
        proof = Proof(self._credentials)
        await asyncio.to_thread(proof.load)
        self._endpoints.open(proof)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End everything that is open; bounded. Idempotent."""
        for watch in tuple(self._watches):
            await watch.aclose()
        await self._endpoints.close()

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self._endpoints.current.name

    # Keys

    async def get(
        self,
        key: bytes,
        *,
        end: bytes = b"",
        limit: int = 0,
        keys_only: bool = False,
        count_only: bool = False,
        revision: Revision | None = None,
        serializable: bool = False,
        timeout_ms: int | None = None,
    ) -> GetResult:
        """`key`, or the keys in [key, end); `serializable`: the member's own state, possibly old, without the cluster.

        Raises Compacted for a `revision` that is gone, AnswerTooLarge.
        """
        op = GetOp(
            key=key,
            end=end,
            limit=limit,
            revision=revision or Revision(0),
            keys_only=keys_only,
            count_only=count_only,
            serializable=serializable,
        )
        return codec.get_result(
            await self._calls.unary(RANGE, codec.range_request(op), repeat=Repeat.READ, timeout_ms=timeout_ms)
        )

    async def pages(
        self,
        prefix: bytes,
        *,
        revision: Revision | None = None,
        keys_only: bool = False,
        page_keys: int | None = None,
        timeout_ms: int | None = None,
    ) -> AsyncIterator[GetResult]:
        """All keys under `prefix` in order, page by page and all as of one revision: `revision`, or the first page's.

        `timeout_ms` is for each page. Pages that are too large are asked for again in halves. Raises Compacted if etcd
        compacts past the revision meanwhile: start again.
        """
        key, end = prefix_start(prefix), prefix_end(prefix)
        limit = page_keys or self._limits.page_keys
        while True:
            try:
                page = await self.get(
                    key, end=end, limit=limit, keys_only=keys_only, revision=revision, timeout_ms=timeout_ms
                )
            except AnswerTooLarge:
                if limit == 1:
                    raise
                limit //= 2
                continue
            revision = revision or page.header.revision
            yield page
            if not page.more or not page.kvs:
                return
            key = page.kvs[-1].key + b"\0"

    async def put(
        self,
        key: bytes,
        value: bytes,
        *,
        lease: LeaseId = NO_LEASE,
        previous: bool = False,
        idempotent: bool = False,
        timeout_ms: int | None = None,
    ) -> PutResult:
        """Write a key. `idempotent`: nobody else writes it and two revisions do no harm: it is repeated when in doubt.

        Otherwise raises Doubtful when in doubt. Raises LeaseNotFound.
        """
        request = codec.put_request(PutOp(key=key, value=value, lease=lease, previous=previous))
        return codec.put_result(
            await self._calls.unary(PUT, request, repeat=_repeat(idempotent), timeout_ms=timeout_ms)
        )

    async def delete(
        self,
        key: bytes,
        *,
        end: bytes = b"",
        previous: bool = False,
        idempotent: bool = False,
        timeout_ms: int | None = None,
    ) -> DeleteResult:
        """Delete `key`, or the keys in [key, end). `idempotent` as for `put`; `deleted` is then of the last try."""
        request = codec.delete_request(DeleteOp(key=key, end=end, previous=previous))
        return codec.delete_result(
            await self._calls.unary(DELETE, request, repeat=_repeat(idempotent), timeout_ms=timeout_ms)
        )

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout_ms: int | None = None,
    ) -> TxnResult:
        """Do `success` if all `compares` hold, else `failure`; one revision, all or nothing.

        Never repeated when in doubt, unless it only reads: raises Doubtful, and the caller reads back. Raises
        LeaseNotFound.
        """
        repeat = Repeat.READ if only_reads(success, failure) else Repeat.NEVER
        request = codec.txn_request(compares, success, failure)
        return codec.txn_result(
            await self._calls.unary(TXN, request, repeat=repeat, timeout_ms=timeout_ms), success, failure
        )

    async def compact(self, revision: Revision, *, physical: bool = False, timeout_ms: int | None = None) -> None:
        """Forget history before `revision`; done as well if it is forgotten already. `physical` waits for the disk."""
        request = pb.CompactionRequest(revision=revision, physical=physical)
        try:
            await self._calls.unary(COMPACT, request, repeat=Repeat.CHANGE, timeout_ms=timeout_ms)
        except Compacted:
            return

    # Watches

    def watch(
        self,
        prefix: bytes,
        *,
        start_revision: Revision | None = None,
        seen: Header | None = None,
        previous: bool = False,
    ) -> Watch:
        """Changes under `prefix` from `start_revision` on; use as `async with etcd.watch(...) as items: async for ...`.

        `seen`: the header of the listing that this watch continues. With it the watch starts right after, and finds out
        if etcd was replaced or restored in between. Without either the watch starts with what comes next. Yields
        Changes (all events of one revision), Opened, and Progress. Do not take Progress for a proof of having seen
        everything up to its revision unless it says `complete`: before etcd 3.4.25 and 3.5.8 the notices that the watch
        asks for may overtake events (etcd-io/etcd#15220). Raises as in `Watch`.
        """
        if seen is not None and start_revision is None:
            start_revision = Revision(seen.revision + 1)
        watch = Watch(
            prefix_start(prefix),
            prefix_end(prefix),
            WatchOrder(start_revision, seen),
            previous=previous,
            calls=self._calls,
            endpoints=self._endpoints,
            limits=self._limits,
            on_close=self._watches.discard,
        )
        self._watches.add(watch)
        return watch

    # Leases

    async def grant(self, ttl_s: int, *, lease_id: LeaseId | None = None, timeout_ms: int | None = None) -> LeaseGrant:
        """As `Leases.grant`."""
        return await self._leases.grant(ttl_s, lease_id=lease_id, timeout_ms=timeout_ms)

    async def revoke(self, lease_id: LeaseId, *, timeout_ms: int | None = None) -> bool:
        """As `Leases.revoke`."""
        return await self._leases.revoke(lease_id, timeout_ms=timeout_ms)

    async def keep_alive_once(self, lease_id: LeaseId, *, timeout_ms: int | None = None) -> int:
        """As `Leases.keep_alive_once`."""
        return await self._leases.keep_alive_once(lease_id, timeout_ms=timeout_ms)

    async def time_to_live(
        self, lease_id: LeaseId, *, keys: bool = False, timeout_ms: int | None = None
    ) -> LeaseInfo | None:
        """As `Leases.time_to_live`."""
        return await self._leases.time_to_live(lease_id, keys=keys, timeout_ms=timeout_ms)

    def lease_keeper(self, on_lost: Callable[[LostLease], None]) -> LeaseKeeper:
        """What keeps leases alive: `async with etcd.lease_keeper(...) as keeper: keeper.keep(grant)`."""
        return LeaseKeeper(self._leases, self._limits, on_lost)

    # The cluster

    async def status(self, endpoint: str | None = None, *, timeout_ms: int | None = None) -> Status:
        """State of the member at `endpoint`, tried once, leader or not; or of any one that has a leader."""
        if endpoint is None:
            answer = await self._calls.unary(STATUS, pb.StatusRequest(), repeat=Repeat.READ, timeout_ms=timeout_ms)
        else:
            answer = await self._calls.unary_at(
                self._endpoints.named(endpoint), STATUS, pb.StatusRequest(), timeout_ms=timeout_ms
            )
        return codec.status(answer)

    async def members(self, *, timeout_ms: int | None = None) -> tuple[Member, ...]:
        """The cluster's members."""
        request = pb.MemberListRequest()
        answer = await self._calls.unary(MEMBER_LIST, request, repeat=Repeat.READ, timeout_ms=timeout_ms)
        return tuple(codec.member(one) for one in answer.members)


def _repeat(idempotent: bool) -> Repeat:
    return Repeat.CHANGE if idempotent else Repeat.NEVER
