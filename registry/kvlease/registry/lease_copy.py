"""A client's own copy of the leases in a registry, so that "where is this conversation" is answered without a call.

Pure: what was listed and what a watch said come in, with `now_ms` of the client's clock. `lease_copy_feed.py` gets it.
Invariant: the copy is one list of the registry with every later event applied once, in order, up to `revision`; or
nothing was ever listed, and it answers nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvlease.registry.errors import Compacted, LimitReached
from kvlease.registry.values import (
    ConversationId,
    LeaseEvent,
    LeaseEvents,
    LeaseId,
    LeaseState,
    LeaseView,
    Located,
    MissReason,
    TenantId,
)

MAX_COPIED_LEASES: Final = 1_000_000
"""As many as a registry holds for one tenant by default; some 0.8 KiB each."""


@dataclass(frozen=True, slots=True)
class _Copied:
    """A lease as it was told, and when its deadline is on the client's clock, as far as the client can know."""

    lease: LeaseView
    deadline_ms: int


class CopiedLeases:
    """Leases by id and by conversation, at most `limit`: what a copy consists of, and what a list is gathered in."""

    __slots__ = ("_branches", "_by_id", "_limit")

    def __init__(self, *, limit: int = MAX_COPIED_LEASES) -> None:
        self._limit: Final = limit
        self._by_id: dict[LeaseId, _Copied] = {}
        self._branches: dict[tuple[TenantId, ConversationId], tuple[_Copied, ...]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def put(self, lease: LeaseView, *, now_ms: int) -> None:
        """Take a lease in, or its new state. Raises LimitReached, and then nothing has changed."""
        known = self._by_id.get(lease.lease_id)
        if known is None and len(self._by_id) >= self._limit:
            raise LimitReached("more leases than a copy holds", limit="max_copied_leases")
        if known is not None:
            self._detach(known.lease)
        copied = _Copied(lease, now_ms + lease.remaining_ms)
        self._by_id[lease.lease_id] = copied
        if lease.conversation is not None:
            key = (lease.tenant, lease.conversation)
            self._branches[key] = (*self._branches.get(key, ()), copied)

    def drop(self, lease_id: LeaseId) -> None:
        """The lease has ended. Idempotent."""
        known = self._by_id.pop(lease_id, None)
        if known is not None:
            self._detach(known.lease)

    def all(self, *, now_ms: int) -> list[LeaseView]:
        """Every lease, as it stands at `now_ms`."""
        return [_as_of(copied, now_ms) for copied in self._by_id.values()]

    def best(self, tenant: TenantId, conversation: ConversationId, *, now_ms: int) -> LeaseView | MissReason:
        """The longest lease of the conversation whose lender is not silent, then the one with the longest time left."""
        reason = MissReason.UNKNOWN
        best: _Copied | None = None
        for copied in self._branches.get((tenant, conversation), ()):
            if copied.lease.suspect:
                reason = MissReason.SUSPECT
            elif best is None or _rank(copied) > _rank(best):
                best = copied
        return reason if best is None else _as_of(best, now_ms)

    def check(self) -> None:
        """Raises AssertionError if the two indexes disagree."""
        branches: dict[tuple[TenantId, ConversationId], set[LeaseId]] = {}
        for lease_id, copied in self._by_id.items():
            lease = copied.lease
            assert lease.lease_id == lease_id, f"id of {lease_id}"
            assert lease.state is not LeaseState.ENDED, f"{lease_id} has ended"
            if lease.conversation is not None:
                branches.setdefault((lease.tenant, lease.conversation), set()).add(lease_id)
                assert copied in self._branches[lease.tenant, lease.conversation], f"{lease_id} is no branch"
        found = {key: [x.lease.lease_id for x in branch] for key, branch in self._branches.items()}
        assert {key: sorted(x) for key, x in branches.items()} == {key: sorted(x) for key, x in found.items()}

    def _detach(self, lease: LeaseView) -> None:
        if lease.conversation is not None:
            key = (lease.tenant, lease.conversation)
            others = tuple(x for x in self._branches[key] if x.lease.lease_id != lease.lease_id)
            if others:
                self._branches[key] = others
            else:
                del self._branches[key]


class LeaseCopy:
    """A copy of the leases that a registry holds, or of those that one filter selects.

    What it promises:
    - Once a list was taken in, it is what the registry was at `revision`: nothing is missing, and what ended before it
      is not there, whether its end was seen or fell between two streams.
    - `staleness_ms` says how long ago that was last known to be all: since then, anything may have changed unseen. The
      time that a message was under way is not in it, since no clock is shared.
    - It may be behind and never wrong about the past, so a lease in it may have ended and a miss in it may be a lease
      on its way. A hit is as good a hint as the registry's answer a moment ago; whoever needs to know about a miss asks
      the registry.
    - Times left are estimates: off by as much as the news of the lease was under way.
    """

    def __init__(self, *, limit: int = MAX_COPIED_LEASES) -> None:
        """`limit`: leases it holds at most."""
        self._limit: Final = limit
        self._leases = self.blank()
        self._revision: int | None = None
        self._current_ms: int | None = None
        self.lists = 0
        """Lists taken in so far."""
        self.events = 0
        """Events applied so far."""

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def revision(self) -> int | None:
        """Everything up to here is in; None if nothing was ever listed."""
        return self._revision

    def staleness_ms(self, now_ms: int) -> int | None:
        """For how long the copy has not been known to be all there is; None if it never was."""
        return None if self._current_ms is None else max(0, now_ms - self._current_ms)

    def blank(self) -> CopiedLeases:
        """What the next list is to be gathered in."""
        return CopiedLeases(limit=self._limit)

    def replace(self, leases: CopiedLeases, *, revision: int, asked_ms: int) -> None:
        """A list has come: it is all there is, as of `revision`, and was asked for at `asked_ms`. What is not in it has
        ended."""
        self._leases = leases
        self._revision = revision
        self._current_ms = asked_ms
        self.lists += 1

    def resume(self, first: LeaseEvents, *, now_ms: int) -> None:
        """What a watch from `revision` said first. Raises Compacted, as `apply`, if it starts anywhere else."""
        if first.revision != self._revision:
            raise Compacted(f"a watch after revision {first.revision} does not continue a copy at {self._revision}")
        self.apply(first, now_ms=now_ms)

    def apply(self, news: LeaseEvents, *, now_ms: int) -> None:
        """What the watch said next; an event that is in the copy already is left out.

        Raises Compacted if this does not continue the copy, LimitReached if it does not fit: list again.
        """
        if self._revision is None or news.revision < self._revision:
            raise Compacted(f"a watch at revision {news.revision} does not continue a copy at {self._revision}")
        for event in news.events:
            if event.revision > self._revision:
                self._apply(event, now_ms)
                self._revision = event.revision
        self._revision = news.revision
        if news.revision >= news.newest:
            self._current_ms = now_ms

    def locate(self, tenant: TenantId, conversation: ConversationId, *, now_ms: int) -> Located:
        """Where a conversation's KV is, as `RegistryClient.locate` says it."""
        best = self._leases.best(tenant, conversation, now_ms=now_ms)
        if isinstance(best, MissReason):
            return Located(conversation=conversation, lease=None, reason=best)
        return Located(conversation=conversation, lease=best, api_url=best.api_url)

    def leases(self, *, now_ms: int) -> list[LeaseView]:
        """Every lease in the copy, in no order."""
        return self._leases.all(now_ms=now_ms)

    def check(self) -> None:
        """Raises AssertionError."""
        self._leases.check()

    def _apply(self, event: LeaseEvent, now_ms: int) -> None:
        if event.lease.state is LeaseState.ENDED:
            self._leases.drop(event.lease.lease_id)
        else:
            self._leases.put(event.lease, now_ms=now_ms)
        self.events += 1


def _rank(copied: _Copied) -> tuple[int, int]:
    return copied.lease.tokens, copied.deadline_ms


def _as_of(copied: _Copied, now_ms: int) -> LeaseView:
    remaining_ms = copied.deadline_ms - now_ms
    state = LeaseState.LAPSED if remaining_ms <= 0 else copied.lease.state
    return replace(copied.lease, remaining_ms=remaining_ms, state=state)
