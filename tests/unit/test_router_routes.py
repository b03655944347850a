"""Route choice: fewest turns first, the lender if it can, and doubtful engines last.

Pure: time is a number the test makes up.
"""

from __future__ import annotations

import pytest
from kvlease.registry.values import (
    DEFAULT_TENANT,
    ConversationId,
    EngineId,
    Incarnation,
    LeaseId,
    LeaseState,
    LeaseView,
    Located,
)
from kvlease.router.routes import Health, Role, Routes, Target, base_url

P = [Target(role=Role.PREFILL, url=f"http://p{i}") for i in range(3)]
D = [Target(role=Role.DECODE, url=f"http://d{i}") for i in range(3)]


def routes(*targets: Target) -> Routes:
    return Routes(targets or (*P, *D), cooldown_ms=1000)


def located(engine_id: str, api_url: str) -> Located:
    lease = LeaseView(
        lease_id=LeaseId("l"),
        tenant=DEFAULT_TENANT,
        conversation=ConversationId("c"),
        engine_id=EngineId(engine_id),
        incarnation=Incarnation(b"i" * 16),
        tokens=64,
        stride_tokens=64,
        blocks=4,
        size_bytes=1,
        state=LeaseState.LIVE,
        remaining_ms=1000,
    )
    return Located(conversation=ConversationId("c"), lease=lease, api_url=api_url)


def test_ties_go_round() -> None:
    table = routes()
    assert [table.choose_prefill(0) for _ in range(6)] == [*P, *P]


def test_the_fewest_turns_win() -> None:
    table = routes()
    table.begin(P[0])
    table.begin(P[1])
    assert [table.choose_prefill(0) for _ in range(2)] == [P[2], P[2]]
    table.finish(P[1])
    table.begin(P[2])
    assert table.choose_prefill(0) == P[1]


def test_outstanding_never_goes_below_zero() -> None:
    table = routes()
    table.begin(D[0])
    table.finish(D[0])
    with pytest.raises(ValueError, match="finish without begin"):
        table.finish(D[0])
    assert table.outstanding(D[0]) == 0


def test_the_lender_is_preferred_even_when_busy() -> None:
    table = routes()
    table.begin(D[2])
    assert table.choose_decode(0, lender=D[2]) == D[2]


def test_a_lender_that_failed_or_is_excluded_is_not_insisted_on() -> None:
    table = routes()
    table.failed(D[2], 0)
    assert table.choose_decode(10, lender=D[2]) == D[0]
    assert table.choose_decode(1000, lender=D[2]) == D[2]
    assert table.choose_decode(1000, lender=D[2], exclude={D[2]}) == D[1]


def test_cooling_prefill_is_avoided_and_never_insisted_on() -> None:
    table = routes(P[0], D[0])
    table.failed(P[0], 0)
    assert table.choose_prefill(999) is None
    assert table.choose_prefill(1000) == P[0]


def test_a_doubtful_decode_engine_is_the_last_resort() -> None:
    table = routes(P[0], D[0], D[1])
    table.probed(D[0], up=False)
    assert [table.choose_decode(0) for _ in range(2)] == [D[1], D[1]]
    assert table.choose_decode(0, exclude={D[1]}) == D[0]
    assert table.choose_decode(0, exclude={D[0], D[1]}) is None


def test_an_engine_that_comes_back_is_used_at_once() -> None:
    table = routes(P[0], D[0])
    table.failed(P[0], 0)
    table.probed(P[0], up=True)
    assert table.choose_prefill(1) is None  # it was never seen down: the failure was not about being away
    table.probed(P[0], up=False)
    table.probed(P[0], up=True)
    assert table.choose_prefill(1) == P[0]


def test_ready_needs_one_of_each_role() -> None:
    table = routes()
    assert not table.ready()
    table.probed(P[1], up=True)
    assert not table.ready()
    table.probed(D[0], up=True)
    assert table.ready()
    table.probed(D[0], up=False)
    assert not table.ready()
    assert table.health(D[0]) is Health.DOWN


def test_the_lender_is_found_by_url_or_by_configured_id() -> None:
    pinned = Target(role=Role.DECODE, url="http://10.0.0.1:8000", engine_id=EngineId("d-7"))
    table = routes(P[0], D[0], pinned)
    assert table.lender(located("whoever", "http://d0/v1/")) == D[0]
    assert table.lender(located("d-7", "http://localhost:8000")) == pinned
    assert table.lender(located("d-8", "http://10.0.0.1:8000")) is None
    assert table.lender(located("d-8", "")) is None
    assert table.lender(Located(conversation=None, lease=None)) is None
    assert table.lender(None) is None


def test_urls_compare_without_their_tail() -> None:
    assert base_url("http://h:1/v1/") == base_url("http://h:1/") == base_url("http://h:1") == "http://h:1"
