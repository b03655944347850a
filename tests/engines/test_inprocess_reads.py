"""kvlease's worker on real NIXL agents: every ordered load is reported once, and good only if its seal said so.

The faults are those that an engine alone does not show: records no READ can go by, a handshake that comes back late, a
READ that NIXL keeps open. `Open` stands in for a peer that hangs; it wraps NIXL's agent, not ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the worker is vLLM's: install the engines (make engines-venv)")
pytest.importorskip("nixl_cu12", reason="the worker needs NIXL: install the engines (make engines-venv)")

from kvlease.connector.borrower import ComputeReason

from tests.engines.inprocess_workers import READ_LIMIT_MS, Pair, pair

pytestmark = [pytest.mark.engines, pytest.mark.nixl]

UNTOUCHED = -1.0


@pytest.fixture
def workers() -> Iterator[Pair]:
    with pair() as opened:
        yield opened


class Open:
    """NIXL's agent, but transfers made while `holding` stay in progress until they are let go."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._held: set[object] = set()
        self.holding = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> object:
        handle = self._agent.make_prepped_xfer(*args, **kwargs)
        if self.holding:
            self._held.add(handle)
        return handle

    def check_xfer_state(self, handle: object) -> str:
        return "PROC" if handle in self._held else str(self._agent.check_xfer_state(handle))

    def let_go(self) -> None:
        self._held.clear()
        self.holding = False


def idle(workers: Pair) -> bool:
    """Nothing of any load is left in the worker."""
    worker = workers.borrower
    return not (worker._kvl_loads or len(worker._kvl_prover) or worker._kvl_late or worker._kvl_refused) and not (
        worker._recving_transfers or worker._recving_metadata or worker._recv_failures
    )


@pytest.mark.matrix(
    group="A borrow fails",
    condition="seal broken, seal of another record, impossible blocks",
    lent="-",
    reused="nothing",
    freed="all",
    recomputed="all",
)
def test_loads_good_broken_and_impossible(workers: Pair) -> None:
    """One pair for all that needs no fault in NIXL: starting agents takes longer than the reads."""
    workers.listen()
    order, _ = workers.order(0, [3, 4, 5])
    workers.start("good", order, [4, 5], [8, 9])
    report = workers.outcome("good")
    assert report.reason is None
    assert workers.held([8, 9]) == [4.0, 5.0]
    assert workers.held([7, 10]) == [UNTOUCHED, UNTOUCHED]

    order, _ = workers.order(1, [6])
    workers.table.break_seal(1)
    workers.start("broken", order, [6], [2])
    assert workers.outcome("broken").reason is ComputeReason.SEAL_BROKEN

    other, _ = workers.order(2, [6])
    workers.table.write_hash(2, bytes(24))
    workers.start("mixed-up", other, [6], [2])
    assert workers.outcome("mixed-up").reason is ComputeReason.SEAL_OTHER_RECORD

    for number, impossible in enumerate(([2**32 - 1], [10_000], [1, 2])):
        order, _ = workers.order(3, [1])
        workers.start(f"impossible-{number}", order, impossible, [2] if len(impossible) == 1 else [2, 3, 4])
        assert workers.outcome(f"impossible-{number}").reason is ComputeReason.READ_FAILED

    workers.start("refused", None, [], [])
    assert workers.outcome("refused") is None
    assert idle(workers)

    order, _ = workers.order(4, [7])
    workers.start("after", order, [7], [2])
    assert workers.outcome("after").reason is None
    assert workers.held([2]) == [7.0]


@pytest.mark.matrix(
    group="A borrow fails",
    condition="a handshake that is slow",
    lent="-",
    reused="nothing",
    freed="at once: nothing was posted",
    recomputed="all",
)
def test_a_handshake_that_comes_back_late_posts_nothing(workers: Pair) -> None:
    """The load was given up, so its local blocks may be another request's by then."""
    order, _ = workers.order(0, [3])
    workers.start("late", order, [3], [8])
    workers.clock.ms += READ_LIMIT_MS
    report = workers.outcome("late")
    assert (report.reason, report.late) == (ComputeReason.READ_TIMEOUT, False)
    workers.listen()
    order, _ = workers.order(1, [4])
    workers.start("next", order, [4], [9])
    assert workers.outcome("next").reason is None
    assert workers.held([8, 9]) == [UNTOUCHED, 4.0]
    assert idle(workers)


def test_an_open_read_is_late_until_it_is_over_and_its_engine_is_kept(workers: Pair) -> None:
    workers.listen()
    agent = Open(workers.borrower.nixl_wrapper)
    workers.borrower.nixl_wrapper = agent
    order, _ = workers.order(0, [3])
    workers.start("open", order, [3], [8])
    while not workers.borrower._recving_transfers.get("open"):
        workers.step()
    workers.clock.ms += READ_LIMIT_MS
    report = workers.outcome("open")
    assert (report.reason, report.late) == (ComputeReason.READ_TIMEOUT, True)

    # Another engine has taken the address over: stock lets go of the replaced one as soon as nothing is read from it.
    workers.borrower._engine_by_address.clear()
    workers.step()
    assert "lender" in workers.borrower._remote_agents
    assert workers.borrower.build_reports() is None

    agent.let_go()
    reports = None
    while reports is None:
        workers.step()
        reports = workers.borrower.build_reports()
    assert reports.reports.landed_late == [("open", 0)]
    workers.step()
    assert "lender" not in workers.borrower._remote_agents
    assert idle(workers)
