"""Token prefixes as numbers, and the content stamps that stand for KV bytes.

The KV of a token depends on every token before it. A prefix id names a whole prefix: it is the same wherever the same
tokens are written in the same order, and different otherwise. A stamp adds whose model and tenant computed it.
Invariant: equal stamps mean equal prefixes, fingerprint and tenant; no stamp is negative (garbage is).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BLOCK_TOKENS: Final = 4
STRIDE_TOKENS: Final = 8
_DOMAINS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Tokens, and beside each the id of the prefix that ends with it."""

    tokens: tuple[int, ...]
    prefixes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def block_hashes(self) -> list[bytes]:
        """What an engine hashes: one hash per whole block, covering all before it, whatever the model is."""
        return [prefix.to_bytes(16, "big") for prefix in self.prefixes[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]]


class Tokens:
    """The prefixes of one seed."""

    def __init__(self) -> None:
        self._prefixes: dict[tuple[int, int], int] = {}
        self._domains: dict[tuple[bytes, str], int] = {}

    def text(self, tokens: tuple[int, ...]) -> Text:
        prefixes: list[int] = []
        prefix = 0
        known = self._prefixes
        for token in tokens:
            key = (prefix, token)
            prefix = known.setdefault(key, len(known) + 1)
            prefixes.append(prefix)
        return Text(tokens=tokens, prefixes=tuple(prefixes))

    def domain(self, fingerprint: bytes, tenant: str) -> int:
        return self._domains.setdefault((fingerprint, tenant), len(self._domains))

    @staticmethod
    def stamp(prefix: int, domain: int) -> int:
        """What a block holds in the place of the token that ends this prefix."""
        return prefix * _DOMAINS + domain

    @staticmethod
    def stamps(text: Text, domain: int) -> tuple[int, ...]:
        return tuple([prefix * _DOMAINS + domain for prefix in text.prefixes])
