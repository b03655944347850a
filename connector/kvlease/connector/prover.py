"""The borrower's proof on the worker's side: blocks first, then seals, each within the read limit.

Pure. The adapter reports what NIXL said and carries out what is answered. A request is released as good only after
every seal of its lease was read *after* all of its blocks had arrived, and said what the record said.

Invariant: each request is released exactly once; a released request whose READ may still land is reported as late
until it has.

    READING --blocks here--> PROVING --all seals whole--> released, good
    READING --failed or over the limit--> released, failed        PROVING --broken, failed, over the limit--> same
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from kvlease.connector.borrower import ComputeReason
from kvlease.connector.seal import Proof, SealVerdict, verdict

READ_LIMIT_MS: Final = 5_000
"""A READ, its handshake included, or a seal READ that is not done within this is a failed load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSeals:
    """Post a READ for each of these slots, now: all blocks are here."""

    request_id: str
    proofs: tuple[Proof, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Report the request's load as finished; failed if `reason` is not None."""

    request_id: str
    reason: ComputeReason | None
    late: bool = False
    """The block READ may still land: quarantine its local blocks until it has."""
    read_ms: int = 0
    prove_ms: int = 0


@dataclass(slots=True)
class _Proving:
    proofs: tuple[Proof, ...]
    posted_ms: int
    landed_ms: int | None = None
    pending: set[int] = field(default_factory=set)


class Prover:
    """All loads of one worker that have a lease behind them."""

    def __init__(self, read_limit_ms: int = READ_LIMIT_MS) -> None:
        self._limit_ms = read_limit_ms
        self._loads: dict[str, _Proving] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def posted(self, request_id: str, proofs: tuple[Proof, ...], now_ms: int) -> None:
        """The READ of this request's blocks is about to be posted (its handshake may come first)."""
        self._loads[request_id] = _Proving(proofs=proofs, posted_ms=now_ms)

    def landed(
        self, request_id: str, now_ms: int, ranks: Collection[tuple[int, int]] | None = None
    ) -> ReadSeals | Release:
        """All blocks of all ranks have arrived. `ranks`: the lender's (pp, tp) ranks read from; None means all.

        A load without a seal to read, or with blocks of a rank that has none, cannot be proven and is released as
        failed.
        """
        load = self._loads[request_id]
        load.landed_ms = now_ms
        covered = True
        if ranks is not None:
            load.proofs = tuple(p for p in load.proofs if (p.seal.pp_rank, p.seal.tp_rank) in ranks)
            covered = {(p.seal.pp_rank, p.seal.tp_rank) for p in load.proofs} == set(ranks)
        if not load.proofs or not covered:
            return self._release(request_id, load, ComputeReason.SEAL_UNREADABLE, now_ms)
        load.pending = set(range(len(load.proofs)))
        return ReadSeals(request_id=request_id, proofs=load.proofs)

    def read_failed(self, request_id: str, now_ms: int) -> Release:
        """NIXL gave the READ up, and nothing of it can land any more."""
        load = self._loads.pop(request_id)
        return Release(request_id=request_id, reason=ComputeReason.READ_FAILED, read_ms=now_ms - load.posted_ms)

    def seal_read(self, request_id: str, index: int, slot: bytes | None, now_ms: int) -> Release | None:
        """The slot of proof number `index` was read (None: NIXL gave up). Answers at the last, or the first bad one."""
        load = self._loads.get(request_id)
        if load is None or index not in load.pending:
            return None
        load.pending.discard(index)
        reason: ComputeReason | None = None
        if slot is None:
            reason = ComputeReason.SEAL_UNREADABLE
        else:
            match verdict(load.proofs[index], slot):
                case SealVerdict.BROKEN:
                    reason = ComputeReason.SEAL_BROKEN
                case SealVerdict.OTHER_RECORD:
                    reason = ComputeReason.SEAL_OTHER_RECORD
                case SealVerdict.WHOLE:
                    pass
        if reason is None and load.pending:
            return None
        return self._release(request_id, load, reason, now_ms)

    def overdue(self, now_ms: int) -> list[Release]:
        """Loads past the limit: failed, and late if their blocks have not all arrived."""
        releases: list[Release] = []
        for request_id, load in list(self._loads.items()):
            if load.landed_ms is None and now_ms - load.posted_ms >= self._limit_ms:
                del self._loads[request_id]
                releases.append(
                    Release(
                        request_id=request_id,
                        reason=ComputeReason.READ_TIMEOUT,
                        late=True,
                        read_ms=now_ms - load.posted_ms,
                    )
                )
            elif load.landed_ms is not None and now_ms - load.landed_ms >= self._limit_ms:
                releases.append(self._release(request_id, load, ComputeReason.SEAL_UNREADABLE, now_ms))
        return releases

    def _release(self, request_id: str, load: _Proving, reason: ComputeReason | None, now_ms: int) -> Release:
        del self._loads[request_id]
        landed_ms = load.posted_ms if load.landed_ms is None else load.landed_ms
        return Release(
            request_id=request_id,
            reason=reason,
            read_ms=landed_ms - load.posted_ms,
            prove_ms=now_ms - landed_ms,
        )
