"""etcd as the registry's store: held to the suite of every store, and to what only etcd can do to it.

Each test has a prefix of its own on one real member, so keys of other tests are other registries' keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kvlease.etcd import EtcdClient, EtcdCredentials
from kvlease.registry.errors import Compacted, RegistryUnavailable
from kvlease.registry.etcd_batches import MAX_CHANGES, parcels
from kvlease.registry.etcd_codec import Keys
from kvlease.registry.etcd_store import EtcdStore, EtcdStoreSettings
from kvlease.registry.store import Followed, Store
from kvlease.registry.table_changes import Batch, EngineGone, LeaseGone, LeasePut, StoreChange
from kvlease.registry.values import EndReason, LeaseId

from tests.etcd.cluster import Cluster
from tests.integration.store_conformance import LIMIT_S, StoreConformance, engine_put, lease_put, take_changes


def store(cluster: Cluster, prefix: bytes, name: str = "one", *, engine_ttl_s: int = 60) -> EtcdStore:
    settings = EtcdStoreSettings(
        endpoints=tuple(cluster.endpoints),
        credentials=EtcdCredentials(),
        prefix=prefix.decode(),
        engine_ttl_s=engine_ttl_s,
    )
    return EtcdStore(settings, replica_id=name)


async def next_batch(followed: Followed) -> Batch:
    async with asyncio.timeout(LIMIT_S):
        async for batch in followed.batches:
            return batch
    raise AssertionError("batches have no end")


class TestEtcdStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _cluster(self, solo: Cluster, prefix: bytes) -> None:
        self.solo, self.prefix, self.used = solo, prefix, 0

    @asynccontextmanager
    async def replicas(self) -> AsyncIterator[tuple[Store, Store]]:
        self.used += 1
        prefix = self.prefix + str(self.used).encode() + b"/"
        async with store(self.solo, prefix, "one") as one, store(self.solo, prefix, "two") as two:
            yield one, two


async def test_a_commit_whose_answer_is_lost_happens_once(trio: Cluster, prefix: bytes) -> None:
    """The leader dies again and again while commits go on: nothing is doubled, nothing lost, the order holds."""
    owner = engine_put()
    async with store(trio, prefix, "one") as mine, store(trio, prefix, "two") as theirs, theirs.follow() as followed:
        wanted = [lease_put(f"lease-{i}", owner) for i in range(60)]

        async def write() -> None:
            changes: tuple[StoreChange, ...] = (owner, *wanted)
            for change in changes:
                batch = (change,)
                while True:
                    try:
                        await mine.commit(batch)
                        break
                    except RegistryUnavailable:
                        await asyncio.sleep(0.05)

        writing = asyncio.create_task(write())
        for _ in range(2):
            await asyncio.sleep(0.3)
            leader = await trio.leader()
            leader.kill()
            await asyncio.sleep(1.0)
            leader.start()
        await asyncio.wait_for(writing, 60)
        seen = [change for change, _ in await take_changes(followed, 61)]
        assert seen == [owner, *wanted]


async def test_what_nobody_keeps_goes_by_itself_and_says_so(solo: Cluster, prefix: bytes) -> None:
    owner = engine_put()
    async with store(solo, prefix, "one") as mine:
        async with store(solo, prefix, "two", engine_ttl_s=1) as theirs:
            await theirs.commit((owner, lease_put("one", owner)))
        async with mine.follow() as followed:  # its home is closed and keeps nothing any more
            batch = await next_batch(followed)
    assert batch.expired
    assert not batch.own
    gone = EngineGone(engine_id=owner.engine.engine_id, incarnation=owner.engine.incarnation)
    assert set(batch.changes) == {gone, LeaseGone(lease_id=LeaseId("one"), reason=EndReason.LENDER_LOST)}


async def test_the_next_home_takes_over_what_the_last_one_kept(solo: Cluster, prefix: bytes) -> None:
    owner = engine_put()
    async with store(solo, prefix, "one", engine_ttl_s=2) as one, one.follow() as followed:
        async with store(solo, prefix, "two", engine_ttl_s=2) as two:
            await two.commit((owner, lease_put("one", owner)))
            await take_changes(followed, 2)
        await one.commit((owner,))
        await take_changes(followed, 1)
        await asyncio.sleep(4)  # twice as long as etcd would have kept it
        async with one.follow() as again:
            assert again.view.leases == (lease_put("one", owner),)


async def test_a_former_home_keeps_nothing_of_an_engine_that_moved_while_it_was_away(
    solo: Cluster, prefix: bytes
) -> None:
    """It did not see the move, only what there is when it loads; and then the engine's new home goes too."""
    owner = engine_put()
    async with store(solo, prefix, "one", engine_ttl_s=2) as one:
        await one.commit((owner, lease_put("one", owner)))
        async with store(solo, prefix, "two", engine_ttl_s=2) as two:
            await two.commit((owner,))
        async with one.follow() as followed:
            gone = {LeaseGone(lease_id=LeaseId("one"), reason=EndReason.LENDER_LOST)}
            assert gone <= set((await next_batch(followed)).changes)


async def test_an_expired_lease_of_etcds_is_had_anew(solo: Cluster, prefix: bytes, etcd: EtcdClient) -> None:
    owner = engine_put()
    async with store(solo, prefix) as mine, mine.follow() as followed:
        await mine.commit((owner, lease_put("one", owner)))
        await take_changes(followed, 2)
        keys = Keys(prefix.decode())
        found = (await etcd.get(keys.engine(owner.engine.engine_id, owner.engine.incarnation))).kvs
        await etcd.revoke(found[0].lease)
        assert (await next_batch(followed)).expired
        changes = (owner, lease_put("two", owner))
        with pytest.raises(RegistryUnavailable, match="expired"):
            await mine.commit(changes)
        await mine.commit(changes)
        assert [change for change, _ in await take_changes(followed, 2)] == list(changes)


async def test_a_transaction_that_was_not_done_is_not_taken_for_one_that_was(
    solo: Cluster, prefix: bytes, etcd: EtcdClient
) -> None:
    """In a restored etcd a replica's batch key may have just the version that its next transaction would make."""
    owner = engine_put()
    async with store(solo, prefix) as mine, mine.follow() as followed:
        await mine.commit((owner,))
        (batch_key,) = (await etcd.get(prefix + b"batches/", end=prefix + b"batches0")).kvs
        await etcd.put(batch_key.key, batch_key.value, lease=batch_key.lease)
        changes = (lease_put("one", owner),)
        with pytest.raises(RegistryUnavailable, match="did not take"):
            await mine.commit(changes)
        await mine.commit(changes)
        assert [change for change, _ in await take_changes(followed, 2)] == [owner, *changes]


async def test_compaction_while_away_means_load_again(solo: Cluster, prefix: bytes, etcd: EtcdClient) -> None:
    """A replica that is stopped while etcd forgets what it has not read is told, and finds everything when it loads."""
    owner = engine_put()
    async with store(solo, prefix, "one") as mine, store(solo, prefix, "two") as theirs:
        async with mine.follow() as followed:
            await theirs.commit((owner,))
            await take_changes(followed, 1)
            member = await solo.leader()
            member.kill()
            member.start()
            await member.ready()
            for i in range(5):
                await _commit(theirs, (lease_put(f"lease-{i}", owner),))
            await etcd.compact((await etcd.get(prefix)).header.revision)
            with pytest.raises(Compacted):
                await take_changes(followed, 6)
        async with mine.follow() as again:
            assert len(again.view.leases) == 5


async def test_one_value_that_cannot_be_read_hides_no_other(solo: Cluster, prefix: bytes, etcd: EtcdClient) -> None:
    owner = engine_put()
    keys = Keys(prefix.decode())
    async with store(solo, prefix) as mine:
        await mine.commit((owner, lease_put("good", owner)))
        await etcd.put(keys.lease(LeaseId("broken")), b"\xff\xff not ours")
        await etcd.put(keys.lease(LeaseId("newer")), b"\x08\x63")  # version 99
        async with mine.follow() as followed:
            assert followed.view.leases == (lease_put("good", owner),)
            await etcd.put(keys.lease(LeaseId("worse")), b"\xff")
            await mine.commit((lease_put("next", owner),))
            seen = [change for change, _ in await take_changes(followed, 1)]
            assert seen == [lease_put("next", owner)]


def test_a_lease_and_those_it_supersedes_are_one_transaction() -> None:
    owner = engine_put()
    changes: list[LeasePut | LeaseGone] = []
    for i in range(MAX_CHANGES):
        changes.append(lease_put(f"new-{i}", owner))
        changes.append(LeaseGone(lease_id=LeaseId(f"old-{i}"), reason=EndReason.SUPERSEDED))
    keys = Keys("/test/")
    made = list(parcels(keys, "me", changes))
    assert len(made) == 2
    for parcel in made:
        puts = {keys.lease_of(key).removeprefix("new-") for key in parcel.puts}
        assert puts == {keys.lease_of(key).removeprefix("old-") for key in parcel.deletes}
        assert len(parcel.operations(dict.fromkeys(parcel.owners, 1), 1)) <= 128  # type: ignore[arg-type]


async def _commit(to: Store, changes: tuple[LeasePut, ...]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await to.commit(changes)
            except RegistryUnavailable:
                await asyncio.sleep(0.05)
