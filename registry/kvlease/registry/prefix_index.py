"""The digest chains of one tenant in lexicographic order, searched by longest common prefix.

Pure; knows chains and lease ids, nothing of states or lenders. One entry per lease, which shares the record's own
bytes, so memory grows with leases and not with blocks.
Why a sorted list is exact: a chain is fixed-width digests, and of all chains in order the two neighbours of a query
share the longest prefix with it; going outward on either side the common prefix never grows again.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvlease.registry.values import DIGEST_BYTES, LeaseId, common_strides
from sortedcontainers import SortedList


class PrefixIndex:
    """Digest chain -> lease ids. Several leases may have the same chain."""

    __slots__ = ("_chains",)

    def __init__(self) -> None:
        self._chains: SortedList[tuple[bytes, LeaseId]] = SortedList()

    def __len__(self) -> int:
        return len(self._chains)

    def __iter__(self) -> Iterator[tuple[bytes, LeaseId]]:
        return iter(self._chains)

    def add(self, digests: bytes, lease_id: LeaseId) -> None:
        self._chains.add((digests, lease_id))

    def remove(self, digests: bytes, lease_id: LeaseId) -> None:
        """Raises ValueError if the pair is not there."""
        self._chains.remove((digests, lease_id))

    def nearest(self, digests: bytes) -> Iterator[tuple[int, LeaseId]]:
        """(common strides, lease id), longest common prefix first, down to and without 0.

        The index must not change while the iterator is in use.
        """
        here = (digests,)
        above = _Side(digests, self._chains.irange(minimum=here))
        below = _Side(digests, self._chains.irange(maximum=here, reverse=True))
        while above.common or below.common:
            side = above if above.common >= below.common else below
            yield side.common, side.lease_id
            side.advance()


class _Side:
    """A walk away from the query in one direction; `common` never grows, 0 means done."""

    __slots__ = ("_chains", "_query", "common", "lease_id")

    def __init__(self, query: bytes, chains: Iterator[tuple[bytes, LeaseId]]) -> None:
        self._query = query
        self._chains = chains
        self.common = len(query) // DIGEST_BYTES
        self.lease_id = LeaseId("")
        if self.common:
            self.advance()

    def advance(self) -> None:
        entry = next(self._chains, None)
        if entry is None:
            self.common = 0
            return
        chain, self.lease_id = entry
        stop = self.common * DIGEST_BYTES
        # Equality at one stride implies equality before it, so most steps cost one comparison of 16 bytes.
        if chain[stop - DIGEST_BYTES : stop] != self._query[stop - DIGEST_BYTES : stop]:
            self.common = common_strides(self._query, chain)
