"""The side parser and the answer reader: any split of a stream means the same, and memory is bounded.

Pure. The oracle for the parser reads the whole text at once, line by line.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlease.router.answer import MAX_CHOICES, AnswerReader
from kvlease.router.sse import MAX_EVENT_BYTES, SseEvent, SseParser

LINES = st.sampled_from(
    [
        b"data: one",
        b"data:two",
        b"data:  three",
        b"data",
        b"event: error",
        b": a comment",
        b"id: 7",
        b"",
        b"",
        "data: é".encode(),
    ]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


def split(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(stream) + 1) for cut in cuts})
    return [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]


def read_at_once(stream: bytes) -> list[SseEvent]:
    """The rules of the standard, applied to the whole text line by line."""
    events: list[SseEvent] = []
    data: list[bytes] = []
    name = b""
    lines = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for line in lines[:-1]:
        if not line:
            if data:
                events.append(SseEvent(name=name, data=b"\n".join(data)))
            data, name = [], b""
            continue
        field, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return events


@given(st.booleans(), st.lists(st.tuples(LINES, ENDS), max_size=30), st.lists(st.integers(0, 1000), max_size=20))
def test_any_split_gives_the_events_of_the_whole(bom: bool, lines: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = (b"\xef\xbb\xbf" if bom else b"") + b"".join(line + end for line, end in lines)
    parser = SseParser()
    events = [event for piece in split(stream, cuts) for event in parser.feed(piece)]
    assert events == read_at_once(stream)


def test_an_event_over_the_limit_stops_the_parser_and_its_memory() -> None:
    parser = SseParser(max_event_bytes=100)
    assert parser.feed(b"data: ok\n\n") == [SseEvent(name=b"", data=b"ok")]
    for _ in range(1000):
        assert parser.feed(b"x" * 50) == []
    assert parser.overflowed
    assert parser.feed(b"\n\ndata: late\n\n") == []


def test_many_short_data_lines_count_toward_the_limit() -> None:
    parser = SseParser(max_event_bytes=100)
    for _ in range(40):
        parser.feed(b"data: x\n")
    assert parser.overflowed


def event(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


def test_a_streamed_message_is_put_together() -> None:
    reader = AnswerReader()
    reader.feed(event(delta={"role": "assistant", "content": ""}))
    reader.feed(event(delta={"content": "Hel"}) + event(delta={"content": "lo"}))
    assert not reader.complete
    reader.feed(event(delta={}, finish_reason="stop") + b"data: [DONE]\n\n")
    assert reader.messages() == [{"role": "assistant", "content": "Hello"}]


def test_streamed_tool_calls_are_put_together_in_order() -> None:
    reader = AnswerReader()
    first, second = {"index": 1, "function": {"name": "b", "arguments": "{}"}}, {"index": 0, "function": {"name": "a"}}
    reader.feed(event(delta={"tool_calls": [first, second]}))
    reader.feed(event(delta={"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]}))
    reader.feed(
        event(delta={"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}, finish_reason="tool_calls")
    )
    calls = [{"function": {"name": "a", "arguments": '{"x":1}'}}, {"function": {"name": "b", "arguments": "{}"}}]
    assert reader.messages() == [{"role": "assistant", "content": "", "tool_calls": calls}]


def test_an_unfinished_or_failed_answer_has_no_message() -> None:
    cut = AnswerReader()
    cut.feed(event(delta={"content": "half"}))
    assert cut.messages() == []
    failed = AnswerReader()
    failed.feed(event(delta={"content": "half"}, finish_reason="stop") + b'data: {"error":{"message":"x"}}\n\n')
    assert failed.failed
    assert failed.messages() == []


@pytest.mark.parametrize(
    ("stream", "meant"),
    [
        (event(delta={"content": "half"}), False),
        (event(delta={"content": "half"}) + b"data: [DONE]\n\n", True),
        (event(delta={"content": "half"}) + b"data: [DONE]", True),
        (event(delta={"content": "all"}, finish_reason="stop"), True),
        (event(delta={"content": "all"}, finish_reason="stop") + b'data: {"choices":[],"usage":{}}\n\n', True),
        (event(delta={"content": "half"}) + b'data: {"choices":[],"usage":{}}\n\n', False),
        (event(text="half", finish_reason=None), False),
        (event(text="all", finish_reason="length"), True),
        (event(delta={}, finish_reason="stop") + event(index=1, delta={}), False),
        (event(delta={}, finish_reason="stop") + event(index=1, delta={}, finish_reason="stop"), True),
        (event(delta={"content": "half"}) + event(delta={}, finish_reason="stop")[:40], False),
        (b": comment\n\ndata: [DONE]\n\n", True),
        (b": comment\n\n", False),
        (b"data: not JSON\n\n", True),
        (event(delta={"content": "half"}) + b"data: not JSON\n\n", False),
        (b"data: " + b"x" * MAX_EVENT_BYTES, True),
    ],
)
def test_a_stream_ends_when_the_engine_says_so(stream: bytes, meant: bool) -> None:
    """What could not be read is taken to have ended well."""
    reader = AnswerReader()
    reader.feed(stream)
    assert reader.end() is meant


def test_text_over_the_limit_gives_no_message() -> None:
    reader = AnswerReader(max_answer_chars=10)
    reader.feed(event(delta={"content": "x" * 11}, finish_reason="stop"))
    assert reader.overflowed
    assert reader.messages() == []


def test_choices_over_the_limit_are_not_kept() -> None:
    reader = AnswerReader()
    for index in range(MAX_CHOICES + 5):
        fields = {"index": index, "delta": {"content": "x"}, "finish_reason": "stop"}
        reader.feed(b"data: " + json.dumps({"choices": [fields]}).encode() + b"\n\n")
    assert len(reader.messages()) == MAX_CHOICES


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_no_json_at_all_upsets_the_reader(value: object) -> None:
    reader = AnswerReader()
    reader.feed(b"data: " + json.dumps(value).encode() + b"\n\n")
    reader.whole(json.dumps({"choices": [value], "usage": value}).encode())
    assert reader.messages() == []
