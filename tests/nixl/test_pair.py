"""A lender that reuses its blocks while borrowers READ them, on real NIXL agents: no wrong word is ever accepted.

A slice of what `python -m tests.nixl` runs at length. Every rule that keeps it so is broken once here, by a double, and
the same judge must see a wrong word; so the clean runs can fail.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvlease.connector.borrower import ComputeReason
from kvlease.connector.seal_table import DIRECTORY, PREFIX

from tests.nixl.messages import Counts, Fault, Transport, Workload
from tests.nixl.pair import Pair, PairSettings

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]

PATIENCE_S = 120.0
"""For runs that take seconds on an idle machine."""
ENDLESS = 10_000_000
"""READs of borrowers that a test ends when it has seen enough."""


def nothing_wrong(counts: Counts) -> None:
    assert counts.wrong == 0, f"accepted with a wrong word: {counts}"
    assert counts.wrong_in_use == 0, f"changed while in use: {counts}"
    assert counts.old_incarnation_accepted == 0, f"accepted from another incarnation: {counts}"


def shared_files() -> list[str]:
    return [str(path) for path in DIRECTORY.glob(f"{PREFIX}-*")]


def seen_all(counts: Counts) -> bool:
    """Whether everything has happened that the seal is there for: a torn READ among them."""
    refused = (ComputeReason.SEAL_BROKEN, ComputeReason.SEAL_OTHER_RECORD)
    torn = counts.overlap > 0 and counts.overlap_wrong > 0
    return counts.right > 0 and torn and all(counts.refused.get(reason, 0) for reason in refused)


@pytest.mark.parametrize("transport", list(Transport))
async def test_no_wrong_word_is_accepted_while_the_lender_reuses(transport: Transport) -> None:
    async with Pair(PairSettings(reads=ENDLESS, transport=transport)) as pair:
        counts = await pair.until(lambda counts: counts.reads >= 1_000 and seen_all(counts), PATIENCE_S)
    print(f"{transport}: READ p50/p90/p99 {counts.read_us} us, seal READ {counts.seal_us} us, {counts}")
    nothing_wrong(counts)


async def test_every_read_is_judged() -> None:
    async with Pair(PairSettings(reads=1_000)) as pair:
        counts = await pair.finished(PATIENCE_S)
    nothing_wrong(counts)
    assert counts.reads >= 1_000
    assert counts.right + counts.refusals == counts.reads


@pytest.mark.parametrize(
    "fault",
    [
        Fault.SEAL_NOT_READ,
        Fault.SEAL_READ_BEFORE_BLOCKS,
        Fault.SEAL_BROKEN_AFTER_REUSE,
        Fault.MAPPED_FROM_TAIL,
        Fault.REUSE_CALLBACK_PER_LEASE,
        Fault.RECORD_HASH_NOT_COMPARED,
    ],
)
async def test_each_rule_left_out_lets_a_wrong_word_through(fault: Fault) -> None:
    async with Pair(PairSettings(reads=ENDLESS, fault=fault)) as pair:
        await pair.until(lambda counts: counts.wrong > 0, PATIENCE_S)


async def test_a_seal_value_used_again_lets_a_wrong_word_through() -> None:
    settings = PairSettings(reads=ENDLESS, workload=Workload.SAME_SLOT, fault=Fault.SLOT_VALUE_REUSED)
    async with Pair(settings) as pair:
        await pair.until(lambda counts: counts.wrong > 0, PATIENCE_S)


async def test_a_slot_used_again_for_the_same_tokens_is_told_apart() -> None:
    async with Pair(PairSettings(reads=1_000, workload=Workload.SAME_SLOT)) as pair:
        counts = await pair.finished(PATIENCE_S)
    nothing_wrong(counts)
    assert counts.right > 0
    assert counts.overlap > 0


async def test_a_killed_lender_costs_its_reads_only() -> None:
    """Killed with READs under way; another one at the same addresses takes its place and gets old records' READs."""
    settings = PairSettings(reads=ENDLESS, transport=Transport.TCP, borrowers=1, read_limit_ms=2_000)
    async with Pair(settings) as pair:
        first = pair.ready
        before = await pair.until(lambda counts: counts.right >= 20, PATIENCE_S)
        await pair.stop_lender()
        await pair.until(lambda counts: counts.reading > 0, PATIENCE_S)
        await pair.kill_lender()
        lost = (ComputeReason.READ_FAILED, ComputeReason.READ_TIMEOUT)
        await pair.until(
            lambda counts: any(counts.refused.get(reason, 0) for reason in lost) and not counts.reading, PATIENCE_S
        )
        second = await pair.start_lender()
        assert first is not None
        assert (second.table_address, second.memory_address) == (first.table_address, first.memory_address)
        assert first.shared_file not in shared_files(), "the killed lender's table was not swept"
        after = await pair.until(
            lambda counts: (
                counts.incarnations == 2 and counts.old_incarnation > 0 and counts.right >= before.right + 20
            ),
            PATIENCE_S,
        )
        await pair.until(lambda counts: counts.retired_seals == 0, PATIENCE_S)
    nothing_wrong(after)


async def stopped_over_the_limit(pair: Pair) -> Counts:
    """Stops the lender until READs are late, lets it go on, and waits until all of them are over."""
    before = await pair.until(lambda counts: counts.right >= 20, PATIENCE_S)
    await pair.stop_lender()
    late = await pair.until(lambda counts: counts.late >= 2 and counts.retired_seals >= 1, PATIENCE_S)
    pair.continue_lender()
    after = await pair.until(
        lambda counts: counts.late == counts.late_over and counts.right >= before.right + 50, PATIENCE_S
    )
    assert late.refused[ComputeReason.READ_TIMEOUT] == late.late
    return after


STOPPED = PairSettings(reads=ENDLESS, transport=Transport.TCP, borrowers=1, in_flight=16, read_limit_ms=300)


async def test_a_late_read_lands_in_quarantine() -> None:
    async with Pair(STOPPED) as pair:
        counts = await stopped_over_the_limit(pair)
        assert counts.late_landed > 0, "no late READ landed: the quarantine had nothing to keep"
        await pair.until(lambda counts: counts.quarantined == 0 and counts.retired_seals == 0, PATIENCE_S)
    nothing_wrong(counts)


async def test_without_quarantine_a_late_read_overwrites_what_is_in_use() -> None:
    async with Pair(replace(STOPPED, fault=Fault.QUARANTINE_LEFT_OUT)) as pair:
        await stopped_over_the_limit(pair)
        await pair.until(lambda counts: counts.wrong_in_use > 0, PATIENCE_S)


async def test_many_readers_of_one_lease_until_it_ends() -> None:
    settings = PairSettings(reads=ENDLESS, borrowers=3, in_flight=12, workload=Workload.ONE_LEASE)
    async with Pair(settings) as pair:
        await pair.until(lambda _: len(pair.each) == 3 and all(each.right >= 50 for each in pair.each), PATIENCE_S)
        assert not pair.counts.refused
        pair.end_lease()
        counts = await pair.until(
            lambda _: all(each.refused.get(ComputeReason.SEAL_BROKEN, 0) >= 50 for each in pair.each), PATIENCE_S
        )
    nothing_wrong(counts)
