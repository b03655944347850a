"""Which replicas can reach the store, by what has been done to the members and the network.

Pure. A replica is in contact while it and a member that is in a majority reach each other both ways; a member is in a
majority if it runs and reaches one other running member both ways (three members).
"""

from __future__ import annotations

from collections.abc import Iterable


def in_contact(replica: str, members: Iterable[str], running: frozenset[str], cuts: frozenset[tuple[str, str]]) -> bool:
    """`running`: members that neither are gone nor stand still; `cuts`: (from, to) between which nothing passes."""

    def both_ways(one: str, other: str) -> bool:
        return (one, other) not in cuts and (other, one) not in cuts

    alive = [member for member in members if member in running]
    majority = [one for one in alive if any(other != one and both_ways(one, other) for other in alive)]
    return any(both_ways(replica, member) for member in majority)
