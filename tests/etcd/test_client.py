"""Calls of the etcd client against one real member: what goes in comes out, and refusals are typed.

Failover is in test_failover.py. Each test has a prefix of its own.
"""

from __future__ import annotations

import asyncio

import pytest
from kvlease.etcd import (
    Compacted,
    Compare,
    DeleteOp,
    DeleteResult,
    EtcdClient,
    EtcdLimits,
    GetOp,
    GetResult,
    InvalidRequest,
    LeaseExists,
    LeaseId,
    LeaseNotFound,
    PutOp,
    PutResult,
    Refused,
    Relation,
    Revision,
    Target,
    absent,
    prefix_end,
    present,
    unchanged,
)

from tests.etcd.cluster import Cluster


async def test_put_get_delete(etcd: EtcdClient, prefix: bytes) -> None:
    key = prefix + b"a"
    first = await etcd.put(key, b"one")
    second = await etcd.put(key, b"two", previous=True)
    assert first.previous is None
    assert second.previous is not None
    assert second.previous.value == b"one"
    got = await etcd.get(key)
    assert [(kv.key, kv.value, kv.version) for kv in got.kvs] == [(key, b"two", 2)]
    assert got.kvs[0].create_revision == first.header.revision
    assert got.kvs[0].mod_revision == second.header.revision
    assert (await etcd.get(key, revision=first.header.revision)).kvs[0].value == b"one"
    gone = await etcd.delete(key, previous=True)
    assert gone.deleted == 1
    assert [kv.value for kv in gone.previous] == [b"two"]
    assert (await etcd.get(key)).kvs == ()
    assert (await etcd.delete(key)).deleted == 0


async def test_ranges(etcd: EtcdClient, prefix: bytes) -> None:
    for name in (b"a", b"b", b"c"):
        await etcd.put(prefix + name, name)
    both = await etcd.get(prefix, end=prefix_end(prefix), limit=2)
    assert ([kv.value for kv in both.kvs], both.more, both.count) == ([b"a", b"b"], True, 3)
    keys = await etcd.get(prefix, end=prefix_end(prefix), keys_only=True)
    assert [(kv.key[-1:], kv.value) for kv in keys.kvs] == [(b"a", b""), (b"b", b""), (b"c", b"")]
    counted = await etcd.get(prefix, end=prefix_end(prefix), count_only=True)
    assert (counted.kvs, counted.count) == ((), 3)
    assert (await etcd.delete(prefix, end=prefix_end(prefix))).deleted == 3


@pytest.mark.parametrize(
    ("prefix", "end"),
    [(b"a", b"b"), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0"), (b"a\x00", b"a\x01")],
)
def test_end_of_a_prefix(prefix: bytes, end: bytes) -> None:
    assert prefix_end(prefix) == end


async def test_transaction_takes_one_branch_in_one_revision(etcd: EtcdClient, prefix: bytes) -> None:
    a, b = prefix + b"a", prefix + b"b"
    done = await etcd.txn([absent(a)], [PutOp(key=a, value=b"1"), PutOp(key=b, value=b"2"), GetOp(key=a)])
    assert done.succeeded
    put, other, got = done.results
    assert isinstance(put, PutResult)
    assert isinstance(other, PutResult)
    assert isinstance(got, GetResult)
    assert got.kvs[0].mod_revision == done.header.revision == (await etcd.get(b)).kvs[0].mod_revision

    refused = await etcd.txn([absent(a)], [PutOp(key=a, value=b"no")], [GetOp(key=a), DeleteOp(key=b, previous=True)])
    assert not refused.succeeded
    got, deleted = refused.results
    assert isinstance(got, GetResult)
    assert got.kvs[0].value == b"1"
    assert isinstance(deleted, DeleteResult)
    assert (deleted.deleted, deleted.previous[0].value) == (1, b"2")


async def test_compares(etcd: EtcdClient, prefix: bytes) -> None:
    key = prefix + b"a"
    lease = await etcd.grant(60)
    at = (await etcd.put(key, b"m", lease=lease.lease_id)).header.revision
    value, version = Target.VALUE, Target.VERSION
    true = [
        present(key),
        unchanged(key, at),
        unchanged(prefix + b"none", Revision(0)),
        Compare(key=key, target=value, operand=b"m"),
        Compare(key=key, target=value, operand=b"a", relation=Relation.GREATER),
        Compare(key=key, target=version, operand=2, relation=Relation.LESS),
        Compare(key=key, target=Target.CREATE_REVISION, operand=at),
        Compare(key=key, target=Target.LEASE, operand=lease.lease_id),
        Compare(key=prefix, end=prefix_end(prefix), target=version, operand=0, relation=Relation.GREATER),
    ]
    assert (await etcd.txn(true, [])).succeeded
    false = [
        absent(key),
        unchanged(key, Revision(at - 1)),
        Compare(key=key, target=value, operand=b"m", relation=Relation.NOT_EQUAL),
        Compare(key=key, target=Target.LEASE, operand=0),
    ]
    for one in false:
        assert not (await etcd.txn([one], [])).succeeded, one
    with pytest.raises(ValueError, match="takes bytes"):
        Compare(key=key, target=value, operand=1)
    await etcd.revoke(lease.lease_id)


async def test_pages_are_of_one_revision(etcd: EtcdClient, prefix: bytes) -> None:
    for start in range(0, 1_000, 125):
        puts = [PutOp(key=prefix + b"%04d" % number, value=b"v" * 100) for number in range(start, start + 125)]
        await etcd.txn([], puts)
    at = (await etcd.get(prefix)).header.revision
    seen: list[bytes] = []
    async for page in etcd.pages(prefix, page_keys=64):
        assert len(page.kvs) <= 64
        seen += [kv.key for kv in page.kvs]
        await etcd.put(prefix + b"%04d" % len(seen), b"newer")  # ahead of the reader
        await etcd.delete(prefix + b"0999")
    assert seen == [prefix + b"%04d" % number for number in range(1_000)]
    before = [len(page.kvs) async for page in etcd.pages(prefix, revision=at, keys_only=True)]
    assert sum(before) == 1_000


async def test_pages_that_are_too_large_shrink(solo: Cluster, prefix: bytes) -> None:
    limits = EtcdLimits(max_answer_bytes=100_000)
    async with EtcdClient(solo.endpoints, limits=limits) as etcd:
        for number in range(8):
            await etcd.put(prefix + b"%d" % number, b"x" * 30_000)
        pages = [len(page.kvs) async for page in etcd.pages(prefix)]
    assert (sum(pages), max(pages)) == (8, 2)


async def test_compaction(etcd: EtcdClient, prefix: bytes) -> None:
    first = (await etcd.put(prefix, b"1")).header.revision
    second = (await etcd.put(prefix, b"2")).header.revision
    await etcd.compact(second)
    await etcd.compact(second)
    with pytest.raises(Compacted):
        await etcd.get(prefix, revision=first)
    with pytest.raises(Refused, match="future"):
        await etcd.get(prefix, revision=Revision(second + 1_000))


async def test_leases(etcd: EtcdClient, prefix: bytes) -> None:
    lease = await etcd.grant(60)
    await etcd.put(prefix, b"", lease=lease.lease_id)
    assert await etcd.keep_alive_once(lease.lease_id) == lease.ttl_s == 60
    info = await etcd.time_to_live(lease.lease_id, keys=True)
    assert info is not None
    assert (info.granted_ttl_s, info.keys) == (60, (prefix,))
    with pytest.raises(LeaseExists) as exists:
        await etcd.grant(60, lease_id=lease.lease_id)
    assert exists.value.lease_id == lease.lease_id
    assert await etcd.revoke(lease.lease_id)
    assert not await etcd.revoke(lease.lease_id)
    assert (await etcd.get(prefix)).kvs == ()
    assert await etcd.time_to_live(lease.lease_id) is None
    with pytest.raises(LeaseNotFound):
        await etcd.keep_alive_once(lease.lease_id)
    with pytest.raises(LeaseNotFound):
        await etcd.put(prefix, b"", lease=LeaseId(12_345))
    with pytest.raises(InvalidRequest, match="at least 1 s"):
        await etcd.grant(0)


async def test_refusals_are_typed(etcd: EtcdClient, prefix: bytes) -> None:
    with pytest.raises(InvalidRequest, match="too large"):
        await etcd.put(prefix, b"x" * 1_600_000)
    with pytest.raises(InvalidRequest, match="too many operations"):
        await etcd.txn([], [PutOp(key=prefix + b"%d" % number, value=b"") for number in range(129)])
    with pytest.raises(InvalidRequest, match="duplicate key"):
        await etcd.txn([], [PutOp(key=prefix, value=b""), PutOp(key=prefix, value=b"")])
    with pytest.raises(InvalidRequest, match="key is not provided"):
        await etcd.get(b"")


async def test_status_and_members(solo: Cluster, etcd: EtcdClient) -> None:
    status = await etcd.status(solo.endpoints[0])
    assert status.leader == status.header.member_id
    assert status.version.startswith("3.")
    (member,) = await etcd.members()
    assert (member.name, member.member_id) == ("m1", status.leader)
    with pytest.raises(InvalidRequest, match="none of the endpoints"):
        await etcd.status("127.0.0.1:1")


async def test_many_calls_at_once(etcd: EtcdClient, prefix: bytes) -> None:
    await asyncio.gather(*(etcd.put(prefix + b"%d" % number, b"") for number in range(300)))
    assert (await etcd.get(prefix, end=prefix_end(prefix), count_only=True)).count == 300
