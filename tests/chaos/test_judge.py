"""The judge of chaos runs: each rule broken once, in the smallest way, is found; what is allowed is not.

That it also sees what real processes do wrong is in `test_chaos.py`.
"""

from __future__ import annotations

import pytest

from tests.chaos.judge import Judge
from tests.chaos.reach import in_contact

MEMBERS = ("m1", "m2", "m3")
HELD = {"d0": {"a": "1", "b": "2"}, "d1": {}}


@pytest.fixture
def judge() -> Judge:
    made = Judge(bound_s=5.0, slack_s=1.0)
    for name in ("r0#1", "r1#1"):
        made.answered(name, 0.0, None)
    return made


def test_an_end_holds_at_the_replica_that_acknowledged_it(judge: Judge) -> None:
    judge.end_acknowledged("a", "r0#1", 9.0, 10.0, 1)
    judge.answered("r0#1", 9.5, "a")  # was on its way
    judge.answered("r0#1", 10.1, None)
    judge.answered("r0#1", 10.1, "b")
    assert not judge.findings
    judge.answered("r0#1", 10.1, "a")
    assert "r0#1 acknowledged the end of a" in judge.findings[0]


def test_an_end_holds_everywhere_after_the_bound(judge: Judge) -> None:
    judge.end_acknowledged("a", "r0#1", 9.0, 10.0, 1)
    judge.answered("r1#1", 15.9, "a")
    assert not judge.findings
    judge.answered("r1#1", 16.1, "a")
    assert "the bound is 5.0 s" in judge.findings[0]


def test_a_replica_that_serves_since_after_an_end_may_have_to_hear_of_it_first(judge: Judge) -> None:
    judge.end_acknowledged("a", "r0#1", 9.0, 10.0, 1)
    judge.refused("r1#2", 9.0)  # not current yet
    judge.answered("r1#2", 11.0, None)
    judge.answered("r1#2", 20.0, "a")
    assert not judge.findings


def test_an_end_that_ended_nothing_promises_nothing(judge: Judge) -> None:
    judge.end_acknowledged("a", "r0#1", 9.0, 10.0, 0)
    judge.answered("r0#1", 20.0, "a")
    assert not judge.findings


def test_a_replica_without_contact_answers_nothing_after_the_bound(judge: Judge) -> None:
    judge.contact("r0#1", False, 10.0)
    judge.contact("r0#1", False, 14.0)  # it began at 10
    judge.answered("r0#1", 15.9, None)
    judge.refused("r0#1", 30.0)
    assert not judge.findings
    judge.answered("r0#1", 16.1, None)
    assert "r0#1 answered 6.1 s after it lost the store" in judge.findings[0]


def test_contact_that_is_back_counts_anew(judge: Judge) -> None:
    judge.contact("r0#1", False, 10.0)
    judge.contact("r0#1", True, 12.0)
    judge.contact("r0#1", False, 20.0)
    judge.answered("r0#1", 25.5, None)
    assert not judge.findings


def test_nothing_ends_that_nobody_asked_to_end(judge: Judge) -> None:
    judge.end_asked("a", "r0#1", 1.0)
    judge.end_ordered("a", "released")
    judge.end_ordered("b", "superseded")
    judge.publish_refused("a", "ended")
    assert not judge.findings
    judge.end_ordered("c", "lender_lost")
    judge.publish_refused("d", "ended")
    assert [sentence.split()[2] for sentence in judge.findings] == ["ended", "answered"]


def test_one_wrong_word_is_enough(judge: Judge) -> None:
    judge.bytes_read("p0", wrong=0, wrong_in_use=0, old_accepted=0)
    assert not judge.findings
    for count in ("wrong", "wrong_in_use", "old_accepted"):
        judge.bytes_read("p0", **{"wrong": 0, "wrong_in_use": 0, "old_accepted": 0, count: 1})
    assert len(judge.findings) == 3


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"d0": {"a": "1"}, "d1": {}}, "r0 lacks 1 of d0's 2: b"),
        ({"d0": {"a": "1", "b": "2", "c": "3"}, "d1": {}}, "r0 has 1 that d0 does not hold: c"),
        ({"d0": {"a": "1", "b": "x"}, "d1": {}}, "r0 has other records for 1 of d0's: b"),
        ("no contact", "r0 does not answer: no contact"),
    ],
)
def test_all_agree_or_it_is_said_who_does_not(
    judge: Judge, told: dict[str, dict[str, str]] | str, sentence: str
) -> None:
    assert judge.settled(HELD, {"r0": HELD, "r1": HELD})
    views = {"r0": told, "r1": HELD}
    assert not judge.settled(HELD, views)
    judge.not_settled(10.0, HELD, views)
    assert judge.findings == [f"10.0 s after the faults: {sentence}"]


def test_contact_needs_a_majority_and_both_directions() -> None:
    def reached(running: set[str], cuts: set[tuple[str, str]]) -> bool:
        return in_contact("r0", MEMBERS, frozenset(running), frozenset(cuts))

    assert reached({"m1", "m2"}, set())
    assert not reached({"m1"}, set())
    assert not reached({"m1", "m2"}, {("m1", "m2")})
    assert reached({"m1", "m2", "m3"}, {("m1", "r0"), ("r0", "m2")})
    assert not reached({"m1", "m2", "m3"}, {("m1", "r0"), ("r0", "m2"), ("m3", "r0")})
    assert not reached({"m1", "m2", "m3"}, {("m1", "m2"), ("m1", "m3"), ("r0", "m2"), ("r0", "m3")})
