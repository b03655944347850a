"""The digest chains of one tenant in lexicographic order, searched by longest common prefix.

Pure; knows chains and lease ids, nothing of states or lenders. One entry per lease, which shares the record's own
bytes, so memory grows with leases and not with blocks.
Why a sorted list is exact: a chain is fixed-width digests, and of all chains in order the two neighbours of a query
share the longest prefix with it; going outward on either side the common prefix never grows again.
Rows of bounded length, not a library's sorted list, because each resolve passes here: two bisections and no more.
Chains and ids lie in two lists side by side, so that bisections compare bytes and an entry costs two references.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

from kvlease.registry.values import DIGEST_BYTES, LeaseId, common_strides

ROW_ENTRIES: Final = 512
"""A row is split at twice this length: long enough that there are few rows, short enough that an insertion is cheap."""

Entry = tuple[bytes, LeaseId]


class _Row:
    """A run of entries, in order of chain and then of id."""

    __slots__ = ("chains", "ids")

    def __init__(self, chains: list[bytes], ids: list[LeaseId]) -> None:
        self.chains = chains
        self.ids = ids

    def place(self, digests: bytes, lease_id: LeaseId) -> int:
        """Where the entry is, or would be."""
        start = bisect_left(self.chains, digests)
        if start == len(self.chains) or self.chains[start] != digests:
            return start
        return bisect_left(self.ids, lease_id, start, bisect_right(self.chains, digests, start))

    def insert(self, place: int, digests: bytes, lease_id: LeaseId) -> None:
        self.chains.insert(place, digests)
        self.ids.insert(place, lease_id)

    def delete(self, place: int) -> None:
        del self.chains[place], self.ids[place]


class PrefixIndex:
    """Digest chain -> lease ids. Several leases may have the same chain."""

    __slots__ = ("_lasts", "_length", "_rows")

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        """In order, none empty."""
        self._lasts = _Row([], [])
        """The last entry of each row."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Entry]:
        for row in self._rows:
            yield from zip(row.chains, row.ids, strict=True)

    def add(self, digests: bytes, lease_id: LeaseId) -> None:
        self._length += 1
        if not self._rows:
            self._rows.append(_Row([digests], [lease_id]))
            self._lasts.insert(0, digests, lease_id)
            return
        number = min(self._lasts.place(digests, lease_id), len(self._rows) - 1)
        row = self._rows[number]
        place = row.place(digests, lease_id)
        row.insert(place, digests, lease_id)
        if place == len(row.ids) - 1:
            self._lasts.chains[number], self._lasts.ids[number] = digests, lease_id
        if len(row.ids) > 2 * ROW_ENTRIES:
            self._rows.insert(number + 1, _Row(row.chains[ROW_ENTRIES:], row.ids[ROW_ENTRIES:]))
            del row.chains[ROW_ENTRIES:], row.ids[ROW_ENTRIES:]
            self._lasts.insert(number, row.chains[-1], row.ids[-1])

    def remove(self, digests: bytes, lease_id: LeaseId) -> None:
        """Raises KeyError if the pair is not there."""
        number = self._lasts.place(digests, lease_id)
        if number == len(self._rows):
            raise KeyError(lease_id)
        row = self._rows[number]
        place = row.place(digests, lease_id)
        if row.ids[place] != lease_id or row.chains[place] != digests:
            raise KeyError(lease_id)
        row.delete(place)
        self._length -= 1
        if not row.ids:
            del self._rows[number]
            self._lasts.delete(number)
        elif place == len(row.ids):
            self._lasts.chains[number], self._lasts.ids[number] = row.chains[-1], row.ids[-1]

    def best(self, digests: bytes) -> tuple[int, LeaseId] | None:
        """What `nearest` would give first, if nothing else shares as much and one look tells; None: use `nearest`.

        Nearly every resolve of a conversation's next turn is answered here, for half the cost.
        """
        number = bisect_left(self._lasts.chains, digests)
        if number == len(self._rows):
            return None
        row = self._rows[number]
        chains = row.chains
        up = bisect_left(chains, digests)
        if up < 2:
            return None
        chain = chains[up - 1]
        strides = len(chain) // DIGEST_BYTES if digests.startswith(chain) else common_strides(digests, chain)
        # As much of the query as the lease before shares; whatever else shares it is next to that on either side.
        shared = digests[: strides * DIGEST_BYTES]
        if not strides or chains[up].startswith(shared) or chains[up - 2].startswith(shared):
            return None
        return strides, row.ids[up - 1]

    def nearest(self, digests: bytes) -> Iterator[tuple[int, LeaseId]]:
        """(common strides, lease id), longest common prefix first, down to and without 0.

        The index must not change while the iterator is in use.
        """
        rows = self._rows
        up_row = down_row = bisect_left(self._lasts.chains, digests)
        up = bisect_left(rows[up_row].chains, digests) if up_row < len(rows) else 0
        down = up - 1
        strides = len(digests) // DIGEST_BYTES
        up_common = self._common(digests, up_row, up, strides)
        if down < 0:
            down_row -= 1
            down = len(rows[down_row].ids) - 1 if down_row >= 0 else 0
        down_common = self._common(digests, down_row, down, strides)
        while up_common or down_common:
            if up_common >= down_common:
                yield up_common, rows[up_row].ids[up]
                up += 1
                if up == len(rows[up_row].ids):
                    up_row, up = up_row + 1, 0
                up_common = self._common(digests, up_row, up, up_common)
            else:
                yield down_common, rows[down_row].ids[down]
                down -= 1
                if down < 0:
                    down_row -= 1
                    down = len(rows[down_row].ids) - 1 if down_row >= 0 else 0
                down_common = self._common(digests, down_row, down, down_common)

    def check(self) -> None:
        """Raises AssertionError."""
        entries = list(self)
        assert entries == sorted(entries), "order of chains"
        assert len(entries) == self._length, "number of chains"
        assert self._lasts.chains == [row.chains[-1] for row in self._rows], "last chains of rows"
        assert self._lasts.ids == [row.ids[-1] for row in self._rows], "last ids of rows"
        assert all(len(row.ids) <= 2 * ROW_ENTRIES for row in self._rows), "length of rows"

    def _common(self, digests: bytes, row: int, place: int, most: int) -> int:
        """Strides that `digests` shares with the chain at a place, known to be `most` or fewer; 0 outside the index."""
        if not most or not 0 <= row < len(self._rows):
            return 0
        chain = self._rows[row].chains[place]
        if not chain.startswith(digests[:DIGEST_BYTES]):  # the common case on one side of a query
            return 0
        # Equality at one stride implies equality before it, so most other steps cost one comparison of 16 bytes.
        stop = most * DIGEST_BYTES
        if chain[stop - DIGEST_BYTES : stop] == digests[stop - DIGEST_BYTES : stop]:
            return most
        return common_strides(digests, chain)
