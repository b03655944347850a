"""What every store must do, as tests: subclass `StoreConformance` and say how two replicas of one store are opened.

Nothing here knows which store it is. Waits end after LIMIT_S.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager

from kvlease.registry.errors import Compacted
from kvlease.registry.store import MAX_BACKLOG, Followed, Store
from kvlease.registry.table_changes import (
    AliasPut,
    Batch,
    EndHeard,
    EndOwed,
    EngineBeat,
    EngineGone,
    EnginePut,
    LeaseGone,
    LeasePut,
    RenewalAsked,
    RenewalRefused,
    StoreChange,
)
from kvlease.registry.values import (
    Alias,
    ConversationId,
    EndReason,
    Engine,
    EngineId,
    Fingerprint,
    Incarnation,
    LeaseId,
    OnDeadline,
    Publication,
    Record,
    RenewStatus,
    TenantId,
)

LIMIT_S = 10.0
FINGERPRINT = Fingerprint(hash=b"f" * 16, fields=(("kv_dtype", "fp16"),))


def _gone(*names: str) -> tuple[StoreChange, ...]:
    return tuple(LeaseGone(lease_id=LeaseId(name), reason=EndReason.RELEASED) for name in names)


def engine_put(name: str = "decode-0", run: int = 0) -> EnginePut:
    engine = Engine(
        engine_id=EngineId(name),
        incarnation=Incarnation(bytes([run]) * 16),
        api_url=f"http://{name}:8000",
        version="1",
        fingerprint=FINGERPRINT,
        labels=(("ttl_ms", "480000"),),
    )
    return EnginePut(engine=engine, now_lender_ms=5_000)


def lease_put(name: str, owner: EnginePut, *, deadline_ms: int = 77_000) -> LeasePut:
    publication = Publication(
        lease_id=LeaseId(name),
        tenant=TenantId("t"),
        conversation=ConversationId("chat"),
        stride_tokens=64,
        block_count=2,
        size_bytes=1_000,
        deadline_ms=deadline_ms,
        on_deadline=OnDeadline.LAPSE,
        fingerprint_hash=FINGERPRINT.hash,
        record=Record(digests=b"d" * 32, body=name.encode()),
        traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01",
    )
    return LeasePut(engine_id=owner.engine.engine_id, incarnation=owner.engine.incarnation, publication=publication)


def end_owed(name: str, owner: EnginePut) -> EndOwed:
    return EndOwed(
        lease_id=LeaseId(name),
        engine_id=owner.engine.engine_id,
        incarnation=owner.engine.incarnation,
        reason=EndReason.RELEASED,
        ttl_ms=3_600_000,
    )


async def take_changes(followed: Followed, count: int) -> list[tuple[StoreChange, bool]]:
    """The next `count` changes, and whether they are our own."""
    seen: list[tuple[StoreChange, bool]] = []
    async with asyncio.timeout(LIMIT_S):
        async for batch in followed.batches:
            seen.extend((change, batch.own) for change in batch.changes)
            if len(seen) >= count:
                return seen
    raise AssertionError("batches have no end")


async def _beat(followed: Followed) -> Batch:
    async with asyncio.timeout(LIMIT_S):
        async for batch in followed.batches:
            if batch.beats or batch.beat_number is not None:
                return batch
    raise AssertionError("batches have no end")


class StoreConformance(ABC):
    """The suite."""

    @abstractmethod
    def replicas(self) -> AbstractAsyncContextManager[tuple[Store, Store]]:
        """Two replicas' ends of one empty store."""

    async def test_it_is_shared(self) -> None:
        async with self.replicas() as (mine, theirs):
            assert mine.shared
            assert theirs.shared

    async def test_others_are_seen_in_order_and_once(self) -> None:
        async with self.replicas() as (mine, theirs), mine.follow() as followed:
            await theirs.commit(_gone("a", "b"))
            await theirs.commit(_gone("c"))
            assert await take_changes(followed, 3) == [(x, False) for x in _gone("a", "b", "c")]
            await theirs.commit(_gone("d"))
            assert await take_changes(followed, 1) == [(x, False) for x in _gone("d")]

    async def test_own_batches_come_back_as_own_in_the_order_of_all(self) -> None:
        async with self.replicas() as (mine, theirs), mine.follow() as one, theirs.follow() as two:
            await mine.commit(_gone("mine"))
            await theirs.commit(_gone("theirs"))
            await mine.commit(_gone("mine-too"))
            assert [own for _, own in await take_changes(one, 3)] == [True, False, True]
            assert [own for _, own in await take_changes(two, 3)] == [False, True, False]

    async def test_every_change_arrives_as_it_was_written(self) -> None:
        owner = engine_put()
        written: tuple[StoreChange, ...] = (
            owner,
            lease_put("one", owner, deadline_ms=77_000),
            AliasPut(tenant=TenantId("t"), alias=Alias(b"a" * 16), conversation=ConversationId("c"), ttl_ms=60_000),
            RenewalAsked(lease_id=LeaseId("one"), ttl_ms=9_000),
            RenewalRefused(lease_id=LeaseId("one"), status=RenewStatus.AT_LIMIT, remaining_ms=-5),
            LeaseGone(lease_id=LeaseId("one"), reason=EndReason.SUPERSEDED),
            end_owed("one", owner),
            EndHeard(lease_id=LeaseId("one")),
            EngineGone(engine_id=EngineId("decode-9"), incarnation=owner.engine.incarnation),
        )
        async with self.replicas() as (mine, theirs), mine.follow() as followed:
            for change in written:
                await theirs.commit((change,))
            assert [change for change, _ in await take_changes(followed, len(written))] == list(written)

    async def test_whoever_comes_later_finds_what_there_is(self) -> None:
        mine_put, theirs_put = engine_put("decode-0"), engine_put("decode-1")
        gone = lease_put("gone", theirs_put)
        kept = lease_put("kept", theirs_put, deadline_ms=50_000)
        moved = lease_put("kept", theirs_put, deadline_ms=90_000)
        alias = AliasPut(tenant=TenantId("t"), alias=Alias(b"a" * 16), conversation=ConversationId("c"), ttl_ms=60_000)
        async with self.replicas() as (mine, theirs):
            await mine.commit((mine_put,))
            await theirs.commit((theirs_put, gone, kept, alias))
            await theirs.commit((LeaseGone(lease_id=LeaseId("gone"), reason=EndReason.EXPIRED), moved))
            async with mine.follow() as followed:
                view = followed.view
                assert {(x.put, x.own) for x in view.engines} == {(mine_put, True), (theirs_put, False)}
                assert view.leases == (moved,)
                assert [(x.alias, x.conversation) for x in view.aliases] == [(alias.alias, alias.conversation)]
                assert 0 < view.aliases[0].ttl_ms <= alias.ttl_ms
                await theirs.commit(_gone("kept"))
                assert await take_changes(followed, 1) == [(x, False) for x in _gone("kept")]
            await theirs.commit(
                (EngineGone(engine_id=EngineId("decode-1"), incarnation=theirs_put.engine.incarnation),)
            )
            async with mine.follow() as followed:
                assert [x.put for x in followed.view.engines] == [mine_put]
                assert followed.view.leases == ()

    async def test_an_end_that_is_owed_is_found_until_it_is_confirmed(self) -> None:
        owner = engine_put()
        async with self.replicas() as (mine, theirs):
            await theirs.commit((owner, lease_put("one", owner), lease_put("two", owner)))
            async with mine.follow() as followed:
                both = tuple(change for name in ("one", "two") for change in (end_owed(name, owner), *_gone(name)))
                await theirs.commit(both)
                assert {x for x, _ in await take_changes(followed, 4)} == set(both)
            async with mine.follow() as followed:
                assert set(followed.view.owed) == {end_owed("one", owner), end_owed("two", owner)}
                assert followed.view.leases == ()
            await mine.commit((EndHeard(lease_id=LeaseId("one")),))
            async with theirs.follow() as followed:
                assert followed.view.owed == (end_owed("two", owner),)

    async def test_an_engine_and_a_new_incarnation_in_one_commit(self) -> None:
        old, new = engine_put(run=1), engine_put(run=2)
        async with self.replicas() as (mine, theirs):
            await theirs.commit((old, lease_put("old", old)))
            async with mine.follow() as followed:
                gone = EngineGone(engine_id=old.engine.engine_id, incarnation=old.engine.incarnation)
                await theirs.commit((gone, new, lease_put("new", new)))
                seen = [change for change, _ in await take_changes(followed, 2)]
                assert seen[-2:] == [new, lease_put("new", new)]
            async with mine.follow() as followed:
                assert [x.put for x in followed.view.engines] == [new]
                assert lease_put("new", new) in followed.view.leases

    async def test_many_changes_in_one_commit(self) -> None:
        owner = engine_put()
        many = tuple(lease_put(f"lease-{i}", owner) for i in range(500))
        async with self.replicas() as (mine, theirs), mine.follow() as followed:
            await theirs.commit((owner, *many))
            assert [change for change, _ in await take_changes(followed, 501)] == [owner, *many]
            async with theirs.follow() as again:
                assert set(again.view.leases) == set(many)

    async def test_beats_reach_the_others_and_come_back(self) -> None:
        owner = engine_put()
        beat = EngineBeat(
            engine_id=owner.engine.engine_id,
            incarnation=owner.engine.incarnation,
            now_lender_ms=12_345,
            silent_ms=7,
            free_blocks=3,
            total_blocks=9,
        )
        async with self.replicas() as (mine, theirs), mine.follow() as one, theirs.follow() as two:
            await mine.beat(41, (beat,))
            own, other = await _beat(one), await _beat(two)
            assert own.own
            assert own.beat_number == 41
            assert other.beats == (beat,)
            assert other.beat_number is None
            assert not other.own
        async with self.replicas() as (mine, theirs):
            await theirs.commit((owner,))
            await theirs.beat(1, (beat,))
            async with mine.follow() as followed:
                assert followed.view.beats == (beat,)

    async def test_who_falls_behind_is_told_or_misses_nothing(self) -> None:
        count = MAX_BACKLOG + 2
        async with self.replicas() as (mine, theirs), mine.follow() as followed:
            for i in range(count):
                await theirs.commit(_gone(str(i)))
            try:
                seen = [change for change, _ in await take_changes(followed, count)]
            except Compacted:
                return
            assert seen == list(_gone(*map(str, range(count))))
