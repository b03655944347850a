"""A lease as the engine's thread makes it, and the publication that is made from it on another one.

Pure. Encoding a record and hashing it costs more than an engine step may, so the lease holder only says what is to be
written; whoever announces the lease makes the publication, once.
Invariant: equal drafts make equal publications, byte for byte.
"""

from __future__ import annotations

from typing import NamedTuple

from kvlease.connector.loan import LenderTerms, Loan
from kvlease.connector.record import RecordContent, encode
from kvlease.connector.seal import SealRef, slot_offset
from kvlease.registry.values import LeaseId, Publication


class Draft(NamedTuple):
    """A lease that is held, and its seal: slot and value, the same in every rank's table. A tuple, since it is made
    within an engine's step."""

    terms: LenderTerms
    loan: Loan
    slot: int
    value: int
    deadline_ms: int

    @property
    def lease_id(self) -> LeaseId:
        return self.loan.lease_id

    def publication(self) -> Publication:
        """What is told of the lease. Any thread may make it."""
        terms, loan = self.terms, self.loan
        blocks = sum(len(group) for group in loan.block_ids)
        offset = slot_offset(self.slot)
        content = RecordContent(
            lease_id=loan.lease_id,
            engine_id=terms.engine_id,
            incarnation=terms.incarnation,
            fingerprint_hash=terms.fingerprint_hash,
            tenant=loan.tenant,
            stride_tokens=terms.stride_tokens,
            block_tokens=terms.block_tokens,
            tokens=len(loan.chain) * terms.stride_tokens,
            block_ids=loan.block_ids,
            seals=tuple(
                SealRef(pp_rank=x.pp_rank, tp_rank=x.tp_rank, address=x.address + offset, value=self.value)
                for x in terms.tables
            ),
            engine_params=loan.engine_params,
        )
        return Publication(
            lease_id=loan.lease_id,
            tenant=loan.tenant,
            conversation=loan.conversation,
            stride_tokens=terms.stride_tokens,
            block_count=blocks,
            size_bytes=blocks * terms.block_bytes,
            deadline_ms=self.deadline_ms,
            on_deadline=loan.on_deadline or terms.on_deadline,
            fingerprint_hash=terms.fingerprint_hash,
            record=encode(content, loan.chain.digests),
            traceparent=loan.traceparent,
        )
