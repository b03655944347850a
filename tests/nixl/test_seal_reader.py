"""The seal reader on a real NIXL agent that reads its own table: what it hands out, and what it does out of slots.

READs that a stopped or killed lender never answers are in `test_pair.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvlease.connector.seal import HASH_BYTES, SLOT_BYTES, SealRef, pack_value, slot_offset
from kvlease.connector.seal_reader import SealRead, SealReader, SealReadState
from kvlease.connector.seal_table import SealTable

from tests.nixl.agent import Agent, open_agent
from tests.nixl.messages import Transport

pytestmark = pytest.mark.nixl

HASH = bytes(range(HASH_BYTES))
NAME = "seal-reader-test"
WAIT_S = 10.0


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SealTable]:
    made = SealTable.create(8, Path(tmp_path_factory.mktemp("table")))
    yield made
    made.close()


@pytest.fixture(scope="module")
def agent(table: SealTable) -> Agent:
    os.environ.setdefault("UCX_TLS", Transport.SM.ucx_tls)
    return open_agent(NAME, [(table.address, table.size, 0, "")])


def reader_of(agent: Agent, slots: int) -> SealReader:
    reader = SealReader(agent, slots)
    agent.register_memory(agent.get_reg_descs([reader.region], "DRAM"))
    return reader


def seal(table: SealTable, slot: int, value: int) -> SealRef:
    return SealRef(pp_rank=0, tp_rank=0, address=table.address + slot_offset(slot), value=value)


def outcome(reader: SealReader, read: SealRead) -> SealReadState:
    until = time.monotonic() + WAIT_S
    while (state := reader.poll(read)) is SealReadState.PENDING and time.monotonic() < until:
        time.sleep(0.0001)
    return state


def test_each_read_brings_the_slot_as_it_was_then(agent: Agent, table: SealTable) -> None:
    reader = reader_of(agent, 2)
    table.write_hash(2, HASH)
    table.write_value(2, 71)
    for expected in (pack_value(71) + HASH, pack_value(0) + HASH):
        read = reader.post(NAME, seal(table, 2, 71))
        assert outcome(reader, read) is SealReadState.DONE
        assert read.data == expected
        assert reader.poll(read) is SealReadState.DONE
        table.break_seal(2)


def test_two_reads_at_once_do_not_answer_for_each_other(agent: Agent, table: SealTable) -> None:
    reader = reader_of(agent, 4)
    for slot in range(4):
        table.write_hash(slot, HASH)
        table.write_value(slot, 100 + slot)
    reads = [reader.post(NAME, seal(table, slot, 100 + slot)) for slot in range(4)]
    for slot in (2, 0, 3, 1):
        assert outcome(reader, reads[slot]) is SealReadState.DONE
    assert [read.data for read in reads] == [pack_value(100 + slot) + HASH for slot in range(4)]


def test_out_of_landing_slots_a_seal_counts_as_unreadable(agent: Agent, table: SealTable) -> None:
    reader = reader_of(agent, 1)
    first = reader.post(NAME, seal(table, 0, 1))
    second = reader.post(NAME, seal(table, 1, 1))
    assert second.state is SealReadState.FAILED
    assert second.data is None
    assert outcome(reader, first) is SealReadState.DONE
    assert outcome(reader, reader.post(NAME, seal(table, 1, 1))) is SealReadState.DONE


@pytest.mark.parametrize("name", ["nobody", ""])
def test_an_unknown_agent_is_a_failure_and_costs_no_slot(agent: Agent, table: SealTable, name: str) -> None:
    reader = reader_of(agent, 1)
    for _ in range(3):
        read = reader.post(name, seal(table, 0, 1))
        assert outcome(reader, read) is SealReadState.FAILED
        assert read.data is None
    assert reader.retired == 0
    assert outcome(reader, reader.post(NAME, seal(table, 0, 1))) is SealReadState.DONE


def test_an_address_outside_what_the_lender_registered_is_a_failure(agent: Agent, table: SealTable) -> None:
    reader = reader_of(agent, 1)
    outside = SealRef(pp_rank=0, tp_rank=0, address=table.address + table.size + SLOT_BYTES, value=1)
    assert outcome(reader, reader.post(NAME, outside)) is SealReadState.FAILED
    assert reader.retired == 0


def test_a_read_given_up_leaves_its_slot_to_the_next_once_it_is_over(agent: Agent, table: SealTable) -> None:
    reader = reader_of(agent, 1)
    table.write_hash(0, HASH)
    table.write_value(0, 5)
    table.write_hash(1, HASH)
    table.write_value(1, 6)
    read = reader.post(NAME, seal(table, 0, 5))
    reader.give_up(read)
    assert reader.poll(read) is not SealReadState.PENDING
    until = time.monotonic() + WAIT_S
    while (after := reader.post(NAME, seal(table, 1, 6))).state is SealReadState.FAILED and time.monotonic() < until:
        time.sleep(0.0001)
    assert outcome(reader, after) is SealReadState.DONE
    assert after.data == pack_value(6) + HASH
