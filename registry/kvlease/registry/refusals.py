"""What is refused is logged, with ids, and not so often that a caller could fill a disk with it.

No decisions. Texts are formats with ids and numbers; never tokens, digests or messages.
Invariant: at most BURST lines in WINDOW_MS; how many were left out is said with the next line.
"""

from __future__ import annotations

import logging
from typing import Final

from kvlease.registry.clock import Clock

BURST: Final = 20
WINDOW_MS: Final = 10_000

_log = logging.getLogger(__name__)


class Refusals:
    """A log that cannot be flooded."""

    def __init__(self, clock: Clock) -> None:
        self._clock: Final = clock
        self._window_ends_ms = 0
        self._written = 0
        self._left_out = 0

    def note(self, text: str, *values: object) -> None:
        """`text` is a format for `values`, as in logging."""
        now_ms = self._clock.now_ms()
        if now_ms >= self._window_ends_ms:
            self._window_ends_ms = now_ms + WINDOW_MS
            self._written = 0
        if self._written >= BURST:
            self._left_out += 1
            return
        self._written += 1
        _log.warning("refused: " + text, *values)
        if self._left_out:
            _log.warning("refused: %d more, not logged one by one", self._left_out)
            self._left_out = 0
