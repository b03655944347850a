"""The lender's second thread: makes publications, writes their hashes beside the seals, tells the registry.

It works a little after the engine's thread, never before, and in its order. Between its look at a lease and its store
of the hash the engine's thread may end that lease and lend the slot anew: here that is a fault like others.
Invariant: whatever this thread does late, it writes no seal's value.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvlease.connector.lender import LeaseHolder
from kvlease.connector.lender_effects import Announce, AnnounceEnded, AnnounceLapsed, AnnounceRenewed, RefuseRenewal
from kvlease.connector.record import record_hash

from tests.sim.memory import EngineMemory
from tests.sim.network import Network
from tests.sim.session import LenderSession
from tests.sim.world import Party

Told = Announce | AnnounceEnded | AnnounceLapsed | AnnounceRenewed | RefuseRenewal
LATE_MS: Final = 1


class LenderLink:
    """Of one incarnation."""

    def __init__(
        self, network: Network, party: Party, holder: LeaseHolder, memory: EngineMemory, session: LenderSession
    ) -> None:
        self._network, self._party = network, party
        self._holder, self._memory, self._session = holder, memory, session
        self._told: deque[Told] = deque()

    def tell(self, told: Told) -> None:
        if not self._told:
            world, faults = self._network.world, self._network.faults
            late_ms = world.between(1, faults.long_ms) if world.chance(faults.link_late) else world.between(0, LATE_MS)
            world.after(late_ms, self._party, self.work)
        self._told.append(told)

    def work(self) -> None:
        """Everything that waits."""
        mirror, races = self._session.mirror, self._network.faults.link_races
        while self._told:
            match self._told.popleft():
                case Announce(draft=draft):
                    publication = draft.publication()
                    if self._holder.slot_of(draft.lease_id) == draft.slot or self._network.world.chance(races):
                        self._memory.write_hash(draft.slot, record_hash(publication.record))
                    mirror.publish(publication)
                case AnnounceEnded(lease_id=lease_id, reason=reason):
                    mirror.ended(lease_id, reason)
                case AnnounceRenewed(lease_id=lease_id, deadline_ms=deadline_ms):
                    mirror.renewed(lease_id, deadline_ms)
                case RefuseRenewal(lease_id=lease_id, status=status):
                    mirror.refuse_renewal(lease_id, status)
                case AnnounceLapsed(lease_id=lease_id):
                    mirror.lapsed(lease_id)
        self._session.flush()
