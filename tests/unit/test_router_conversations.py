"""Aliases: the next turn is recognised whatever a client does to the form of what it sends back.

Pure. A miss here costs reuse; two different chats under one alias would too, so both are tested.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvlease.registry.values import MAX_ALIASES, Alias, ConversationId, TenantId
from kvlease.router.conversations import AliasChain, RecentNames, from_headers
from kvlease.router.errors import InvalidRequest

T = TenantId("t")
ASK: dict[str, Any] = {"role": "user", "content": "What is up?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "The sky."}
MORE: dict[str, Any] = {"role": "user", "content": "And down?"}


def chain(*messages: dict[str, Any], tenant: TenantId = T, model: str = "m") -> AliasChain:
    return AliasChain(tenant, model, messages)


def test_a_continuation_is_known_by_the_next_turn() -> None:
    named = chain(ASK).continued(ANSWER)
    assert chain(ASK, ANSWER, MORE).known() == (named,)


def test_a_first_turn_knows_nothing() -> None:
    assert chain({"role": "system", "content": "s"}, ASK).known() == ()


def test_the_longest_prefix_comes_first() -> None:
    first = chain(ASK).continued(ANSWER)
    second = chain(ASK, ANSWER, MORE).continued(ANSWER)
    assert chain(ASK, ANSWER, MORE, ANSWER, ASK).known() == (second, first)


def test_an_answer_that_is_being_continued_is_no_prefix() -> None:
    assert chain(ASK, ANSWER).known() == ()


def test_no_more_aliases_than_a_call_may_carry() -> None:
    long = chain(*[ASK, ANSWER] * 100, MORE)
    assert len(long.known()) == MAX_ALIASES
    assert long.known()[0] == chain(*[ASK, ANSWER] * 99, ASK).continued(ANSWER)


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}


@pytest.mark.parametrize(
    ("said", "sent_back"),
    [
        ({"role": "assistant", "content": "x"}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}),
        ({"role": "assistant", "content": "x "}, {"role": "assistant", "content": "x", "refusal": None}),
        ({"role": "assistant", "content": "<think>hm</think>\n\nx"}, {"role": "assistant", "content": "x"}),
        ({"role": "assistant", "content": "x"}, {"role": "assistant", "content": "x", "reasoning_content": "hm"}),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": CALL["function"]}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "other", "function": {"name": "f", "arguments": '{"b":2,"a":1}'}}],
            },
        ),
    ],
)
def test_the_form_of_an_answer_does_not_matter(said: dict[str, Any], sent_back: dict[str, Any]) -> None:
    follow = {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    assert chain(ASK, sent_back, follow).known() == (chain(ASK).continued(said),)


@pytest.mark.parametrize(
    "other",
    [
        chain(MORE, ANSWER, MORE),
        chain(ASK, {**ANSWER, "content": "The ground."}, MORE),
        chain(ASK, {**ANSWER, "name": "n"}, MORE),
        chain({**ASK, "role": "system"}, ANSWER, MORE),
        chain(ASK, ANSWER, MORE, model="other"),
        chain(ASK, ANSWER, MORE, tenant=TenantId("other")),
        chain(ASK, {**ANSWER, "tool_calls": [CALL]}, MORE),
        chain({**ASK, "content": [{"type": "image_url", "image_url": {"url": "data:1"}}]}, ANSWER, MORE),
    ],
)
def test_another_history_has_another_name(other: AliasChain) -> None:
    assert other.known()[0] != chain(ASK, ANSWER, MORE).known()[0]


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
KEYS = st.sampled_from(["role", "content", "name", "tool_calls", "x"])


@settings(suppress_health_check=[HealthCheck.too_slow])  # nested JSON, on a busy machine
@given(st.lists(st.dictionaries(KEYS, JSON), min_size=1, max_size=4))
def test_any_messages_have_a_name(messages: list[dict[str, Any]]) -> None:
    assert len(AliasChain(T, "m", messages).continued(messages[0])) == 16


def nested(depth: int) -> Any:
    deep: Any = []
    for _ in range(depth):
        deep = [deep]
    return deep


def test_messages_nested_too_deep_are_refused_and_arguments_stay_a_text() -> None:
    with pytest.raises(InvalidRequest):
        chain({"role": "user", "content": nested(20_000)})
    for depth in (10, 980, 20_000):  # a model may write them, and the stream that it is on goes on
        call: Any = {"function": {"name": "f", "arguments": "[" * depth + "]" * depth}}
        assert chain(ASK).continued({"role": "assistant", "content": "", "tool_calls": [call]})


def test_lone_surrogates_can_be_named() -> None:
    assert chain({"role": "user", "content": "\ud800"}).continued(ANSWER)


def test_headers_name_a_conversation() -> None:
    assert from_headers({}) is None
    assert from_headers({"x-kvlease-conversation": "a", "x-conversation-id": "b"}) == "a"
    assert from_headers({"x-conversation-id": "b"}) == "b"
    assert from_headers({"x-conversation-id": "not an id"}) is None
    with pytest.raises(InvalidRequest):
        from_headers({"x-kvlease-conversation": "not an id"})


def taken(names: RecentNames, alias: Alias) -> tuple[str, bool] | None:
    found = names.take(alias)
    return None if found is None else (found.conversation, found.continues)


ONE, TWO, THREE = (Alias(bytes([i]) * 16) for i in range(3))
C1, C2, C3 = (ConversationId(f"c{i}") for i in (1, 2, 3))


def test_recent_names_keep_what_is_used() -> None:
    names = RecentNames(limit=2)
    names.name(C1, [ONE, TWO])
    assert taken(names, ONE) == ("c1", True)
    names.name(C3, [THREE])
    assert [taken(names, x) for x in (ONE, TWO, THREE)] == [("c1", True), None, ("c3", True)]
    assert len(names) == 2, "the one not used for longest goes"


def test_chats_that_are_alike_get_a_conversation_each() -> None:
    names = RecentNames(limit=9)
    for conversation in (C1, C2, C3):
        names.name(conversation, [ONE])
    assert {taken(names, ONE) for _ in range(3)} == {("c1", True), ("c2", True), ("c3", True)}


def test_what_is_left_are_branches_of_the_newest_until_it_has_enough_of_them() -> None:
    names = RecentNames(limit=9)
    names.name(C1, [ONE])
    assert [taken(names, ONE) for _ in range(8)] == [("c1", True)] * 8
    assert [taken(names, ONE) for _ in range(2)] == [("c1", False)] * 2
    names.name(C2, [ONE])
    assert [taken(names, ONE) for _ in range(8)] == [("c2", True)] * 8
    assert taken(names, ONE) == ("c2", False)


def test_a_turn_that_came_to_nothing_leaves_its_conversation_to_the_next_try() -> None:
    names = RecentNames(limit=9)
    names.name(C1, [ONE])
    names.name(C2, [ONE])
    assert taken(names, ONE) == ("c2", True)
    names.give_back(ONE, C2)
    assert {taken(names, ONE) for _ in range(2)} == {("c1", True), ("c2", True)}


def test_a_name_that_another_router_gave_is_taken_once_it_is_used() -> None:
    names = RecentNames(limit=1)
    names.name(C1, [ONE])
    names.taken(TWO, C2)
    assert taken(names, ONE) is None
    names.taken(TWO, C3)
    assert [taken(names, TWO) for _ in range(8)] == [("c2", True)] * 7 + [("c2", False)]


def test_the_conversations_of_one_alias_are_bounded() -> None:
    names = RecentNames(limit=1)
    for number in range(1_000):
        names.name(ConversationId(f"c{number}"), [ONE, ONE])
    found = {taken(names, ONE) for _ in range(256)}
    assert found == {(f"c{number}", True) for number in range(744, 1_000)}
