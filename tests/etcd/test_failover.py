"""Members of a real cluster are killed and stopped under calls: how long calls are stuck, and what is sent twice.

Figures are printed; what is asserted is the bound that the client promises. Watches and leases have files of their own.
"""

from __future__ import annotations

import asyncio
import socket

import pytest
from kvlease.etcd import (
    ClientClosed,
    Doubtful,
    EtcdClient,
    EtcdLimits,
    LeaseId,
    PutOp,
    Unavailable,
    absent,
    prefix_end,
)

from tests.etcd.cluster import Cluster, Member
from tests.etcd.reader import changes
from tests.etcd.writer import writing
from tests.integration.cut_line import cut_line
from tests.ports import free_ports

LIMITS = EtcdLimits(call_timeout_ms=10_000)
FAR_S = 6.0
"""Far above what is seen (2 s), below what would be a hang."""


async def test_leader_killed_under_puts(trio: Cluster, prefix: bytes) -> None:
    async with EtcdClient(trio.endpoints, limits=LIMITS) as etcd:
        async with writing(etcd, prefix) as writer:
            await writer.go_on()
            (await trio.leader()).kill()
            await writer.go_on()
        kept = await etcd.get(prefix, end=prefix_end(prefix), keys_only=True, limit=0)
        assert {kv.key for kv in kept.kvs} >= {writer.key(number) for number in range(writer.acknowledged)}
        assert not writer.errors
        assert writer.longest_gap_s < FAR_S
        print(f"leader killed: longest gap {writer.longest_gap_s:.2f} s, {writer.acknowledged} puts")


@pytest.mark.parametrize("who", ["leader", "used"])
async def test_member_stopped_under_puts(trio: Cluster, prefix: bytes, who: str) -> None:
    async with EtcdClient(trio.endpoints, limits=LIMITS) as etcd, writing(etcd, prefix) as writer:
        await writer.go_on()
        member = await trio.leader() if who == "leader" else trio.named(etcd.endpoint)
        member.stop()
        await writer.go_on()
        assert not writer.errors
        assert writer.longest_gap_s < FAR_S
        print(f"{who} stopped: longest gap {writer.longest_gap_s:.2f} s")
        member.resume()


async def stopped_follower(trio: Cluster) -> tuple[Member, tuple[str, ...]]:
    """A hung member that does not lead, and all endpoints, its own first."""
    member = await trio.follower()
    member.stop()
    return member, (member.endpoint, *(one for one in trio.endpoints if one != member.endpoint))


@pytest.mark.parametrize("connected", [True, False])
async def test_reads_leave_a_hung_member_within_a_try(trio: Cluster, prefix: bytes, connected: bool) -> None:
    member, endpoints = await stopped_follower(trio)
    async with EtcdClient(endpoints) as etcd:
        if connected:
            member.resume()
            await etcd.status()
            assert etcd.endpoint == member.endpoint
            member.stop()
        started = asyncio.get_running_loop().time()
        await etcd.get(prefix)
        took_s = asyncio.get_running_loop().time() - started
        assert etcd.endpoint != member.endpoint
        assert took_s < 2.5, "a try of 1 s, and a margin for a busy machine"


async def test_what_may_not_be_repeated_is_doubtful(trio: Cluster, prefix: bytes) -> None:
    """A hung member has the request in its socket: nobody can say what becomes of it."""
    member, endpoints = await stopped_follower(trio)
    async with EtcdClient(endpoints) as etcd:
        # The connection is made by the kernel of the hung member, but no HTTP/2: nothing can have been sent.
        await etcd.put(prefix + b"first", b"")
        assert etcd.endpoint != member.endpoint
        member.resume()

    hung = trio.named(endpoints[1])
    async with EtcdClient(endpoints[1:]) as etcd:
        await etcd.put(prefix + b"connected", b"")
        hung.stop()
        with pytest.raises(Doubtful):
            await etcd.txn([absent(prefix + b"txn")], [PutOp(key=prefix + b"txn", value=b"")])
        hung.resume()
        hung = trio.named(etcd.endpoint)
        await etcd.get(prefix)
        hung.stop()
        with pytest.raises(Doubtful):
            await etcd.put(prefix + b"put", b"")
        hung.resume()
        hung = trio.named(etcd.endpoint)
        await etcd.get(prefix)
        hung.stop()
        with pytest.raises(Doubtful):
            await etcd.delete(prefix + b"put")
        await trio.heal()
        await etcd.get(prefix)
        assert (await etcd.txn([absent(prefix + b"x")], [PutOp(key=prefix + b"x", value=b"")])).succeeded


async def test_a_change_whose_answer_is_lost(solo: Cluster, prefix: bytes) -> None:
    """It was done, and that is what Doubtful says: maybe. What may be repeated is done once, too."""
    async with (
        cut_line(solo.endpoints[0]) as line,
        EtcdClient((line.endpoint,)) as deaf,
        EtcdClient(solo.endpoints) as etcd,
    ):
        await deaf.get(prefix)
        line.withhold_answers()
        with pytest.raises(Doubtful):
            await deaf.txn([absent(prefix)], [PutOp(key=prefix, value=b"")])
        assert (await etcd.get(prefix)).count == 1
        with pytest.raises(Doubtful):
            await deaf.put(prefix + b"again", b"", idempotent=True, timeout_ms=1_500)
        with pytest.raises(Unavailable):
            await deaf.get(prefix, timeout_ms=300)
        line.move()
        assert (await deaf.get(prefix)).count == 1


async def test_a_grant_whose_answer_is_lost_is_one_lease(solo: Cluster) -> None:
    async with cut_line(solo.endpoints[0]) as line, EtcdClient((line.endpoint, *solo.endpoints)) as etcd:
        await etcd.status()
        line.withhold_answers()
        grant = await etcd.grant(60)
        assert etcd.endpoint == solo.endpoints[0]
        assert await etcd.keep_alive_once(grant.lease_id) == 60
        assert await etcd.revoke(grant.lease_id)


async def test_member_without_a_leader_is_left(trio: Cluster, prefix: bytes) -> None:
    """It answers, and believes what it knew; calls and an open watch must not believe it."""
    alone, *others = trio.members.values()
    limits = EtcdLimits(watch_timeout_ms=1_000)
    async with EtcdClient((alone.endpoint,), limits=limits) as etcd, etcd.watch(prefix) as watch:
        await anext(watch)
        for member in others:
            member.kill()
        async with asyncio.timeout(10):
            with pytest.raises(Unavailable):
                await changes(watch, 1)
        with pytest.raises(Unavailable):
            await etcd.get(prefix, timeout_ms=500)
        assert (await etcd.status(alone.endpoint)).leader == 0
        await trio.heal()
        await etcd.put(prefix, b"", idempotent=True)
        await changes(watch, 1)


async def test_unreachable_members_are_passed_over_even_by_transactions(trio: Cluster, prefix: bytes) -> None:
    """Nothing was sent to a member that has no connection, so a transaction may go to the next one."""
    follower = await trio.follower()
    follower.kill()
    endpoints = (follower.endpoint, *(one for one in trio.endpoints if one != follower.endpoint))
    async with EtcdClient(endpoints) as etcd:
        assert (await etcd.txn([absent(prefix)], [PutOp(key=prefix, value=b"")])).succeeded
        assert etcd.endpoint != follower.endpoint


async def test_all_endpoints_away(prefix: bytes) -> None:
    """Two that refuse, one that accepts and says nothing: each call ends within its time."""
    refusing = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoints = (*refusing, f"127.0.0.1:{silent.getsockname()[1]}")
        async with EtcdClient(endpoints, limits=EtcdLimits(watch_timeout_ms=700)) as etcd:
            async with asyncio.timeout(3):
                ends = await asyncio.gather(
                    etcd.get(prefix, timeout_ms=700),
                    etcd.put(prefix, b"", timeout_ms=700),
                    etcd.txn([], [PutOp(key=prefix, value=b"")], timeout_ms=700),
                    etcd.grant(10, timeout_ms=700),
                    etcd.keep_alive_once(LeaseId(1), timeout_ms=700),
                    etcd.status(timeout_ms=700),
                    etcd.status(endpoints[2], timeout_ms=700),
                    anext(etcd.watch(prefix)),
                    return_exceptions=True,
                )
            assert [type(end) for end in ends] == [Unavailable] * 8
            with pytest.raises(Unavailable, match="Connection refused"):
                await etcd.status(refusing[0])


async def test_etcd_comes_back(solo: Cluster, prefix: bytes) -> None:
    async with EtcdClient(solo.endpoints) as etcd:
        await etcd.put(prefix, b"kept")
        (member,) = solo.members.values()
        member.kill()
        with pytest.raises(Unavailable):
            await etcd.get(prefix, timeout_ms=300)
        member.start()
        assert (await etcd.get(prefix, timeout_ms=15_000)).kvs[0].value == b"kept"


async def test_cancelled_calls_leave_nothing(trio: Cluster, prefix: bytes) -> None:
    """In each state: waiting for a connection, for a hung member, for a pause. The fixture looks for tasks left."""
    _, endpoints = await stopped_follower(trio)
    async with EtcdClient((endpoints[0],)) as etcd:
        for pause_s in (0.0, 0.05, 0.3, 1.1):
            task = asyncio.create_task(etcd.get(prefix))
            await asyncio.sleep(pause_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_closing_ends_calls(trio: Cluster, prefix: bytes) -> None:
    member = await trio.follower()
    async with EtcdClient((member.endpoint,)) as etcd:
        await etcd.get(prefix)
        member.stop()
        calls = [asyncio.create_task(etcd.get(prefix)), asyncio.create_task(etcd.put(prefix, b""))]
        watch = etcd.watch(prefix)
        opening = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(2):
            await etcd.close()
            for call in calls:
                with pytest.raises(ClientClosed):
                    await call
            with pytest.raises((ClientClosed, StopAsyncIteration)):
                await opening
        with pytest.raises(ClientClosed):
            await etcd.get(prefix)
