"""One incarnation of an engine as the registry knows it: its session, its clock, how long it has been silent.

Pure; time is a parameter. Leases hang here by id and in order of their deadlines, but what a lease *means* is
decided in `table.py`.
Invariant: a lease is valid while its generation is at least `valid_from`. Raising `valid_from` withdraws any number
of leases at once; they are then ended one by one, a bounded number a tick.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvlease.registry.errors import InvalidRequest, Limit
from kvlease.registry.table_changes import EngineBeat, SessionId
from kvlease.registry.table_leases import HeldLease, Tally
from kvlease.registry.table_limits import HEARTBEAT_WINDOW, TableLimits
from kvlease.registry.values import (
    FINGERPRINT_BYTES,
    INCARNATION_BYTES,
    MAX_FINGERPRINT_FIELDS,
    MAX_LABELS,
    EndReason,
    Engine,
    EngineStatus,
    LeaseId,
    TenantId,
    is_id,
)
from sortedcontainers import SortedList


class LenderClock:
    """The lender's monotonic clock, estimated from what its heartbeats said.

    A message can only be late, never early, so each heartbeat gives a lower bound on the lender's present and the
    greatest bound is the best one. Over a window, because the two clocks also drift.
    """

    __slots__ = ("_offset_ms", "_offsets_ms")

    def __init__(self) -> None:
        self._offsets_ms: deque[int] = deque(maxlen=HEARTBEAT_WINDOW)
        self._offset_ms = 0

    def hear(self, now_lender_ms: int, now_ms: int) -> None:
        self._offsets_ms.append(now_lender_ms - now_ms)
        self._offset_ms = max(self._offsets_ms)

    def present_ms(self, now_ms: int) -> int:
        """The lender's clock at our `now_ms`."""
        return now_ms + self._offset_ms

    def ours_ms(self, lender_ms: int) -> int:
        """Our clock at the lender's `lender_ms`."""
        return lender_ms - self._offset_ms


class EngineState:
    """An incarnation and its leases. Changed by `LeaseTable` only."""

    __slots__ = (
        "announce",
        "awaited_ms",
        "clock",
        "deadlines",
        "departed",
        "elsewhere",
        "engine",
        "expected_seq",
        "free_blocks",
        "generation",
        "heard_ms",
        "hello_ms",
        "home_heard_ms",
        "leases",
        "presenting",
        "session",
        "suspect_told",
        "tallies",
        "total_blocks",
        "unnamed",
        "valid_from",
        "void_reason",
    )

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.session: SessionId | None = None
        self.expected_seq = 0
        self.clock: Final = LenderClock()
        self.hello_ms = 0
        """The lender's clock in the newest hello that is known: of two sessions the later one is the lender's."""
        self.heard_ms = 0
        self.free_blocks = 0
        self.total_blocks = 0
        self.leases: dict[LeaseId, HeldLease] = {}
        """In order of generation, so that withdrawn leases are at the front."""
        self.deadlines: SortedList[tuple[int, LeaseId]] = SortedList()
        """Live leases only, on the lender's clock."""
        self.tallies: dict[TenantId, Tally] = {}
        self.generation = 0
        self.valid_from = 0
        self.void_reason = EndReason.LENDER_LOST
        """Why withdrawn leases end."""
        self.presenting = False
        """Between a hello and the last part of its snapshot."""
        self.unnamed: dict[LeaseId, None] = {}
        """Meanwhile: leases whose end was owed at the hello and that the snapshot has not named so far."""
        self.departed = False
        self.elsewhere = False
        """Another replica is the engine's home: what is here is a copy."""
        self.home_heard_ms: int | None = None
        """When that replica last said that the engine has its session there."""
        self.awaited_ms: int | None = None
        """`hello_ms` of the newest hello taken here, while its place in the store's order is not known. A time and no
        count: the store may make one write of several."""
        self.suspect_told = False
        self.announce: deque[LeaseId] = deque()
        """Leases whose watchers are still to be told of `suspect_told`."""

    def begin(self, engine: Engine, session: SessionId, hello_ms: int) -> None:
        """A session opens: its hello was message 1, and a snapshot is to follow."""
        self.engine = engine
        self.hello_ms = hello_ms
        self.session = session
        self.expected_seq = 2
        self.generation += 1
        self.presenting = True

    def hear(self, now_lender_ms: int, now_ms: int) -> None:
        """A sign of life, and what the lender's clock was when it was sent."""
        self.clock.hear(now_lender_ms, now_ms)
        self.heard_ms = max(self.heard_ms, now_ms)
        if self.suspect_told:
            self.tell_suspect(suspect=False)

    def hear_from_home(self, beat: EngineBeat, now_ms: int, suspect_after_ms: int) -> None:
        """The replica that has the session says how the lender is."""
        self.clock.hear(beat.now_lender_ms, now_ms)
        self.home_heard_ms = now_ms
        self.heard_ms = max(self.heard_ms, now_ms - beat.silent_ms)
        self.free_blocks, self.total_blocks = beat.free_blocks, beat.total_blocks
        if self.suspect_told and not self.is_suspect(now_ms, suspect_after_ms):
            self.tell_suspect(suspect=False)

    def beat(self, now_ms: int) -> EngineBeat:
        """For the replicas that hold a copy."""
        return EngineBeat(
            engine_id=self.engine.engine_id,
            incarnation=self.engine.incarnation,
            now_lender_ms=self.clock.present_ms(now_ms),
            silent_ms=self.silent_ms(now_ms),
            free_blocks=self.free_blocks,
            total_blocks=self.total_blocks,
        )

    def is_connected(self, now_ms: int, home_silent_ms: int) -> bool:
        """Whether the engine has an open session, here or, as far as we were told lately, at its home."""
        if not self.elsewhere:
            return self.session is not None
        return self.home_heard_ms is not None and now_ms - self.home_heard_ms < home_silent_ms

    def tell_suspect(self, *, suspect: bool) -> None:
        """Watchers are to be told, lease by lease, that the lender is silent, or back."""
        self.suspect_told = suspect
        self.announce = deque(self.leases)

    def silent_ms(self, now_ms: int) -> int:
        return max(0, now_ms - self.heard_ms)

    def is_suspect(self, now_ms: int, suspect_after_ms: int) -> bool:
        return self.departed or now_ms - self.heard_ms >= suspect_after_ms

    def remaining_ms(self, lease: HeldLease, now_ms: int) -> int:
        return lease.deadline_ms - self.clock.present_ms(now_ms)

    def hold(self, lease: HeldLease) -> None:
        """Take the lease in, at the current generation."""
        publication = lease.publication
        lease.generation = self.generation
        self.leases[publication.lease_id] = lease
        if not lease.lapsed:
            self.deadlines.add((lease.deadline_ms, publication.lease_id))
        self.tallies.setdefault(publication.tenant, Tally()).add(lease)

    def let_go(self, lease: HeldLease) -> None:
        publication = lease.publication
        del self.leases[publication.lease_id]
        if not lease.lapsed:
            self.deadlines.remove((lease.deadline_ms, publication.lease_id))
        tally = self.tallies[publication.tenant]
        tally.remove(lease)
        if not tally.leases:
            del self.tallies[publication.tenant]

    def retime(self, lease: HeldLease, *, deadline_ms: int, lapsed: bool) -> None:
        """Another deadline or state; the lease stays in its generation."""
        tally = self.tallies[lease.publication.tenant]
        tally.remove(lease)
        if not lease.lapsed:
            self.deadlines.remove((lease.deadline_ms, lease.publication.lease_id))
        lease.deadline_ms, lease.lapsed = deadline_ms, lapsed
        tally.add(lease)
        if not lapsed:
            self.deadlines.add((deadline_ms, lease.publication.lease_id))

    def present(self, lease: HeldLease) -> None:
        """The lender says that it still holds the lease: move it to the current generation."""
        del self.leases[lease.publication.lease_id]
        lease.generation = self.generation
        self.leases[lease.publication.lease_id] = lease

    def withdraw(self, reason: EndReason, *, keep_current: bool) -> None:
        """All leases, or all that were not presented in the current generation, are valid no longer."""
        self.valid_from = self.generation if keep_current else self.generation + 1
        self.void_reason = reason

    def withdrawn(self, limit: int) -> list[HeldLease]:
        """At most `limit` of the leases that are valid no longer and not yet ended."""
        found: list[HeldLease] = []
        for lease in self.leases.values():
            if lease.generation >= self.valid_from or len(found) >= limit:
                break
            found.append(lease)
        return found

    def status(self, now_ms: int, limits: TableLimits) -> EngineStatus:
        return EngineStatus(
            engine=self.engine,
            connected=self.is_connected(now_ms, limits.home_silent_ms),
            suspect=self.is_suspect(now_ms, limits.suspect_after_ms),
            silent_ms=self.silent_ms(now_ms),
            leases=sum(tally.leases for tally in self.tallies.values()),
            leased_blocks=sum(tally.live_blocks for tally in self.tallies.values()),
            free_blocks=self.free_blocks,
            total_blocks=self.total_blocks,
        )

    def check(self) -> None:
        """Raises AssertionError if an index of this engine disagrees with its leases."""
        name = self.engine.engine_id
        generations = [lease.generation for lease in self.leases.values()]
        assert generations == sorted(generations), f"order of generations of {name}"
        expected = sorted((x.deadline_ms, i) for i, x in self.leases.items() if not x.lapsed)
        assert list(self.deadlines) == expected, f"deadlines of {name}"
        tallies: dict[TenantId, Tally] = {}
        for lease_id, lease in self.leases.items():
            assert lease.holder is self, f"holder of {lease_id}"
            assert lease.publication.lease_id == lease_id, f"id of {lease_id}"
            tallies.setdefault(lease.publication.tenant, Tally()).add(lease)
        assert self.tallies == tallies, f"tallies of {name}"
        assert not (self.departed and self.session is not None), f"session of {name}"
        assert not (self.elsewhere and self.session is not None), f"home of {name}"


def validate_engine(engine: Engine) -> None:
    """Raises InvalidRequest, naming the field and the limit, if the engine breaks the contract."""
    if not is_id(engine.engine_id):
        raise InvalidRequest("engine_id is not an id", field="engine.engine_id", limit=Limit.ID)
    if len(engine.incarnation) != INCARNATION_BYTES:
        raise InvalidRequest(f"incarnation must be {INCARNATION_BYTES} bytes", field="engine.incarnation")
    if len(engine.fingerprint.hash) not in (0, FINGERPRINT_BYTES):
        raise InvalidRequest(f"fingerprint hash must be {FINGERPRINT_BYTES} bytes", field="engine.fingerprint.hash")
    if len(engine.fingerprint.fields) > MAX_FINGERPRINT_FIELDS:
        raise InvalidRequest(
            "too many fingerprint fields", field="engine.fingerprint.fields", limit=Limit.FINGERPRINT_FIELDS
        )
    if len(engine.labels) > MAX_LABELS:
        raise InvalidRequest("too many labels", field="engine.labels", limit=Limit.LABELS)
