"""What etcd's keys and events mean to a registry: everything at one moment, then batch by batch.

Pure. One etcd revision is one batch: the batch key in it says whose it is; without one, etcd itself let keys expire (or
somebody deleted them by hand), and that decides nothing.
Invariant: a value that cannot be read is left out and logged once by key, and nothing else is lost with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvlease.etcd import Changes as EtcdChanges
from kvlease.etcd import EventKind, KeyValue, WatchItem
from kvlease.registry.etcd_codec import (
    Keys,
    Notes,
    Unreadable,
    decode_alias_put,
    decode_beats,
    decode_end_owed,
    decode_engine_put,
    decode_lease_put,
    decode_notes,
    transaction_of,
)
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
    StoreChange,
    StoredEngine,
    StoredView,
)
from kvlease.registry.values import EndReason, EngineId

MAX_LOGGED: Final = 1_024
"""Keys that were logged as unreadable and are not logged again."""

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


class EtcdReader:
    """Reads for one run of one replica."""

    def __init__(self, keys: Keys, writer: str) -> None:
        self._keys: Final = keys
        self._writer: Final = writer
        self._engines: dict[EngineId, tuple[int, StoredEngine]] = {}
        self._leases: list[LeasePut] = []
        self._owed: list[EndOwed] = []
        self._aliases: list[AliasPut] = []
        self._beats: list[EngineBeat] = []
        self._logged: set[bytes] = set()
        self.transaction = 0
        """Number of this writer's last one, as far as it is in what was loaded."""

    def load(self, kvs: Sequence[KeyValue]) -> None:
        """Some more of what there is."""
        keys = self._keys
        for kv in kvs:
            if kv.key.startswith(keys.leases):
                lease = self._read(kv, decode_lease_put)
                if lease is not None:
                    self._leases.append(lease)
            elif kv.key.startswith(keys.engines):
                engine = self._read(kv, decode_engine_put)
                if engine is not None:
                    self._newest(kv.mod_revision, *engine)
            elif kv.key.startswith(keys.ends):
                owed = self._read(kv, decode_end_owed)
                if owed is not None:
                    self._owed.append(owed)
            elif kv.key.startswith(keys.aliases):
                alias = self._read(kv, decode_alias_put)
                if alias is not None:
                    self._aliases.append(alias)
            elif kv.key.startswith(keys.beats):
                beats = self._read(kv, decode_beats)
                if beats is not None:
                    self._beats.extend(beats[1])
            elif kv.key == keys.batch(self._writer):
                self.transaction = transaction_of(kv.value)

    def view(self) -> StoredView:
        """All that was loaded, which is then forgotten here."""
        view = StoredView(
            engines=tuple(engine for _, engine in self._engines.values()),
            leases=tuple(self._leases),
            owed=tuple(self._owed),
            aliases=tuple(self._aliases),
            beats=tuple(self._beats),
        )
        self._engines, self._leases, self._owed, self._aliases, self._beats = {}, [], [], [], []
        return view

    def batch(self, item: WatchItem) -> Batch | None:
        """What a revision of etcd's says; None if nothing."""
        if not isinstance(item, EtcdChanges):
            return None
        keys = self._keys
        writer: str | None = None
        notes = Notes()
        engines: list[StoreChange] = []
        puts: list[StoreChange] = []
        gone: list[StoreChange] = []
        heard: list[StoreChange] = []
        for event in item.events:
            kv, put = event.kv, event.kind is EventKind.PUT
            if kv.key.startswith(keys.beats) and put:
                return self._beat(kv)  # alone in its revision
            if kv.key.startswith(keys.batches):
                if put:
                    writer = kv.key.removeprefix(keys.batches).decode(errors="replace")
                    notes = self._read(kv, decode_notes) or notes
            elif kv.key.startswith(keys.leases):
                if not put:
                    gone.append(LeaseGone(lease_id=keys.lease_of(kv.key), reason=EndReason.LENDER_LOST))
                elif (lease := self._read(kv, decode_lease_put)) is not None:
                    puts.append(lease)
            elif kv.key.startswith(keys.engines):
                if not put:
                    gone.extend(self._gone(kv))
                elif (engine := self._read(kv, decode_engine_put)) is not None:
                    engines.append(engine[0])
            elif kv.key.startswith(keys.ends):
                if not put:
                    heard.append(EndHeard(lease_id=keys.lease_of(kv.key)))
                elif (owed := self._read(kv, decode_end_owed)) is not None:
                    puts.append(owed)
            elif kv.key.startswith(keys.aliases) and put and (alias := self._read(kv, decode_alias_put)) is not None:
                puts.append(alias)
        if writer is None:
            return Batch(changes=(*engines, *puts, *gone, *heard), expired=True)
        said: list[StoreChange] = [*notes.engines_gone, *engines, *puts, *notes.asked, *notes.refused]
        return Batch(changes=(*said, *notes.leases_gone, *heard), own=writer == self._writer)

    def _beat(self, kv: KeyValue) -> Batch | None:
        read = self._read(kv, decode_beats)
        if read is None:
            return None
        number, beats = read
        own = kv.key == self._keys.beat(self._writer)
        return Batch(beats=beats, own=own, beat_number=number if own else None)

    def _gone(self, kv: KeyValue) -> Sequence[EngineGone]:
        try:
            engine_id, incarnation = self._keys.engine_of(kv.key)
        except Unreadable as error:
            self._note(kv.key, error)
            return ()
        return (EngineGone(engine_id=engine_id, incarnation=incarnation),)

    def _newest(self, revision: int, put: EnginePut, writer: str) -> None:
        engine_id = put.engine.engine_id
        known = self._engines.get(engine_id)
        if known is None or known[0] < revision:
            self._engines[engine_id] = revision, StoredEngine(put=put, own=writer == self._writer)

    def _read(self, kv: KeyValue, decode: Callable[[bytes], Value]) -> Value | None:
        try:
            return decode(kv.value)
        except Unreadable as error:
            self._note(kv.key, error)
            return None

    def _note(self, key: bytes, error: Unreadable) -> None:
        if key not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(key)
            _log.warning("%s in etcd is left out: %s", key.decode(errors="replace"), error)
