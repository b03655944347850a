"""The proof: blocks, then seals; released exactly once; late exactly while the blocks may still land.

The last test tries histories at random: nothing but blocks and then every seal, whole, makes a load good.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlease.connector.borrower import ComputeReason
from kvlease.connector.prover import Prover, ReadSeals, Release
from kvlease.connector.seal import BROKEN, HASH_BYTES, Proof, SealRef, pack_value

LIMIT_MS = 100
HASH = b"h" * HASH_BYTES
PROOFS = tuple(
    Proof(seal=SealRef(pp_rank=0, tp_rank=rank, address=64, value=70 + rank), record_hash=HASH) for rank in range(2)
)


def whole(index: int) -> bytes:
    return pack_value(PROOFS[index].seal.value) + HASH


def loading(proofs: tuple[Proof, ...] = PROOFS) -> Prover:
    prover = Prover(LIMIT_MS)
    prover.posted("r", proofs, 1_000)
    return prover


def test_good_only_when_every_seal_is_whole_after_the_blocks() -> None:
    prover = loading()
    assert prover.landed("r", 1_010) == ReadSeals(request_id="r", proofs=PROOFS)
    assert prover.seal_read("r", 1, whole(1), 1_011) is None
    release = prover.seal_read("r", 0, whole(0), 1_013)
    assert release == Release(request_id="r", reason=None, read_ms=10, prove_ms=3)
    assert "r" not in prover


def test_a_seal_read_before_the_blocks_have_landed_counts_for_nothing() -> None:
    prover = loading()
    assert prover.seal_read("r", 0, whole(0), 1_001) is None
    assert prover.seal_read("r", 1, whole(1), 1_001) is None
    prover.landed("r", 1_010)
    assert prover.seal_read("r", 0, whole(0), 1_011) is None
    assert prover.seal_read("r", 0, whole(0), 1_012) is None, "one slot read twice is not two slots"
    assert "r" in prover


@pytest.mark.parametrize(
    ("slot", "reason"),
    [
        (pack_value(BROKEN) + HASH, ComputeReason.SEAL_BROKEN),
        (pack_value(99) + HASH, ComputeReason.SEAL_BROKEN),
        (pack_value(70) + bytes(HASH_BYTES), ComputeReason.SEAL_OTHER_RECORD),
        (b"", ComputeReason.SEAL_BROKEN),
        (None, ComputeReason.SEAL_UNREADABLE),
    ],
)
def test_one_bad_seal_fails_the_load_at_once(slot: bytes | None, reason: ComputeReason) -> None:
    prover = loading()
    prover.landed("r", 1_010)
    release = prover.seal_read("r", 0, slot, 1_011)
    assert release is not None
    assert (release.reason, release.late) == (reason, False)
    assert prover.seal_read("r", 1, whole(1), 1_012) is None, "it was released already"


def test_only_the_ranks_read_from_must_be_proven() -> None:
    prover = loading()
    wanted = prover.landed("r", 1_010, ranks={(0, 1)})
    assert wanted == ReadSeals(request_id="r", proofs=PROOFS[1:])
    release = prover.seal_read("r", 0, whole(1), 1_011)
    assert release is not None
    assert release.reason is None


@pytest.mark.parametrize("ranks", [set[tuple[int, int]](), {(1, 0)}])
def test_a_load_without_a_seal_to_read_is_never_good(ranks: set[tuple[int, int]]) -> None:
    prover = loading()
    release = prover.landed("r", 1_010, ranks=ranks)
    assert isinstance(release, Release)
    assert release.reason is ComputeReason.SEAL_UNREADABLE
    assert "r" not in prover


def test_a_read_that_failed_is_released_and_not_late() -> None:
    prover = loading()
    release = prover.read_failed("r", 1_004)
    assert release == Release(request_id="r", reason=ComputeReason.READ_FAILED, read_ms=4)
    assert prover.overdue(9_999) == []


def test_blocks_past_the_limit_are_late() -> None:
    prover = loading()
    assert prover.overdue(1_000 + LIMIT_MS - 1) == []
    (release,) = prover.overdue(1_000 + LIMIT_MS)
    assert (release.reason, release.late) == (ComputeReason.READ_TIMEOUT, True)
    assert prover.overdue(9_999) == []


def test_a_seal_past_the_limit_is_not_late_since_all_blocks_are_here() -> None:
    prover = loading()
    prover.landed("r", 1_099)
    prover.seal_read("r", 0, whole(0), 1_100)
    assert prover.overdue(1_099 + LIMIT_MS - 1) == []
    (release,) = prover.overdue(1_099 + LIMIT_MS)
    assert (release.reason, release.late) == (ComputeReason.SEAL_UNREADABLE, False)
    assert prover.seal_read("r", 1, whole(1), 1_300) is None


@given(
    st.lists(st.sampled_from(["landed", "failed", "seal0", "seal1", "broken", "unreadable", "overdue"]), max_size=12)
)
def test_each_load_is_released_exactly_once_whatever_happens(doings: list[str]) -> None:
    """Good only if the blocks landed and then both seals were read whole; never in any other history."""
    prover = loading()
    releases: list[Release] = []
    landed, proven = False, set[int]()
    now_ms = 1_000
    for doing in doings:
        now_ms += 1
        answer: Release | ReadSeals | None = None
        match doing:
            case "landed" if "r" in prover and not landed:
                answer, landed = prover.landed("r", now_ms), True
            case "failed" if "r" in prover and not landed:
                answer = prover.read_failed("r", now_ms)
            case "seal0" | "seal1":
                index = int(doing[-1])
                if landed:
                    proven.add(index)
                answer = prover.seal_read("r", index, whole(index), now_ms)
            case "broken":
                answer = prover.seal_read("r", 0, pack_value(BROKEN) + HASH, now_ms)
            case "unreadable":
                answer = prover.seal_read("r", 1, None, now_ms)
            case "overdue":
                now_ms += LIMIT_MS
                releases += prover.overdue(now_ms)
        if isinstance(answer, Release):
            releases.append(answer)
            assert answer.reason is not None or (landed and proven == {0, 1})
    releases += prover.overdue(now_ms + 2 * LIMIT_MS)
    assert len(releases) == 1
    assert not len(prover)
    assert releases[0].late == (releases[0].reason is ComputeReason.READ_TIMEOUT)
    assert not (releases[0].late and landed)
