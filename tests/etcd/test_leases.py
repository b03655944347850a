"""Leases that are kept over failures, and those that are lost and told. Real members, real time.

The judge is the key that hangs on the lease: it is there while the lease is kept.
"""

from __future__ import annotations

import asyncio

import pytest
from kvlease.etcd import Changes, EtcdClient, EtcdLimits, EventKind, LeaseEnd, LeaseId, LostLease

from tests.etcd.cluster import Cluster

TTL_S = 3
"""Short, but not shorter than an election takes."""


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_kept_while_the_leader_is_away(trio: Cluster, prefix: bytes, how: str) -> None:
    lost: list[LostLease] = []
    limits = EtcdLimits(keepalive_batch=8)  # fewer than the leases: more than one stream for them
    async with EtcdClient(trio.endpoints, limits=limits) as etcd, etcd.lease_keeper(lost.append) as keeper:
        for number in range(20):
            grant = await etcd.grant(TTL_S)
            await etcd.put(prefix + b"%d" % number, b"", lease=grant.lease_id)
            keeper.keep(grant)
        leader = await trio.leader()
        (leader.kill if how == "kill" else leader.stop)()
        await trio.leader()
        # A new leader gives every lease its whole time again: only after more than that is a lease seen to be kept.
        await asyncio.sleep(2 * TTL_S)
        kept = await etcd.get(prefix, end=prefix + b"\xff", keys_only=True, timeout_ms=10_000)
        assert (lost, len(keeper), kept.count) == ([], 20, 20)


async def test_one_that_ends_is_told_once_and_the_others_are_kept(etcd: EtcdClient, prefix: bytes) -> None:
    told: asyncio.Queue[LostLease] = asyncio.Queue()
    async with etcd.lease_keeper(told.put_nowait) as keeper, etcd.watch(prefix) as watch:
        await anext(watch)
        grants = [await etcd.grant(ttl_s) for ttl_s in (9, 2, 2)]
        for grant in grants:
            await etcd.put(prefix + b"%d" % grant.lease_id, b"", lease=grant.lease_id)
            keeper.keep(grant)
        ended, forgotten, kept = (grant.lease_id for grant in grants)
        await etcd.revoke(ended)
        keeper.forget(forgotten)
        async with asyncio.timeout(7):  # a third of its ttl, and once more
            assert await told.get() == LostLease(lease_id=ended, end=LeaseEnd.GONE)
            deleted: list[bytes] = []
            while len(deleted) < 2:
                item = await anext(watch)
                events = item.events if isinstance(item, Changes) else ()
                deleted += [event.kv.key for event in events if event.kind is EventKind.DELETE]
        assert deleted == [prefix + b"%d" % ended, prefix + b"%d" % forgotten]
        assert await etcd.time_to_live(kept) is not None
        assert told.empty()
        assert (ended in keeper, forgotten in keeper, kept in keeper) == (False, False, True)
    await etcd.revoke(kept)


async def test_etcd_away_for_a_whole_ttl_is_told(solo: Cluster, prefix: bytes) -> None:
    told: asyncio.Queue[LostLease] = asyncio.Queue()
    async with EtcdClient(solo.endpoints) as etcd, etcd.lease_keeper(told.put_nowait) as keeper:
        grant = await etcd.grant(2)
        keeper.keep(grant)
        (member,) = solo.members.values()
        member.stop()
        started = asyncio.get_running_loop().time()
        async with asyncio.timeout(10):
            assert await told.get() == LostLease(lease_id=grant.lease_id, end=LeaseEnd.UNHEARD)
        assert grant.ttl_s - 0.1 < asyncio.get_running_loop().time() - started < grant.ttl_s + 2
        assert len(keeper) == 0


async def test_granted_under_a_hung_member(trio: Cluster) -> None:
    """The grant is repeated at another member, and is one lease."""
    member = await trio.follower()
    endpoints = (member.endpoint, *(one for one in trio.endpoints if one != member.endpoint))
    async with EtcdClient(endpoints) as etcd:
        await etcd.status()
        assert etcd.endpoint == member.endpoint
        member.stop()
        grant = await etcd.grant(30)
        member.resume()
        assert await etcd.keep_alive_once(grant.lease_id) == 30
        assert await etcd.revoke(grant.lease_id)
        named = await etcd.grant(30, lease_id=LeaseId(grant.lease_id + 1))
        assert named.lease_id == grant.lease_id + 1
        await etcd.revoke(named.lease_id)
