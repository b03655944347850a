"""Telling, in the link's thread: the hash of a record stands beside its value before anybody hears of the lease.

The link is the product's, its registry unreachable: what is told goes nowhere, what is written can be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvlease.connector.announcer import Announcer, Standing
from kvlease.connector.instruments import Instruments
from kvlease.connector.journal import Journal
from kvlease.connector.lender_effects import Announce, AnnounceEnded
from kvlease.connector.link import Link
from kvlease.connector.probe import LenderProbe
from kvlease.connector.record import record_hash
from kvlease.connector.seal import VALUE_BYTES
from kvlease.connector.seal_table import SealTable
from kvlease.connector.settings import ConnectorSettings
from kvlease.registry.clock import SystemClock
from kvlease.registry.metrics import LENDER_ENDS, LENDER_LEASED_BLOCKS, LENDER_LEASES, LENDER_PUBLISHES
from kvlease.registry.telemetry import configure_tracing
from kvlease.registry.values import EndReason, LeaseId

from tests.unit.lender_story import TERMS, holder, loan, seal
from tests.unit.test_connector_link import OpenSideChannel

STANDING = Standing(leases=3, lapsed=1, pinned_blocks=7, free_blocks=5, total_blocks=12)


class Told:
    """A lender of two ranks with one slot each, and its announcer, which the test calls."""

    def __init__(self, directory: Path) -> None:
        settings, clock = ConnectorSettings.load({"registry": "127.0.0.1:1"}), SystemClock()
        probe = LenderProbe(OpenSideChannel(), clock, settings.probe_ms)
        self.link = Link(settings, clock, Journal(configure_tracing("test")), probe)
        self.tables = [SealTable.create(1, directory) for _ in range(2)]
        self.holder = holder(slots=1)
        self.instruments = Instruments()
        self.announcer = Announcer(
            TERMS, self.link, self.tables, self.instruments, slot_of=lambda lease_id: self.holder.slot_of(lease_id)
        )

    def lend(self, name: str) -> Announce:
        """Lends, and writes the seal's value as the engine's thread does."""
        effects = self.holder.lend(loan(name, conversation=None), 0)
        for table in self.tables:
            table.write_value(0, seal(effects).value)
        return next(effect for effect in effects if isinstance(effect, Announce))

    def hashes(self) -> set[bytes]:
        return {table.read(0)[VALUE_BYTES:] for table in self.tables}

    def count(self, metric: str, **labels: str) -> float | None:
        return self.instruments.registry.get_sample_value(metric, labels)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    for table in made.tables:
        table.close()


def hash_of(announced: Announce) -> bytes:
    return record_hash(announced.draft.publication().record)


def test_the_seal_holds_the_hash_of_the_record(told: Told) -> None:
    announced = told.lend("a")
    before = [table.read(0)[:VALUE_BYTES] for table in told.tables]
    told.announcer.tell([announced], STANDING)
    assert told.hashes() == {hash_of(announced)}
    assert [table.read(0)[:VALUE_BYTES] for table in told.tables] == before, "the value is the engine's thread's"


def test_a_lease_that_has_gone_leaves_its_slots_next_lease_alone(told: Told) -> None:
    gone = told.lend("a")
    told.holder.end(LeaseId("a"), EndReason.PRESSURE)
    follower = told.lend("b")
    told.announcer.tell([follower], STANDING)
    told.announcer.tell([gone], STANDING)
    assert told.hashes() == {hash_of(follower)}


def test_what_is_told_is_counted(told: Told) -> None:
    announced = told.lend("a")
    (ended,) = (x for x in told.holder.end(LeaseId("a"), EndReason.REUSED) if isinstance(x, AnnounceEnded))
    told.announcer.tell([announced, ended], STANDING)
    assert told.count(LENDER_PUBLISHES.name) == 1
    assert told.count(LENDER_ENDS.name, reason="reused") == 1
    assert (told.count(LENDER_LEASES.name, state="live"), told.count(LENDER_LEASES.name, state="lapsed")) == (2, 1)
    assert told.count(LENDER_LEASED_BLOCKS.name) == 7
