"""Puts a watch's answers into whole revisions, each once and in order, over any number of streams. Pure.

One answer may carry several revisions, and one revision may be spread over several answers (fragments). A member that
lags may send again what was delivered from another one. Invariant: `resume` is one past the last revision given out; no
revision is given out twice, in parts, or after a later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from kvlease.etcd import codec
from kvlease.etcd.errors import HistoryChanged
from kvlease.etcd.ops import GetOp
from kvlease.etcd.values import Changes, Event, EventKind, GetResult, Header, Progress, Revision, WatchItem
from kvlease.etcdv3 import etcd_pb2 as pb

_ALL_WATCHES: Final = -1
"""Watch id of the answer to a progress request."""


class WatchOrder:
    """What one watch has given out so far."""

    def __init__(self, start_revision: Revision | None, seen: Header | None) -> None:
        """`seen`: the header of what the watch continues; None to take the first one that comes."""
        self.resume: Revision | None = start_revision
        self._seen: Header | None = seen
        self._parts: list[Event] = []
        self._last: Event | None = None

    @property
    def request_revision(self) -> Revision:
        """What to ask for: 0 is from now on."""
        return self.resume or Revision(0)

    def check_history(self, found: Header) -> None:
        """`found` is of a linearizable read now, so behind nothing that was ever delivered. Raises HistoryChanged.

        Terms count as well as revisions: a cluster restored from a snapshot may have overtaken the revision since.
        """
        seen = self._seen
        if seen is not None:
            delivered = max(seen.revision, (self.resume or 1) - 1)
            if found.cluster_id != seen.cluster_id:
                raise HistoryChanged("another etcd cluster answers at the endpoints", seen=seen, found=found)
            if found.revision < delivered:
                text = f"etcd went back to revision {found.revision} after {delivered}: restored from a snapshot"
                raise HistoryChanged(text, seen=seen, found=found)
            if found.raft_term < seen.raft_term:
                text = f"etcd went back to term {found.raft_term} after {seen.raft_term}: restored from a snapshot"
                raise HistoryChanged(text, seen=seen, found=found)
        elif self.resume is not None and found.revision < self.resume - 1:
            text = f"etcd is at revision {found.revision}, the watch starts at {self.resume}: restored from a snapshot"
            raise HistoryChanged(text, seen=found, found=found)
        self._seen = found

    def witness(self) -> tuple[GetOp, GetOp] | None:
        """Reads of the last event's key at its revision and just before; None if there was no event yet."""
        if self._last is None:
            return None
        kv = self._last.kv
        return GetOp(key=kv.key, revision=kv.mod_revision), GetOp(key=kv.key, revision=Revision(kv.mod_revision - 1))

    def check_witness(self, then: GetResult, before: GetResult) -> None:
        """What `witness` asked for: the last event must be there still, at its revision. Raises HistoryChanged.

        This finds a cluster that was restored and has overtaken, in the same term, what was delivered.
        """
        last = self._last
        if last is None:
            return
        same = then.kvs == (last.kv,) if last.kind is EventKind.PUT else not then.kvs and bool(before.kvs)
        if not same:
            text = f"etcd's revision {last.kv.mod_revision} is not the one that was delivered: restored from a snapshot"
            raise HistoryChanged(text, seen=self._seen or then.header, found=then.header)

    def opened(self, created: pb.WatchResponse) -> None:
        """A new stream: parts from the last one are void, etcd sends their revision again."""
        self._parts.clear()
        if self.resume is None:
            self.resume = Revision(created.header.revision + 1)

    def take(self, response: pb.WatchResponse, *, progress_ordered: bool) -> Iterator[WatchItem]:
        """What this answer completes. `progress_ordered`: answers to progress requests overtake no event here."""
        resume = self.resume or Revision(1)
        if response.events:
            yield from self._changes(response, resume)
        else:
            revision = Revision(response.header.revision)
            ordered = not self._parts and (progress_ordered or response.watch_id != _ALL_WATCHES)
            if ordered:
                self.resume = Revision(max(resume, revision + 1))
            yield Progress(revision=revision, complete=ordered or revision < resume)

    def _changes(self, response: pb.WatchResponse, resume: Revision) -> Iterator[Changes]:
        self._parts.extend(codec.event(one) for one in response.events if one.kv.mod_revision >= resume)
        whole, self._parts = self._parts, []
        if response.fragment and whole:
            last = whole[-1].kv.mod_revision
            self._parts = [one for one in whole if one.kv.mod_revision == last]
            whole = whole[: len(whole) - len(self._parts)]
        for revision, events in groupby(whole, key=lambda one: one.kv.mod_revision):
            together = tuple(events)
            self.resume, self._last = Revision(revision + 1), together[-1]
            yield Changes(revision=revision, events=together)
