"""What a registry would answer a borrower of `inprocess.py`: of a lease that is made up, or of a lender's real one.

Each answer is judged as the connector's thread judges it, and put where that thread leaves it.
"""

from __future__ import annotations

import json
from typing import Any, Final

from kvlease.connector import digests
from kvlease.connector.borrower import Ask, ComputeReason, Match, Question
from kvlease.connector.lender_publication import Draft
from kvlease.connector.link import Answer, judged
from kvlease.connector.record import RecordContent, encode
from kvlease.connector.seal import SealRef
from kvlease.registry.values import (
    DEFAULT_TENANT,
    EngineId,
    Hit,
    Incarnation,
    LeaseId,
    LeaseState,
    Publication,
)

from tests.engines.engine import BLOCK_TOKENS
from tests.engines.inprocess import Desk, Params

LENDER_PARAMS: Final[Params] = {
    "remote_engine_id": "lender",
    "remote_request_id": "kvl:lease",
    "remote_host": "127.0.0.1",
    "remote_port": 5_600,
    "tp_size": 1,
    "transfer_mode": "pull",
}
LENT_FROM: Final = 1_000
"""The lender's first block in the records of `hit`."""


def publication(lender: Desk, conversation: str) -> Publication:
    """What the lender tells of the one lease that it holds of this conversation."""
    held = [x for x in lender.side._lending._holder._held.values() if x.loan.conversation == conversation]
    assert len(held) == 1
    return Draft(
        terms=lender.side._terms, loan=held[0].loan, slot=held[0].slot, value=1, deadline_ms=held[0].deadline_ms
    ).publication()


def found(desk: Desk, request: Any, lease: Publication, lender: Desk) -> Match | ComputeReason:
    """The registry knows this lease, and its lender answers. Returns what the borrower makes of it."""
    story = desk.side._borrowing._stories[request.request_id]
    borrow = desk.side._borrowing._core._borrows[request.request_id]
    answer = Hit(
        lease_id=lease.lease_id,
        engine_id=lender.side._terms.engine_id,
        incarnation=lender.side._terms.incarnation,
        conversation=lease.conversation,
        record=lease.record,
        matched_strides=1,
        state=LeaseState.LIVE,
        remaining_ms=1_000,
    )
    assert story.params.tenant == lease.tenant
    judgement = judged(Question(ask=borrow.ask, terms=desk.side._borrowing._terms), answer)
    desk.side._link.answers.append(Answer(request_id=request.request_id, found=judgement, reachable=True))
    return judgement


def hit(
    desk: Desk,
    request: Any,
    strides: int,
    engine_params: Params = LENDER_PARAMS,
    adapter: bytes = b"",
    lender: str = "lender",
) -> None:
    """The registry knows a lease of the request's first `strides` strides, and its lender answers."""
    identity = desk.side._identity

    def made(tokens: int) -> digests.Chain:
        return digests.chain(
            digests.seed(identity.fingerprint.hash, DEFAULT_TENANT, adapter),
            request.block_hashes,
            hash_tokens=identity.hash_tokens,
            stride_tokens=identity.stride_tokens,
            tokens=tokens,
        )

    content = RecordContent(
        lease_id=LeaseId("lease"),
        engine_id=EngineId(lender),
        incarnation=Incarnation(bytes(16)),
        fingerprint_hash=identity.fingerprint.hash,
        tenant=DEFAULT_TENANT,
        stride_tokens=identity.stride_tokens,
        block_tokens=BLOCK_TOKENS,
        tokens=strides * identity.stride_tokens,
        block_ids=(tuple(range(LENT_FROM, LENT_FROM + strides * identity.stride_tokens // BLOCK_TOKENS)),),
        seals=(SealRef(pp_rank=0, tp_rank=0, address=4_096, value=1),),
        engine_params=json.dumps(dict(engine_params)).encode(),
    )
    answer = Hit(
        lease_id=content.lease_id,
        engine_id=content.engine_id,
        incarnation=content.incarnation,
        conversation=None,
        record=encode(content, made(strides * identity.stride_tokens).digests),
        matched_strides=strides,
        state=LeaseState.LIVE,
        remaining_ms=1_000,
    )
    asked = Ask(
        request_id=request.request_id,
        tenant=DEFAULT_TENANT,
        conversation=None,
        lease_id=None,
        chain=made(request.num_prompt_tokens),
        prompt_tokens=request.num_prompt_tokens,
    )
    judgement = judged(Question(ask=asked, terms=desk.side._borrowing._terms), answer)
    desk.side._link.answers.append(Answer(request_id=request.request_id, found=judgement, reachable=True))
