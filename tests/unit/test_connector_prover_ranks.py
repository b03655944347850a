"""The prover when a lender has several ranks: what was read from a rank is proven by that rank's seal.

Pure. A record comes from the registry, so it may name fewer seals than ranks were read from.
"""

from __future__ import annotations

import pytest
from kvlease.connector.borrower import ComputeReason
from kvlease.connector.prover import Prover, ReadSeals, Release
from kvlease.connector.seal import Proof, SealRef


def proof(tp_rank: int) -> Proof:
    seal = SealRef(pp_rank=0, tp_rank=tp_rank, address=64, value=tp_rank + 1)
    return Proof(seal=seal, record_hash=bytes(24))


@pytest.mark.parametrize(
    ("sealed", "read", "asked"),
    [
        ([0, 1], [0, 1], [0, 1]),
        ([0, 1], [1], [1]),
        ([0, 1, 2, 3], [2, 3], [2, 3]),
        ([0], [0, 1], None),
        ([1], [0, 1], None),
        ([0], [1], None),
        ([0, 1], [], None),
    ],
)
def test_every_rank_that_was_read_is_asked_or_the_load_is_not_proven(
    sealed: list[int], read: list[int], asked: list[int] | None
) -> None:
    prover = Prover()
    prover.posted("r", tuple(proof(rank) for rank in sealed), 0)
    answer = prover.landed("r", 5, {(0, rank) for rank in read})
    if asked is None:
        assert isinstance(answer, Release)
        assert answer.reason is ComputeReason.SEAL_UNREADABLE
        assert len(prover) == 0
    else:
        assert answer == ReadSeals(request_id="r", proofs=tuple(proof(rank) for rank in asked))
