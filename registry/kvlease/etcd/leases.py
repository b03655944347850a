"""Leases of etcd: grant, revoke, renew. Each is one bounded call; keeping many alive is `lease_keeper.py`.

An etcd lease deletes its keys when it ends. A new etcd leader gives every lease its full time to live again, so the end
of one is a clean-up, never a proof. Invariant: a grant or revocation that was repeated has happened once.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from kvlease.etcd.calls import Calls, Repeat, TryFailed
from kvlease.etcd.endpoints import Endpoint
from kvlease.etcd.errors import ClientClosed, InvalidRequest, LeaseExists, LeaseNotFound, Unavailable
from kvlease.etcd.limits import EtcdLimits
from kvlease.etcd.methods import LEASE_GRANT, LEASE_KEEP_ALIVE, LEASE_REVOKE, LEASE_TIME_TO_LIVE
from kvlease.etcd.streams import open_stream
from kvlease.etcd.values import LeaseGrant, LeaseId, LeaseInfo
from kvlease.etcdv3 import etcd_pb2 as pb


class Leases:
    """The lease calls of one client."""

    def __init__(self, calls: Calls, limits: EtcdLimits) -> None:
        self._calls: Final = calls
        self._limits: Final = limits

    async def grant(self, ttl_s: int, *, lease_id: LeaseId | None = None, timeout_ms: int | None = None) -> LeaseGrant:
        """A lease of at least `ttl_s` seconds. Raises LeaseExists for an id in use, InvalidRequest, and as calls do.

        Repeated over endpoints. With no `lease_id` a random one is taken, so that a repetition finds its own lease.
        """
        if ttl_s < 1:
            raise InvalidRequest(f"a lease needs a ttl of at least 1 s, not {ttl_s}")
        wanted = lease_id or LeaseId(secrets.randbits(62) + 1)
        tries = 0

        async def attempt(endpoint: Endpoint, timeout_s: float) -> LeaseGrant:
            nonlocal tries
            tries += 1
            try:
                granted = await self._calls.attempt(
                    endpoint, LEASE_GRANT, pb.LeaseGrantRequest(TTL=ttl_s, ID=wanted), timeout_s=timeout_s
                )
            except LeaseExists as error:
                if tries > 1 and lease_id is None:  # an earlier try has come through
                    return LeaseGrant(lease_id=wanted, ttl_s=ttl_s)
                raise LeaseExists(error.message, lease_id=wanted) from error
            return LeaseGrant(lease_id=LeaseId(granted.ID), ttl_s=granted.TTL)

        return await self._calls.over_endpoints(attempt, repeat=Repeat.CHANGE, timeout_ms=timeout_ms)

    async def revoke(self, lease_id: LeaseId, *, timeout_ms: int | None = None) -> bool:
        """End a lease and delete its keys. False if there was none any more."""
        request = pb.LeaseRevokeRequest(ID=lease_id)
        try:
            await self._calls.unary(LEASE_REVOKE, request, repeat=Repeat.CHANGE, timeout_ms=timeout_ms)
        except LeaseNotFound:
            return False
        return True

    async def time_to_live(
        self, lease_id: LeaseId, *, keys: bool = False, timeout_ms: int | None = None
    ) -> LeaseInfo | None:
        """What is left of a lease, None if it is gone."""
        request = pb.LeaseTimeToLiveRequest(ID=lease_id, keys=keys)
        try:
            info = await self._calls.unary(LEASE_TIME_TO_LIVE, request, repeat=Repeat.READ, timeout_ms=timeout_ms)
        except LeaseNotFound:
            return None
        if info.TTL <= 0:
            return None
        return LeaseInfo(lease_id=lease_id, ttl_s=info.TTL, granted_ttl_s=info.grantedTTL, keys=tuple(info.keys))

    async def keep_alive_once(self, lease_id: LeaseId, *, timeout_ms: int | None = None) -> int:
        """Renew one lease: the seconds it has now. Raises LeaseNotFound, Unavailable, and as calls do."""
        ttl_s = (await self.renew((lease_id,), timeout_ms=timeout_ms)).get(lease_id)
        if ttl_s is None:
            raise Unavailable(f"etcd did not answer the renewal of lease {lease_id:x}")
        if ttl_s <= 0:
            raise LeaseNotFound(f"lease {lease_id:x} has ended")
        return ttl_s

    async def renew(self, lease_ids: Sequence[LeaseId], *, timeout_ms: int | None = None) -> dict[LeaseId, int]:
        """Renew many leases on one stream: the seconds each has now, 0 if it is gone; unanswered ones are absent.

        Each try is bounded; those that were not answered are tried at the next endpoint. Raises as calls do, and if
        there is no answer at all.
        """
        answered: dict[LeaseId, int] = {}

        async def attempt(endpoint: Endpoint, timeout_s: float) -> None:
            while waiting := [one for one in lease_ids if one not in answered]:
                before = len(answered)
                try:
                    await self._renew_at(endpoint, waiting[: self._limits.keepalive_batch], answered, timeout_s)
                except TryFailed:
                    if len(answered) == before:
                        raise

        try:
            await self._calls.over_endpoints(attempt, repeat=Repeat.READ, timeout_ms=timeout_ms)
        except (Unavailable, ClientClosed):
            if not answered:
                raise
        return answered

    async def _renew_at(
        self, endpoint: Endpoint, lease_ids: Sequence[LeaseId], answered: dict[LeaseId, int], timeout_s: float
    ) -> None:
        stream = await open_stream(self._calls, endpoint, LEASE_KEEP_ALIVE, connect_s=timeout_s, timeout_s=timeout_s)
        try:
            for one in lease_ids:
                await stream.send(pb.LeaseKeepAliveRequest(ID=one))
            for _ in lease_ids:
                response = await stream.receive()
                answered[LeaseId(response.ID)] = max(0, response.TTL)
        finally:
            stream.cancel()
