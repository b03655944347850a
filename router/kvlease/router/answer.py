"""What an engine's answer said, gathered from its stream or its whole body: messages, error, token counts.

Pure, and a spectator: it sees bytes after they were forwarded. Bounded by `MAX_CHOICES` and `max_answer_chars`; past
them an answer gets no alias, nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

from kvlease.router.body import Json, JsonObject
from kvlease.router.sse import SseParser

MAX_CHOICES: Final = 8
"""As many branches as the registry keeps per conversation."""
MAX_ANSWER_CHARS: Final = 1024 * 1024
MAX_TOOL_CALLS: Final = 128
_DONE: Final = b"[DONE]"


@dataclass(slots=True, kw_only=True)
class _ToolCall:
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Choice:
    content: list[str] = field(default_factory=list)
    tool_calls: dict[int, _ToolCall] = field(default_factory=dict)
    finished: bool = False

    def message(self) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": "".join(self.content)}
        if self.tool_calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": "".join(call.arguments)}}
                for _, call in sorted(self.tool_calls.items())
            ]
        return message


class AnswerReader:
    """Reads one answer to a chat: `feed` chunks of a stream, or `whole` for a body."""

    __slots__ = ("_chars", "_choices", "_done", "_max_chars", "_parser", "completion_tokens", "failed", "overflowed")

    def __init__(self, *, max_answer_chars: int = MAX_ANSWER_CHARS) -> None:
        self.failed = False
        """The engine reported an error inside the stream."""
        self.overflowed = False
        self.completion_tokens: int | None = None
        self._parser = SseParser()
        self._done = False
        self._choices: dict[int, _Choice] = {}
        self._chars = 0
        self._max_chars = max_answer_chars

    def feed(self, chunk: bytes) -> None:
        """Takes in a chunk of a stream of chat chunks."""
        for event in self._parser.feed(chunk):
            if event.data == _DONE:
                self._done = True
            else:
                self._take(event.data, "delta")
        self.overflowed = self.overflowed or self._parser.overflowed

    def whole(self, body: bytes) -> None:
        """Takes in a whole chat completion."""
        self._take(body, "message")

    def end(self) -> bool:
        """The stream is over: whether the engine meant it to be, as far as it could be read.

        It did if it said so ([DONE]), or if every choice has a reason to have finished. A stream of something else than
        answers has nothing to be judged by.
        """
        self.feed(b"\n\n")  # the blank line after the last event, should the engine have left it out
        strange = self.overflowed and not self._choices
        return self._done or self.complete or self._parser.overflowed or strange

    @property
    def finished(self) -> int:
        """How many choices have finished."""
        return sum(choice.finished for choice in self._choices.values())

    @property
    def complete(self) -> bool:
        """Whether every choice that has begun has also finished, and there is one."""
        return bool(self._choices) and self.finished == len(self._choices)

    def messages(self) -> list[JsonObject]:
        """The finished assistant messages, by choice; none if the answer failed, overflowed or has not finished."""
        if self.failed or self.overflowed or not self.complete:
            return []
        return [choice.message() for _, choice in sorted(self._choices.items())]

    def _take(self, data: bytes, part: str) -> None:
        try:
            chunk: Json = json.loads(data)
        except (ValueError, RecursionError):
            self.overflowed = True  # not a chat answer: nothing here can be trusted to be one
            return
        if not isinstance(chunk, dict):
            return
        if "error" in chunk and chunk["error"] is not None:
            self.failed = True
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            tokens = usage.get("completion_tokens")
            self.completion_tokens = tokens if isinstance(tokens, int) else self.completion_tokens
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._take_choice(choice, part)

    def _take_choice(self, fields: JsonObject, part: str) -> None:
        index = fields.get("index", 0)
        if not isinstance(index, int) or not 0 <= index < MAX_CHOICES:
            return
        choice = self._choices.setdefault(index, _Choice())
        message = fields.get(part)
        if isinstance(message, dict):
            self._take_message(choice, message)
        if fields.get("finish_reason") is not None:
            choice.finished = True

    def _take_message(self, choice: _Choice, message: JsonObject) -> None:
        content = message.get("content")
        if isinstance(content, str) and self._fits(content):
            choice.content.append(content)
        calls = message.get("tool_calls")
        for position, call in enumerate(calls if isinstance(calls, list) else ()):
            if not isinstance(call, dict):
                continue
            index = call.get("index", position)
            function = call.get("function")
            if not isinstance(index, int) or not isinstance(function, dict):
                continue
            if len(choice.tool_calls) >= MAX_TOOL_CALLS and index not in choice.tool_calls:
                self.overflowed = True
                return
            found = choice.tool_calls.setdefault(index, _ToolCall())
            name, arguments = function.get("name"), function.get("arguments")
            if isinstance(name, str) and self._fits(name):
                found.name += name
            if isinstance(arguments, str) and self._fits(arguments):
                found.arguments.append(arguments)

    def _fits(self, text: str) -> bool:
        self._chars += len(text)
        if self._chars > self._max_chars:
            self.overflowed = True
            self._choices.clear()
        return not self.overflowed
