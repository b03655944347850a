"""What a lender makes known of a loan: its record, with the seals that prove it, inside a publication.

Pure. Invariant: the record names each rank's seal of the slot and value given, and no other.
"""

from __future__ import annotations

from kvlease.connector.loan import LenderTerms, Loan
from kvlease.connector.record import RecordContent, encode
from kvlease.connector.seal import SealRef, slot_offset
from kvlease.registry.values import DIGEST_BYTES, Publication


def publication_of(loan: Loan, terms: LenderTerms, *, slot: int, value: int, deadline_ms: int) -> Publication:
    """The publication of a loan that has this slot of each rank's seal table, with this value in it."""
    content = RecordContent(
        lease_id=loan.lease_id,
        engine_id=terms.engine_id,
        incarnation=terms.incarnation,
        fingerprint_hash=terms.fingerprint_hash,
        tenant=loan.tenant,
        stride_tokens=terms.stride_tokens,
        block_tokens=terms.block_tokens,
        tokens=len(loan.digests) // DIGEST_BYTES * terms.stride_tokens,
        block_ids=loan.block_ids,
        seals=tuple(
            SealRef(
                pp_rank=table.pp_rank, tp_rank=table.tp_rank, address=table.address + slot_offset(slot), value=value
            )
            for table in terms.tables
        ),
        engine_params=loan.engine_params,
    )
    blocks = sum(len(group) for group in loan.block_ids)
    return Publication(
        lease_id=loan.lease_id,
        tenant=loan.tenant,
        conversation=loan.conversation,
        stride_tokens=terms.stride_tokens,
        block_count=blocks,
        size_bytes=blocks * terms.block_bytes,
        deadline_ms=deadline_ms,
        on_deadline=loan.on_deadline or terms.on_deadline,
        fingerprint_hash=terms.fingerprint_hash,
        record=encode(content, loan.digests),
        traceparent=loan.traceparent,
    )
