"""Telling what became of leases: publications, ends, renewals, and how things stand. Runs in the link's thread.

The engine's thread has done by then all that safety rests on; what is left are the dear and patient parts: records,
their hashes, messages, counts and spans.

Invariant: the hash of a record is written beside the seal's value before the registry hears of the lease, and all is
told in the order in which it happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvlease.connector.instruments import Instruments
from kvlease.connector.journal import Attribute, Note
from kvlease.connector.lender_effects import Announce, AnnounceEnded, AnnounceLapsed, AnnounceRenewed, RefuseRenewal
from kvlease.connector.lender_publication import Draft
from kvlease.connector.link import Link
from kvlease.connector.loan import LenderTerms, Loan
from kvlease.connector.record import record_hash
from kvlease.connector.seal_table import SealTable
from kvlease.registry.lender_session import LenderSession
from kvlease.registry.values import EndReason, LeaseId, Publication

Told = Announce | AnnounceEnded | AnnounceLapsed | AnnounceRenewed | RefuseRenewal


class Standing(NamedTuple):
    """How things stood on the engine's thread. A tuple, since it is made within an engine's step."""

    leases: int
    lapsed: int
    pinned_blocks: int
    """References that leases hold or still have to give back."""
    free_blocks: int
    total_blocks: int


class Announcer:
    """Of one lender. `tell` is called in the link's thread."""

    def __init__(
        self,
        terms: LenderTerms,
        link: Link,
        tables: Sequence[SealTable],
        instruments: Instruments,
        *,
        slot_of: Callable[[LeaseId], int | None],
    ) -> None:
        """`slot_of`: the slot of a lease that is held; may be asked from any thread."""
        self._engine_id = terms.engine_id
        self._block_bytes = terms.block_bytes
        self._link = link
        self._tables = tables
        self._instruments = instruments
        self._slot_of = slot_of
        self._ends = {reason: instruments.ends.labels(reason.value) for reason in EndReason}
        self._live = instruments.held.labels("live")
        self._lapsed = instruments.held.labels("lapsed")

    def tell(self, told: Sequence[Told], standing: Standing) -> None:
        for one in told:
            self._tell(one)
        self._live.set(standing.leases - standing.lapsed)
        self._lapsed.set(standing.lapsed)
        self._instruments.pinned.set(standing.pinned_blocks)
        self._instruments.pinned_bytes.set(standing.pinned_blocks * self._block_bytes)
        self._link.with_session(lambda session: session.pool(standing.free_blocks, standing.total_blocks))

    def _tell(self, told: Told) -> None:
        match told:
            case Announce(draft=draft):
                began_ns = time.monotonic_ns()
                publication = self._publication(draft)
                self._say(lambda session: session.publish(publication))
                self._instruments.loans.inc()
                tokens = len(draft.loan.chain) * draft.terms.stride_tokens
                facts = (("kvlease.tokens", tokens), ("kvlease.blocks", publication.block_count))
                self._note("publish", draft.loan, *facts, began_ns=began_ns)
            case AnnounceLapsed(lease_id=lease_id):
                self._say(lambda session: session.lapsed(lease_id))
            case AnnounceRenewed(lease_id=lease_id, deadline_ms=deadline_ms, loan=loan):
                self._say(lambda session: session.renewed(lease_id, deadline_ms))
                self._note("renew", loan, ("kvlease.outcome", "renewed"))
            case RefuseRenewal(lease_id=lease_id, status=status):
                self._say(lambda session: session.refuse_renewal(lease_id, status))
            case AnnounceEnded(lease_id=lease_id, reason=reason, loan=loan):
                self._say(lambda session: session.ended(lease_id, reason))
                self._ends[reason].inc()
                self._note("end", loan, ("kvlease.end_reason", reason.value))

    def _say(self, action: Callable[[LenderSession], None]) -> None:
        self._link.with_session(action)

    def _publication(self, draft: Draft) -> Publication:
        """What is told of a lease, its record's hash being written first.

        A lease that has ended meanwhile may have left its slot to another one, whose hash must stay. If that happens
        between the look and the store, the other lease is refused until it ends: as safe as a broken seal, and rare.
        """
        publication = draft.publication()
        if self._slot_of(draft.lease_id) == draft.slot:
            hashed = record_hash(publication.record)
            for table in self._tables:
                table.write_hash(draft.slot, hashed)
        return publication

    def _note(self, name: str, loan: Loan, *facts: tuple[str, Attribute], began_ns: int | None = None) -> None:
        if not self._link.traced:
            return
        now_ns = time.monotonic_ns()
        self._link.note(
            Note(
                name=name,
                start_ns=now_ns if began_ns is None else began_ns,
                end_ns=now_ns,
                traceparent=loan.traceparent,
                attributes=(
                    ("kvlease.lease_id", loan.lease_id),
                    ("kvlease.conversation", loan.conversation or ""),
                    ("kvlease.engine_id", self._engine_id),
                    *facts,
                ),
            )
        )
