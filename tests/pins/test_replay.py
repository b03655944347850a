"""What each way of keeping leases comes to on the same chats: less pinned than stock's pin, no turn turned away for it.

The figures are exact, being simulated; what is asserted is what users are told, not each number.
"""

from __future__ import annotations

import pytest

from tests.pins.chats import load
from tests.pins.replay import Lender, Outcome, Stock, replay, ways

CHATS = load()
SIZES = (600, 1_200, 4_800)


@pytest.fixture(scope="module", params=SIZES)
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    made = ways(request.param)
    return {name: replay(engine, CHATS) for name, engine in made.items()}


def test_no_turn_is_turned_away_for_what_only_leases_hold(outcomes: dict[str, Outcome]) -> None:
    """L8: stock's pins cost turns where they are more than the pool; leases never do."""
    assert all(not outcome.turned_away for name, outcome in outcomes.items() if not name.startswith("stock"))


def test_heartbeat_leases_that_lapse_pin_a_fraction_and_serve_as_many(outcomes: dict[str, Outcome]) -> None:
    stock, heartbeat = outcomes["stock: 480 s, or first read"], outcomes["heartbeat 60 s, lapsing"]
    assert heartbeat.pinned_block_seconds < 0.5 * stock.pinned_block_seconds
    assert heartbeat.reused_tokens > 0.95 * stock.reused_tokens
    assert outcomes["heartbeat 60 s"].reused < heartbeat.reused


def test_elastic_leases_serve_about_as_many_as_fixed_ones(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["elastic, lapsing"].reused >= 0.97 * outcomes["fixed 480 s, lapsing"].reused


def test_lapsing_pins_nothing_more_and_serves_no_less(outcomes: dict[str, Outcome]) -> None:
    for way in ("fixed 480 s", "heartbeat 60 s", "elastic"):
        plain, lapsing = outcomes[way], outcomes[f"{way}, lapsing"]
        assert lapsing.pinned_block_seconds <= 1.01 * plain.pinned_block_seconds
        assert lapsing.reused >= plain.reused


def test_stocks_pins_cost_turns_where_memory_is_short() -> None:
    assert replay(Stock(600), CHATS).turned_away > 100
    assert replay(Stock(4_800), CHATS).turned_away == 0


def test_every_block_is_back_when_all_is_over() -> None:
    lender = Lender(1_200, ttl_ms=1_000, keep_free_blocks=60)
    replay(lender, CHATS)
    lender.advance(10**9)
    running = sum(lender._pool.references(block) > 0 for block in range(1_200))
    still = sum(chat.blocks for chat in CHATS if chat.end_ms > CHATS[-1].arrival_ms)
    assert running <= still
    assert lender._holder.live_blocks == 0
