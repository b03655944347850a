"""How long leases live, on vLLM's real scheduler and block pool: modes, the watermark, and a share for each tenant.

The registry never answers here, so whatever happens the lender does by itself. Time is turned by hand.
"""

from __future__ import annotations

from zlib import crc32

import pytest

pytest.importorskip("vllm", reason="the scheduler is vLLM's: install the engines (make engines-venv)")

from kvlease.connector.link import EndOrder
from kvlease.connector.loads import WorkerReports
from kvlease.registry.metrics import LENDER_ENDS, LENDER_NOT_LENT
from kvlease.registry.values import EndReason, LeaseId

from tests.engines.engine import BLOCK_TOKENS
from tests.engines.inprocess import Desk, DeskSettings, Loads, desk, tokens
from tests.engines.inprocess_workers import HandClock

pytestmark = pytest.mark.engines

LEASE = 8
"""Blocks of each lease here."""


def with_hand_clock(lender: Desk) -> HandClock:
    clock = HandClock()
    lender.side._lending._clock = clock
    return clock


def lend(lender: Desk, name: str, blocks: int = LEASE, tenant: str = "default") -> LeaseId:
    """A finished turn of so many blocks; its lease."""
    before = set(lender.side._lending._holder._held)
    lender.add(
        name,
        tokens(blocks * BLOCK_TOKENS + 1, seed=crc32(name.encode())),
        kvlease={"conversation": name, "tenant": tenant},
    )
    lender.run()
    made = set(lender.side._lending._holder._held) - before
    return LeaseId(next(iter(made), ""))


def live(lender: Desk) -> int:
    """Blocks that live leases hold."""
    return int(lender.side._lending._holder.live_blocks)


def idle_step(lender: Desk) -> None:
    """The engine takes a step with next to nothing in it."""
    lender.add("step", tokens(4))
    lender.run()


@pytest.mark.matrix(
    group="Time passes",
    condition="elastic mode, memory plentiful",
    lent="-",
    reused="up to the longest lifetime",
    freed="then",
    recomputed="-",
)
def test_elastic_leases_stay_while_memory_is_plentiful_and_no_longer_than_the_limit() -> None:
    settings = {"mode": "elastic", "lease_ttl_ms": 1_000, "max_lifetime_ms": 5_000}
    with desk(DeskSettings(role="kv_consumer", kvlease=settings)) as lender:
        clock = with_hand_clock(lender)
        lend(lender, "chat")
        for _ in range(9):
            clock.ms += 500
            idle_step(lender)
            assert live(lender) == LEASE
        clock.ms += 500
        idle_step(lender)
        assert (live(lender), lender.leases) == (0, 1), "lapsed at its limit"


@pytest.mark.matrix(
    group="Time passes",
    condition="elastic mode, memory wanted",
    lent="-",
    reused="lapsed, until reused",
    freed="at once",
    recomputed="-",
)
def test_elastic_leases_are_not_renewed_when_memory_is_wanted() -> None:
    settings = {"mode": "elastic", "lease_ttl_ms": 1_000, "keep_free": 0.5, "lease_share": 1.0}
    with desk(DeskSettings(role="kv_consumer", blocks=65, kvlease=settings)) as lender:
        clock = with_hand_clock(lender)
        lend(lender, "chat")
        lender.add("running", tokens(40 * BLOCK_TOKENS, seed=7), max_tokens=30)
        lender.step()
        lender.step()
        assert (live(lender), lender.leases, lender.whole_seals) == (0, 1, 1), "lapsed at once, and still readable"
        clock.ms += 1_000
        lender.run()


@pytest.mark.matrix(
    group="Time passes",
    condition="heartbeat mode",
    lent="-",
    reused="while renewed",
    freed="when idle or closed",
    recomputed="afterwards",
)
def test_heartbeat_leases_live_as_long_as_somebody_renews_them() -> None:
    settings = {"mode": "heartbeat", "lease_ttl_ms": 2_000, "on_deadline": "end"}
    with desk(DeskSettings(role="kv_consumer", kvlease=settings)) as lender:
        clock = with_hand_clock(lender)
        alive, idle = lend(lender, "alive"), lend(lender, "idle")
        for _ in range(3):
            clock.ms += 1_500
            lender.side._link.on_renew(alive, 0)
            idle_step(lender)
        assert live(lender) == LEASE
        assert lender.count(LENDER_ENDS, reason="expired") == 1
        assert idle not in lender.side._lending._holder
        lender.side._link.orders.append(EndOrder(lease_id=alive, reason=EndReason.RELEASED))
        idle_step(lender)
        assert (lender.leases, lender.whole_seals) == (0, 0), "closed: back at once"
        assert lender.count(LENDER_ENDS, reason="released") == 1


@pytest.mark.parametrize("on_deadline", ["lapse", "end"])
@pytest.mark.matrix(
    group="Memory is wanted",
    condition="free blocks below the watermark",
    lent="-",
    reused="lapsed leases, until their blocks are reused",
    freed="the least recently used leases, in the same step",
    recomputed="-",
)
def test_below_the_watermark_leases_give_way_before_anything_is_refused(on_deadline: str) -> None:
    settings = {"keep_free": 0.25, "on_deadline": on_deadline}
    with desk(DeskSettings(role="kv_consumer", blocks=65, kvlease=settings)) as lender:
        for number in range(4):
            lend(lender, f"chat-{number}")
        assert (lender.free, live(lender)) == (32, 4 * LEASE)
        lender.add("running", tokens(20 * BLOCK_TOKENS, seed=99), max_tokens=9)
        lender.step()
        lender.step()
        assert live(lender) == 3 * LEASE
        assert lender.free >= 16
        assert lender.leases == (4 if on_deadline == "lapse" else 3)
        lender.run()


@pytest.mark.matrix(
    group="Memory is wanted",
    condition="who goes first",
    lent="-",
    reused="leases of conversations that come back, for longer",
    freed="the others first",
    recomputed="-",
)
def test_a_lease_that_borrowers_read_outlives_one_that_nobody_reads() -> None:
    with desk(DeskSettings(role="kv_consumer", blocks=65, kvlease={"keep_free": 0.5})) as lender:
        read = lend(lender, "read")
        unread = lend(lender, "unread")
        lender.add("step", tokens(4))
        lender.step(Loads(reports=WorkerReports(reads=[read, "made-up"])))
        lender.run()
        lender.add("running", tokens(17 * BLOCK_TOKENS, seed=99), max_tokens=5)
        lender.step()
        lender.step()
        held = lender.side._lending._holder._held
        assert {lease: held[lease].state.value for lease in (read, unread)} == {read: "live", unread: "lapsed"}
        lender.run()


@pytest.mark.matrix(
    group="Memory is wanted",
    condition="a tenant over its share, registry away",
    lent="up to the share",
    reused="other tenants', untouched",
    freed="its own oldest leases",
    recomputed="-",
)
def test_a_tenant_over_its_share_ends_its_own_leases() -> None:
    """With no registry to say so."""
    settings = {"lease_share": 0.5, "tenant_share": 0.5, "tenant_shares": {"small": 0.25}}
    with desk(DeskSettings(role="kv_consumer", blocks=129, kvlease=settings)) as lender:
        theirs = lend(lender, "theirs", tenant="other")
        for number in range(10):
            lend(lender, f"many-{number}", tenant="greedy")
        assert live(lender) == 5 * LEASE
        assert theirs in lender.side._lending._holder
        assert lender.count(LENDER_ENDS, reason="quota") == 6
        lend(lender, "fits", blocks=16, tenant="small")
        assert lend(lender, "too-large", blocks=18, tenant="small") == ""
        assert lender.count(LENDER_NOT_LENT, reason="quota") == 1
