"""What a soak says at its end: one object for machines, a few lines for people, both from the judge and the counters.

No I/O. Invariant: `faults` holds everything that fails the run, so an empty list is the verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tests.soak.counters import Counters
from tests.soak.judge import Fault, Judge


def report(name: str, minutes: float, judge: Judge, counters: Counters, restarts: Mapping[str, int]) -> dict[str, Any]:
    """Closes the judge's book."""
    reused = counters.total("kvlease_borrower_reused_tokens_total")
    for hook, count in counters.by_label("kvlease_connector_faults_total").items():
        judge.fault(Fault.CONNECTOR, f"{hook}: {count:.0f}")
    judge.end(reused)
    by_fault = Counter(str(fault) for fault, _ in judge.faults)
    return {
        "phase": name,
        "minutes": round(minutes, 1),
        "turns": judge.counts["turns"],
        "kinds": {str(kind): count for kind, count in judge.kinds.items()},
        "prompt_tokens": judge.prompt_tokens,
        "reused_tokens": int(reused),
        "reused_share": round(reused / max(1, judge.prompt_tokens), 3),
        "borrows": int(counters.total("kvlease_borrower_borrows_total")),
        "not_borrowed": counters.by_label("kvlease_borrower_misses_total"),
        "not_lent": counters.by_label("kvlease_lender_turns_not_lent_total"),
        "leases_ended": counters.by_label("kvlease_lender_ends_total"),
        "unproven_reads": counters.by_label("kvlease_borrower_unproven_reads_total"),
        "late_reads": int(counters.total("kvlease_borrower_late_reads_total")),
        "fallbacks": counters.by_label("kvlease_router_fallbacks_total"),
        "restarts": dict(restarts),
        "counts": dict(judge.counts),
        "longest_request_s": round(judge.longest_s, 1),
        "largest_difference": judge.largest_difference,
        "wrong": by_fault[Fault.WRONG],
        "faults": [f"{fault}: {what}" for fault, what in judge.faults],
        "faults_by_kind": dict(by_fault),
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The report, a line each."""
    for key, value in found.items():
        if key == "faults":
            yield from (f"  FAULT {fault}" for fault in value)
        else:
            yield f"  {key}: {value}"
