"""An incremental parser of server-sent events, for looking at a stream that has been forwarded already.

Pure. Rules: WHATWG HTML, section 9.2.6, less `id` and `retry`, which no engine sends. It never touches what is
forwarded.

Invariant: any split of the same bytes gives the same events. Memory is bounded: an event above `max_event_bytes` stops
the parser for good (`overflowed`), because what follows could not be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_EVENT_BYTES: Final = 1024 * 1024
"""A chunk of a chat with log-probs and tool calls stays below 100 KiB."""
_BOM: Final = b"\xef\xbb\xbf"
_CR: Final = b"\r"
_LF: Final = b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SseEvent:
    """One event that carried data; `name` is b"" if the stream gave none."""

    name: bytes
    data: bytes


class SseParser:
    """Feed bytes as they come, get the events they complete."""

    __slots__ = ("_after_cr", "_data", "_line", "_max", "_name", "_size", "_started", "overflowed")

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.overflowed = False
        self._max = max_event_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._name = b""
        self._size = 0
        self._after_cr = False
        self._started = False

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """The events completed by `chunk`, in order; none once `overflowed`."""
        if self.overflowed or not chunk:
            return []
        if self._after_cr and chunk.startswith(_LF):
            chunk = chunk[1:]
            self._after_cr = False
            if not chunk:
                return []
        self._after_cr = chunk.endswith(_CR)
        events: list[SseEvent] = []
        pieces = chunk.replace(b"\r\n", _LF).replace(_CR, _LF).split(_LF)
        for piece in pieces[:-1]:
            self._line += piece
            if not self._fits():
                return events
            event = self._end_line(bytes(self._line))
            self._line.clear()
            if event is not None:
                events.append(event)
        self._line += pieces[-1]
        self._fits()
        return events

    def _fits(self) -> bool:
        if self._size + len(self._line) > self._max:
            self.overflowed = True
            self._line.clear()
            self._data.clear()
        return not self.overflowed

    def _end_line(self, line: bytes) -> SseEvent | None:
        if not self._started:
            self._started = True
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(line)
        elif name == b"event":
            self._name = value
        return None

    def _dispatch(self) -> SseEvent | None:
        event = SseEvent(name=self._name, data=b"\n".join(self._data)) if self._data else None
        self._data.clear()
        self._name = b""
        self._size = 0
        return event
