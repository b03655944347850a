"""One replica's end of the store: `EtcdStore` reduced to its rules, on a network that delays, loses and cuts.

What becomes of changes (parcels) and what a revision means (reader) are the product's; so is the rule that each
transaction compares how often this writer's batch key was written, and is looked up and sent again while it is in
doubt. A request that its sender gave up on may still take effect, also after the sender has crashed.
Invariant: commits of one writer take effect in order and once, as long as its batch key is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from itertools import count
from typing import Final, TypeVar

from kvlease.etcd import Changes as EtcdChanges
from kvlease.etcd import KeyValue, LeaseId, PutOp, Revision
from kvlease.registry.etcd_batches import MIN_SHARED_TTL_S, Owner, Parcel, Unfinished, own_batch_key
from kvlease.registry.etcd_codec import Keys, encode_beats, transaction_of
from kvlease.registry.etcd_reader import EtcdReader
from kvlease.registry.table_changes import Batch, EngineBeat, EngineGone, EnginePut, StoreChange, StoredView
from kvlease.registry.values import EngineId, Incarnation

from tests.sim.etcd import Entry, Etcd, LeaseOver
from tests.sim.network import Network
from tests.sim.plan import Plan
from tests.sim.store_watch import Cut, Watch
from tests.sim.world import Action, Party

KEYS: Final = Keys("/kvlease/")
_TIMEOUT_MS: Final = 40
"""Of one request."""
_RETRY_MS: Final = 10

Answer = TypeVar("Answer")


class StoreEnd:
    """Of one life of a replica; everything it waits for dies with that life."""

    def __init__(self, etcd: Etcd, network: Network, party: Party, plan: Plan, cut: Cut, *, pace_ms: int) -> None:
        """`pace_ms`: how late this replica may hear of a revision when all is well."""
        self._etcd: Final = etcd
        self._network: Final = network
        self._party: Final = party
        self._plan: Final = plan
        self._cut: Final = cut
        self._pace_ms: Final = pace_ms
        self._life: Final = party.life
        self._writer: Final = f"{party.name}.{party.life}"
        self._kept: Final[set[LeaseId]] = set()
        self._keeping: Final[set[LeaseId]] = set()
        self._engines: Final[dict[EngineId, set[Incarnation]]] = {}
        self._written = 0
        self._transactions: Final = count(1)
        self._unfinished: Unfinished | None = None
        self.watch: Watch | None = None
        self._keep_all()

    # -- writing --------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[StoreChange], done: Callable[[bool], None]) -> None:
        """`done` hears whether they are known to be kept; if not, the same list is to be committed again."""
        unfinished = self._unfinished
        if unfinished is None or unfinished.changes is not changes:
            unfinished = self._unfinished = Unfinished(KEYS, self._writer, changes, self._transactions)
        if unfinished.parcel is None:
            self._unfinished = None
            done(True)
            return

        def sent(kept: bool) -> None:
            if kept:
                unfinished.go_on()
                self.commit(changes, done)
            else:
                done(False)

        self._send(unfinished.parcel, sent)

    def beat(self, number: int, beats: Sequence[EngineBeat]) -> None:
        """May come to nothing."""
        put = PutOp(key=KEYS.beat(self._writer), value=encode_beats(number, beats), lease=self._replica_lease)

        def write() -> bool:
            try:
                self._etcd.transact([put])
            except LeaseOver:
                return False
            return True

        def written(kept: bool) -> None:
            if not kept:
                self._kept.discard(self._replica_lease)

        self._with_leases(
            {self._replica_lease: self._plan.replica_ttl_ms}, lambda: self._ask(write, written, _nothing), _nothing
        )

    def _send(self, parcel: Parcel, done: Callable[[bool], None]) -> None:
        key = own_batch_key(KEYS, self._writer)
        for engine_id, incarnation in parcel.hellos:
            self._engines.setdefault(engine_id, set()).add(incarnation)
        leases = {owner: self._lease_of(owner) for owner in parcel.owners}
        ttls = {lease: self._ttl_ms(owner) for owner, lease in leases.items()}
        operations = parcel.operations(leases, self._replica_lease)
        written = self._written

        def write() -> bool | None:
            if self._etcd.version(key) != written:
                return False
            try:
                self._etcd.transact(operations)
            except LeaseOver:
                return None
            return True

        def answered(kept: bool | None) -> None:
            if kept:
                self._written += 1
                done(True)
            elif kept is None:
                self._kept.clear()  # some lease is gone: all are looked at again when this is repeated
                done(False)
            else:
                find_out()

        def find_out() -> None:
            self._ask(lambda: self._etcd.kvs.get(key), found, lambda: done(False))

        def found(kv: KeyValue | None) -> None:
            self._written = 0 if kv is None else kv.version
            done(kv is not None and transaction_of(kv.value) == parcel.transaction)

        self._with_leases(ttls, lambda: self._ask(write, answered, find_out), lambda: done(False))

    # -- leases ---------------------------------------------------------------------------------------------------

    @property
    def _replica_lease(self) -> LeaseId:
        return _lease_id("replica", self._writer)

    def _lease_of(self, owner: Owner) -> LeaseId:
        if owner.shared_ttl_s is not None:
            return _lease_id("shared", self._writer, str(owner.shared_ttl_s))
        if owner.engine is None:
            return self._replica_lease
        engine_id, incarnation = owner.engine
        return _lease_id("engine", engine_id, incarnation.hex())

    def _ttl_ms(self, owner: Owner) -> int:
        if owner.shared_ttl_s is not None:
            return 1_000 * owner.shared_ttl_s
        return self._plan.engine_ttl_ms if owner.engine is not None else self._plan.replica_ttl_ms

    def _with_leases(self, ttls: dict[LeaseId, int], then: Action, failed: Action) -> None:
        missing = {lease: ttl_ms for lease, ttl_ms in ttls.items() if lease not in self._kept}
        if not missing:
            then()
            return

        def grant() -> bool:
            for lease, ttl_ms in missing.items():
                self._etcd.grant(lease, ttl_ms, unkept=ttl_ms >= 1_000 * MIN_SHARED_TTL_S)
            return True

        def granted(_: bool) -> None:
            ours = {_lease_id("engine", x, one.hex()) for x, ones in self._engines.items() for one in ones}
            keep = missing.keys() & (ours | {self._replica_lease})  # not what is written late
            self._kept.update(keep)
            self._keeping.update(keep)
            then()

        self._ask(grant, granted, failed)

    def _release(self, engine_id: EngineId, incarnation: Incarnation | None = None) -> None:
        """This incarnation, or every one of the engine, is not ours to keep any more."""
        ours = self._engines.get(engine_id, set())
        for one in [incarnation] if incarnation is not None else list(ours):
            ours.discard(one)
            lease = _lease_id("engine", engine_id, one.hex())
            self._kept.discard(lease)
            self._keeping.discard(lease)
        if not ours:
            self._engines.pop(engine_id, None)

    def _account(self, found: Batch) -> None:
        """By the store's order: whose engines are ours to keep."""
        for change in found.changes:
            if isinstance(change, EnginePut) and not found.own:
                self._release(change.engine.engine_id)
            elif isinstance(change, EnginePut):
                engine_id, incarnation = change.engine.engine_id, change.engine.incarnation
                self._engines.setdefault(engine_id, set()).add(incarnation)
                self._kept.add(_lease_id("engine", engine_id, incarnation.hex()))
                self._keeping.add(_lease_id("engine", engine_id, incarnation.hex()))
            elif isinstance(change, EngineGone) and found.own:
                self._release(change.engine_id, change.incarnation)

    def _keep_all(self) -> None:
        kept = sorted(self._keeping)

        def renew() -> list[LeaseId]:
            return [lease for lease in kept if not self._etcd.keep_alive(lease)]

        def renewed(lost: list[LeaseId]) -> None:
            self._keeping.difference_update(lost)
            self._kept.difference_update(lost)

        if kept:
            self._ask(renew, renewed, _nothing)
        shortest_ms = min(self._plan.engine_ttl_ms, self._plan.replica_ttl_ms)
        self._network.world.after(shortest_ms // 3, self._party, self._keep_all)

    # -- reading --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The replica is gone."""
        self._leave()

    def follow(
        self, loaded: Callable[[StoredView, int], None], batch: Callable[[Batch], None], over: Action, failed: Action
    ) -> None:
        """Everything, then every batch, until `over`; or nothing, and `failed`.

        With everything goes how many changes of a commit that is to be repeated were done by then.
        """
        reader = EtcdReader(KEYS, self._writer)

        def read() -> tuple[tuple[KeyValue, ...], Watch]:
            revision, kvs = self._etcd.everything()
            watch = Watch(self._network, self._party, self._cut, self._pace_ms, revision, self._etcd.history)
            self._etcd.watchers.append(watch)
            return kvs, watch

        def took(entry: Entry) -> None:
            found = reader.batch(EtcdChanges(revision=Revision(entry.revision), events=entry.events))
            if found is None:
                return
            self._account(found)
            batch(found)

        def got(answer: tuple[tuple[KeyValue, ...], Watch]) -> None:
            kvs, watch = answer
            self._leave()
            self.watch = watch
            reader.load(kvs)
            view = reader.view()
            for engine_id in self._engines.keys() - {x.put.engine.engine_id for x in view.engines if x.own}:
                self._release(engine_id)
            unfinished = self._unfinished
            loaded(view, unfinished.kept(reader.transaction) if unfinished is not None else 0)
            watch.open(took, over)

        self._ask(read, got, failed)

    def _leave(self) -> None:
        if self.watch in self._etcd.watchers:
            self._etcd.watchers.remove(self.watch)

    # -- requests -------------------------------------------------------------------------------------------------

    def _ask(self, execute: Callable[[], Answer], answered: Callable[[Answer], None], failed: Action) -> None:
        """One request: `answered`, or `failed` after the time limit, and then nobody knows whether it was executed."""
        world, cut, sent_ms = self._network.world, self._cut, self._network.world.now_ms
        history = self._etcd.history

        def late() -> None:
            if self._etcd.history == history:  # else it was on its way to members that are no more
                execute()

        def hear(delay_ms: int, action: Action) -> None:
            if self._party.life == self._life:  # or its asker has crashed
                world.after(max(1, delay_ms), self._party, action)

        def give_up() -> None:
            hear(sent_ms + _TIMEOUT_MS - world.now_ms, failed)

        def arrive() -> None:
            answer = execute()
            back_ms = self._latency()
            late = world.now_ms + back_ms - sent_ms > _TIMEOUT_MS
            if late or cut.from_store_ms > world.now_ms:
                give_up()
            else:
                hear(back_ms, lambda: answered(answer))

        there_ms = self._latency()
        if cut.to_store_ms > world.now_ms:
            give_up()
            if world.chance(0.3):  # it waits in some buffer, and gets through in the end
                world.hardware(cut.to_store_ms - world.now_ms + there_ms, late)
        elif there_ms >= _TIMEOUT_MS:
            give_up()
            world.hardware(there_ms, late)
        else:
            world.hardware(there_ms, arrive)

    def _latency(self) -> int:
        world, faults = self._network.world, self._network.faults
        if world.chance(faults.store_slow):
            return world.between(1, 2 * faults.long_ms)
        return world.between(1, 2)


@cache
def _lease_id(*names: str) -> LeaseId:
    digest = sha256("\0".join(names).encode()).digest()
    return LeaseId(int.from_bytes(digest[:8], "big") >> 2 | 1)


def _nothing() -> None:
    return
