"""The seal check by itself: `python -m tests.bench.seal_reads LENDER EFFORT`, LENDER being what the lender said.

A real `SealReader` on a real NIXL agent reads the lender's seal again and again, each answer being judged as a borrower
does; then the lender's own stores, breaking and writing. Says one figure after another, then null.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Final

from kvlease.connector.seal import HASH_BYTES, Proof, SealRef, SealVerdict, verdict
from kvlease.connector.seal_reader import SealReader, SealReadState
from kvlease.connector.seal_table import SealTable

from tests.bench.effort import FULL, QUICK, Effort
from tests.bench.figures import Budget, Figure, Unit, at_most, encode, quantile
from tests.bench.served import say
from tests.nixl.agent import Memory, open_agent

SECTION: Final = "seal check"
BUDGET: Final = at_most(1.0)
"""Milliseconds added to a borrowed turn, p50."""
READ_S: Final = 10.0
PAGE_BYTES: Final = 4_096
WARM_READS: Final = 20
STORES_EACH: Final = 50
"""Stores between two looks at the clock, which is slower than one of them."""


class SealUnproven(RuntimeError):
    """The seal could not be read, or did not say what it should."""


class Reading:
    """One borrower, one seal."""

    def __init__(self, lender: Mapping[str, object]) -> None:
        self._blocks = Memory(1, PAGE_BYTES)
        self._agent = open_agent("bench-borrower", [self._blocks.region])
        self._reader = SealReader(self._agent)
        self._agent.register_memory(self._agent.get_reg_descs([self._reader.region], "DRAM"))
        name = self._agent.add_remote_agent(bytes.fromhex(str(lender["metadata"])))
        self._name = name.decode() if isinstance(name, bytes) else name
        seal = SealRef(pp_rank=0, tp_rank=0, address=int(str(lender["address"])), value=int(str(lender["value"])))
        self._proof = Proof(seal=seal, record_hash=bytes.fromhex(str(lender["record_hash"])))

    def once(self) -> tuple[float, float]:
        """Milliseconds from post to verdict, and of `post` alone. Raises SealUnproven."""
        began_ns = time.perf_counter_ns()
        read = self._reader.post(self._name, self._proof.seal)
        posted_ns = time.perf_counter_ns()
        limit_ns = began_ns + int(READ_S * 1e9)
        while (state := self._reader.poll(read)) is SealReadState.PENDING:
            if time.perf_counter_ns() > limit_ns:
                raise SealUnproven(f"no seal within {READ_S:.0f} s")
        if state is not SealReadState.DONE or read.data is None:
            raise SealUnproven("the seal could not be read")
        found = verdict(self._proof, read.data)
        ended_ns = time.perf_counter_ns()
        if found is not SealVerdict.WHOLE:
            raise SealUnproven(f"the seal is {found}")
        return (ended_ns - began_ns) / 1e6, (posted_ns - began_ns) / 1e6


def reads(lender: Mapping[str, object], effort: Effort, transport: str) -> list[Figure]:
    reading = Reading(lender)
    for _ in range(WARM_READS):
        reading.once()
    samples = [reading.once() for _ in range(effort.seals)]
    whole, post = [sample[0] for sample in samples], [sample[1] for sample in samples]
    return [
        _figure(f"{transport}: post, READ, poll, verdict, p50", Unit.MILLISECONDS, whole, 0.5, BUDGET),
        _figure(f"{transport}: post, READ, poll, verdict, p99", Unit.MILLISECONDS, whole, 0.99, None),
        _figure(f"{transport}: post alone, p50", Unit.MILLISECONDS, post, 0.5, None),
    ]


def stores(effort: Effort) -> list[Figure]:
    """What the lender's thread pays for a seal."""
    table = SealTable.create(effort.leases)
    record_hash = bytes(HASH_BYTES)
    written: list[float] = []
    broken: list[float] = []
    try:
        for number in range(max(4, effort.seals // STORES_EACH)):
            began_ns = time.perf_counter_ns()
            for slot in range(STORES_EACH):
                table.write_value(slot % table.slots, number * STORES_EACH + slot + 1)
                table.write_hash(slot % table.slots, record_hash)
            wrote_ns = time.perf_counter_ns()
            for slot in range(STORES_EACH):
                table.break_seal(slot % table.slots)
            broke_ns = time.perf_counter_ns()
            written.append((wrote_ns - began_ns) / 1e3 / STORES_EACH)
            broken.append((broke_ns - wrote_ns) / 1e3 / STORES_EACH)
    finally:
        table.close()
    return [
        _figure("lender: write a seal, p50", Unit.MICROSECONDS, written, 0.5, None),
        _figure("lender: break a seal, p50", Unit.MICROSECONDS, broken, 0.5, None),
    ]


def _figure(name: str, unit: Unit, samples: list[float], share: float, budget: Budget | None) -> Figure:
    return Figure(
        section=SECTION,
        name=name,
        unit=unit,
        value=quantile(samples, share),
        low=quantile(samples, 0.25),
        high=quantile(samples, 0.75),
        budget=budget,
        note=f"{len(samples):,} samples",
    )


def main(lender: object, effort: Effort) -> None:
    if not isinstance(lender, dict):
        raise SystemExit("the first argument is what the lender said")
    transport = os.environ.get("UCX_TLS", "UCX's choice").split(",")[0]
    found = reads(lender, effort, transport)
    if transport == "sm":
        found += stores(effort)
    for figure in found:
        say(encode(figure))
    say(None)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), QUICK if sys.argv[2:] == ["quick"] else FULL)
