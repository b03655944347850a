"""The chats of the replay, as values: when a turn arrives, how long it is, what it has in common with what was said.

Reads `conversations.csv` and nothing else. Invariant: turns are in the order of their arrival.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BLOCK_TOKENS: Final = 512
MS_PER_TOKEN: Final = 30
"""How long a turn decodes."""
_FILE: Final = Path(__file__).with_name("conversations.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One turn."""

    arrival_ms: int
    conversation: int
    input_tokens: int
    output_tokens: int
    common_blocks: int
    """With an earlier turn of the conversation; 0: it begins one."""

    @property
    def blocks(self) -> int:
        """That the turn needs on the decode engine."""
        return -(-(self.input_tokens + self.output_tokens) // BLOCK_TOKENS)

    @property
    def whole_blocks(self) -> int:
        """That can be lent."""
        return (self.input_tokens + self.output_tokens) // BLOCK_TOKENS

    @property
    def end_ms(self) -> int:
        return self.arrival_ms + self.output_tokens * MS_PER_TOKEN


def load() -> Sequence[Chat]:
    with _FILE.open() as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        turns = [Chat(**{name: int(value) for name, value in row.items()}) for row in rows]
    assert turns == sorted(turns, key=lambda turn: turn.arrival_ms)
    return turns
