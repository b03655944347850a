"""What must hold in a chaos run, told from outside: who was answered what and when, and nothing of how.

Pure. Times are seconds of one monotonic clock, the run's. A replica's run is one process of it: `name#number`.
The rules, each a sentence in `findings` when it is broken: (1) No wrong or freed byte is used. (2) A lease that the
registry acknowledged and nobody ended is not lost while its lender lives. (3) A lease whose end a replica acknowledged
is not answered again by that replica, and after the staleness bound by no other that ran then. (4) A replica without
contact to the store answers nothing after the bound. (5) When faults are over, every replica tells exactly what the
lenders hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

OWN_REASONS: Final = frozenset({"expired", "superseded", "quota"})
"""The registry may order these ends without being asked."""
MOST_FINDINGS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """An end that somebody asked a replica for, acknowledged at `at_s`; None: not known to be done."""

    replica_run: str
    asked_s: float
    at_s: float | None = None


@dataclass(slots=True)
class Judge:
    """Collects what the run sees. `bound_s` is the replicas' staleness bound, `slack_s` what scheduling may add."""

    bound_s: float
    slack_s: float
    findings: list[str] = field(default_factory=list)
    ends: dict[str, list[End]] = field(default_factory=dict)
    """By lease: every end that was asked for."""
    served_s: dict[str, float] = field(default_factory=dict)
    """By replica run: since when it has answered. What ended before that, it need not know of."""
    alone_s: dict[str, float] = field(default_factory=dict)
    """By replica run: since when it has had no contact with the store, if it has none."""
    answers: int = 0
    acknowledged: int = 0
    checked_after_end: int = 0
    checked_alone: int = 0
    _told: set[str] = field(default_factory=set)

    def _find(self, sentence: str, about: str = "") -> None:
        """One sentence about each thing; the first."""
        if len(self.findings) < MOST_FINDINGS and (about or sentence) not in self._told:
            self._told.add(about or sentence)
            self.findings.append(sentence)

    # -- replicas -------------------------------------------------------------------------------------------------

    def contact(self, replica_run: str, in_contact: bool, at_s: float) -> None:
        """Whether this replica and the store can reach each other, from `at_s` on."""
        if in_contact:
            self.alone_s.pop(replica_run, None)
        else:
            self.alone_s.setdefault(replica_run, at_s)

    def answered(self, replica_run: str, asked_s: float, lease_id: str | None, detail: str = "") -> None:
        """A replica has answered a resolve that was sent at `asked_s`: with this lease, or with a miss."""
        self.answers += 1
        self.served_s.setdefault(replica_run, asked_s)
        alone_s = self.alone_s.get(replica_run)
        if alone_s is not None and asked_s > alone_s + self.bound_s:
            self.checked_alone += 1
            if asked_s > alone_s + self.bound_s + self.slack_s:
                self._find(
                    f"{replica_run} answered {asked_s - alone_s:.1f} s after it lost the store; "
                    f"its bound is {self.bound_s:.1f} s",
                    about=f"{replica_run} alone",
                )
        if lease_id is None:
            return
        for end in self.ends.get(lease_id, ()):
            if end.at_s is None or asked_s <= end.at_s:
                continue
            self.checked_after_end += 1
            later_s = asked_s - end.at_s
            if end.replica_run == replica_run:
                self._find(
                    f"{replica_run} acknowledged the end of {lease_id} and answered with it {later_s:.2f} s later"
                )
            elif later_s > self.bound_s + self.slack_s and self.served_s[replica_run] <= end.at_s:
                self._find(
                    f"{replica_run} answered with {lease_id} {later_s:.2f} s after {end.replica_run} "
                    f"acknowledged its end; the bound is {self.bound_s:.1f} s {detail}",
                    about=f"{replica_run} {lease_id}",
                )

    def refused(self, replica_run: str, asked_s: float) -> None:
        """A replica has said that it cannot answer."""
        alone_s = self.alone_s.get(replica_run)
        if alone_s is not None and asked_s > alone_s + self.bound_s:
            self.checked_alone += 1

    # -- leases ---------------------------------------------------------------------------------------------------

    def end_asked(self, lease_id: str, replica_run: str, asked_s: float) -> None:
        self.ends.setdefault(lease_id, []).append(End(replica_run=replica_run, asked_s=asked_s))

    def end_acknowledged(self, lease_id: str, replica_run: str, asked_s: float, at_s: float, ended: int) -> None:
        """`ended`: how many leases the replica says it ended; 0 promises nothing."""
        if ended:
            self.ends.setdefault(lease_id, []).append(End(replica_run=replica_run, asked_s=asked_s, at_s=at_s))

    def publish_acknowledged(self, lease_id: str) -> None:
        self.acknowledged += 1

    def end_ordered(self, lease_id: str, reason: str) -> None:
        """The registry has told a lender to end a lease."""
        if reason not in OWN_REASONS and lease_id not in self.ends:
            self._find(f"the registry ended {lease_id} as {reason}, and nobody asked for it")

    def publish_refused(self, lease_id: str, status: str) -> None:
        """The registry did not accept a lease, or not again."""
        if status != "quota" and lease_id not in self.ends:
            self._find(f"the registry answered the publish of {lease_id} with {status}, and nobody had ended it")

    # -- bytes ----------------------------------------------------------------------------------------------------

    def bytes_read(self, borrower: str, *, wrong: int, wrong_in_use: int, old_accepted: int) -> None:
        """What a borrower's own judge has counted so far."""
        if wrong:
            self._find(f"{borrower} used blocks with wrong words ({wrong} READs)", about=f"{borrower} used")
        if wrong_in_use:
            self._find(f"{borrower} had blocks change while they were in use ({wrong_in_use})", about=f"{borrower} had")
        if old_accepted:
            self._find(
                f"{borrower} accepted a READ of an earlier incarnation ({old_accepted})", about=f"{borrower} accepted"
            )

    def ended_by_itself(self, sentence: str) -> None:
        """A process of the run is gone that nobody killed."""
        self._find(sentence)

    # -- when faults are over -------------------------------------------------------------------------------------

    def settled(
        self,
        held: Mapping[str, Mapping[str, str]],
        told: Mapping[str, Mapping[str, Mapping[str, str]] | str],
    ) -> bool:
        """Whether every replica tells what the lenders hold.

        `held`: by lender, its leases and their hashes. `told`: by replica and lender the same, or why there is none.
        """
        return not self.differences(held, told)

    def not_settled(
        self,
        after_s: float,
        held: Mapping[str, Mapping[str, str]],
        told: Mapping[str, Mapping[str, Mapping[str, str]] | str],
    ) -> None:
        """The time is over, and they still do not agree."""
        for sentence in self.differences(held, told):
            self._find(f"{after_s:.1f} s after the faults: {sentence}")

    def differences(
        self,
        held: Mapping[str, Mapping[str, str]],
        told: Mapping[str, Mapping[str, Mapping[str, str]] | str],
    ) -> list[str]:
        """What does not agree, in sentences."""
        found: list[str] = []
        for replica, views in told.items():
            if isinstance(views, str):
                found.append(f"{replica} does not answer: {views}")
                continue
            for lender, leases in held.items():
                view = views.get(lender, {})
                missing = sorted(leases.keys() - view.keys())
                extra = sorted(view.keys() - leases.keys())
                other = sorted(x for x in leases.keys() & view.keys() if leases[x] != view[x])
                if missing:
                    found.append(f"{replica} lacks {len(missing)} of {lender}'s {len(leases)}: {_some(missing)}")
                if extra:
                    found.append(f"{replica} has {len(extra)} that {lender} does not hold: {_some(extra)}")
                if other:
                    found.append(f"{replica} has other records for {len(other)} of {lender}'s: {_some(other)}")
            silent = sorted(views.keys() - held.keys())
            found += [f"{replica} has leases of {lender}, who does not answer" for lender in silent]
        return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
