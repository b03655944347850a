"""What registries owe lenders and callers, judged from what lenders are told and callers were answered.

Stands outside like the judge. A lease that was acknowledged is not lost while its lender lives: nobody may make the
lender give it up but for a cause. An end that was acknowledged stays one.
Invariant: it is told, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from kvlease.registry.errors import KvleaseError
from kvlease.registry.values import (
    EndReason,
    LeaseId,
    Miss,
    MissReason,
    PublishResult,
    PublishStatus,
    ResolveQuery,
    TenantId,
)

from tests.sim.judge import Fault, Judge
from tests.sim.registry import RegistryParty

_CAUSES: Final = frozenset(
    {EndReason.SUPERSEDED, EndReason.PRESSURE, EndReason.RELEASED, EndReason.DRAINED, EndReason.QUOTA}
)
"""Why a registry may tell a lender to end a lease: all that somebody asked for, or that another lease brought about."""


class Lender(Protocol):
    @property
    def name(self) -> str: ...


class Promises:
    def __init__(self, judge: Judge) -> None:
        self._judge: Final = judge
        self._acknowledged: Final[set[LeaseId]] = set()
        self._ended: Final[dict[LeaseId, TenantId]] = {}

    # -- lenders --------------------------------------------------------------------------------------------------

    def answered(self, lender: Lender, result: PublishResult, *, overdue: bool) -> None:
        """The registry's word on a lease that the lender held until now; `overdue`: it was past its deadline."""
        if result.status is PublishStatus.PUBLISHED:
            self._acknowledged.add(result.lease_id)
            self._judge.counts["acknowledged"] += 1
            return
        why = f"{lender.name}: {result.lease_id} was refused: {result.status.value} {result.message}"
        reason = result.message.split(" ")[0]
        caused = reason in _CAUSES or (reason == EndReason.EXPIRED.value and overdue)
        self._judge.expect(result.status is PublishStatus.ENDED and caused, Fault.LOST, why)

    def told_to_end(self, lender: Lender, lease_id: LeaseId, reason: EndReason, *, overdue: bool) -> None:
        """`overdue`: the lease was past its deadline, and so is the reason of an end that somebody asked for then."""
        caused = reason in _CAUSES or (reason is EndReason.EXPIRED and overdue)
        self._judge.expect(caused, Fault.LOST, f"{lender.name}: {lease_id} is to end: {reason.value}")

    def session_over(self, why: KvleaseError) -> None:
        self._judge.counts[f"closed_{why.reason.value.lower()}"] += 1

    # -- callers --------------------------------------------------------------------------------------------------

    def end_acknowledged(self, tenant: TenantId, leases: Sequence[LeaseId]) -> None:
        self._judge.counts["ends_acknowledged"] += len(leases)
        self._ended.update(dict.fromkeys(leases, tenant))

    def check_ends(self, replicas: Sequence[RegistryParty], held: Iterable[LeaseId], *, restored: bool) -> None:
        """All is quiet: no lender holds what was ended, though every replica that knew of the end may have crashed.

        `restored`: the store lost its history at least once, and perhaps the end with it; then replicas that know of
        it hold to it.
        """
        for lease_id in self._ended.keys() & set(held):
            query = ResolveQuery(
                tenant=self._ended[lease_id], lease_id=lease_id, conversation=None, digests=b"", stride_tokens=0
            )
            answers = [replica.table.resolve(query, now_ms=replica.now_ms()) for replica in replicas]
            known = any(isinstance(x, Miss) and x.reason is MissReason.ENDED for x in answers)
            excused = restored and not known
            self._judge.expect(excused, Fault.UNDONE, f"{lease_id} is held, and its end was acknowledged")
            self._judge.counts["ends_forgotten"] += excused
