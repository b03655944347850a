"""The digest chains of one tenant in lexicographic order, searched by longest common prefix.

Pure; knows chains and lease ids, nothing of states or lenders. One entry per lease, which shares the record's own
bytes, so memory grows with leases and not with blocks.
Why a sorted list is exact: a chain is fixed-width digests, and of all chains in order the two neighbours of a query
share the longest prefix with it; going outward on either side the common prefix never grows again.
Rows of bounded length, not a library's sorted list, because each resolve passes here: two bisections and no more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

from kvlease.registry.values import DIGEST_BYTES, LeaseId, common_strides

ROW_ENTRIES: Final = 512
"""A row is split at twice this length: long enough that there are few rows, short enough that an insertion is cheap."""

Entry = tuple[bytes, LeaseId]


class PrefixIndex:
    """Digest chain -> lease ids. Several leases may have the same chain."""

    __slots__ = ("_lasts", "_length", "_rows")

    def __init__(self) -> None:
        self._rows: list[list[Entry]] = []
        """In order, none empty."""
        self._lasts: list[Entry] = []
        """The last entry of each row."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Entry]:
        for row in self._rows:
            yield from row

    def add(self, digests: bytes, lease_id: LeaseId) -> None:
        entry = (digests, lease_id)
        self._length += 1
        if not self._rows:
            self._rows.append([entry])
            self._lasts.append(entry)
            return
        number = min(bisect_left(self._lasts, entry), len(self._rows) - 1)
        row = self._rows[number]
        insort(row, entry)
        if len(row) > 2 * ROW_ENTRIES:
            self._rows.insert(number + 1, row[ROW_ENTRIES:])
            del row[ROW_ENTRIES:]
            self._lasts.insert(number, row[-1])
        else:
            self._lasts[number] = row[-1]

    def remove(self, digests: bytes, lease_id: LeaseId) -> None:
        """Raises KeyError if the pair is not there."""
        entry = (digests, lease_id)
        number = bisect_left(self._lasts, entry)
        row = self._rows[number] if number < len(self._rows) else []
        place = bisect_left(row, entry)
        if place == len(row) or row[place] != entry:
            raise KeyError(lease_id)
        del row[place]
        self._length -= 1
        if row:
            self._lasts[number] = row[-1]
        else:
            del self._rows[number], self._lasts[number]

    def nearest(self, digests: bytes) -> Iterator[tuple[int, LeaseId]]:
        """(common strides, lease id), longest common prefix first, down to and without 0.

        The index must not change while the iterator is in use.
        """
        rows, here = self._rows, (digests,)
        up_row = down_row = bisect_left(self._lasts, here)
        up = bisect_left(rows[up_row], here) if up_row < len(rows) else 0
        down = up - 1
        strides = len(digests) // DIGEST_BYTES
        up_common = self._common(digests, up_row, up, strides)
        if down < 0:
            down_row -= 1
            down = len(rows[down_row]) - 1 if down_row >= 0 else 0
        down_common = self._common(digests, down_row, down, strides)
        while up_common or down_common:
            if up_common >= down_common:
                yield up_common, rows[up_row][up][1]
                up += 1
                if up == len(rows[up_row]):
                    up_row, up = up_row + 1, 0
                up_common = self._common(digests, up_row, up, up_common)
            else:
                yield down_common, rows[down_row][down][1]
                down -= 1
                if down < 0:
                    down_row -= 1
                    down = len(rows[down_row]) - 1 if down_row >= 0 else 0
                down_common = self._common(digests, down_row, down, down_common)

    def check(self) -> None:
        """Raises AssertionError."""
        entries = list(self)
        assert entries == sorted(entries), "order of chains"
        assert len(entries) == self._length, "number of chains"
        assert self._lasts == [row[-1] for row in self._rows], "ends of rows"
        assert all(len(row) <= 2 * ROW_ENTRIES for row in self._rows), "length of rows"

    def _common(self, digests: bytes, row: int, place: int, most: int) -> int:
        """Strides that `digests` shares with the chain at a place, known to be `most` or fewer; 0 outside the index."""
        if not most or not 0 <= row < len(self._rows):
            return 0
        chain = self._rows[row][place][0]
        # Equality at one stride implies equality before it, so most steps cost one comparison of 16 bytes.
        stop = most * DIGEST_BYTES
        if chain[stop - DIGEST_BYTES : stop] == digests[stop - DIGEST_BYTES : stop]:
            return most
        if chain[:DIGEST_BYTES] != digests[:DIGEST_BYTES]:
            return 0
        return common_strides(digests, chain)
