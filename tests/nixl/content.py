"""What the blocks of the pair hold: prompts, their prefix hashes, and stamps that make every foreign word visible.

Pure. A prompt is named by numbers instead of tokens; its block hashes chain like an engine's, so that two prompts agree
up to the block where they fork and nowhere after it.

Invariant: two blocks with different stamps differ in *every* 64-bit word, so one torn word is enough to be seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from kvlease.connector import digests
from kvlease.registry.values import DEFAULT_TENANT

Words = npt.NDArray[np.uint64]

BLOCK_TOKENS: Final = 16
STRIDE_TOKENS: Final = 32
STRIDE_BLOCKS: Final = STRIDE_TOKENS // BLOCK_TOKENS
WORD_BYTES: Final = 8
FINGERPRINT: Final = digests.fingerprint({"model": "stamps", "block_tokens": str(BLOCK_TOKENS)})
_SEED: Final = digests.seed(FINGERPRINT.hash, DEFAULT_TENANT)
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The first `blocks` blocks of a conversation; from block `fork` on they are variant `variant`'s own."""

    conversation: int
    blocks: int
    fork: int = 0
    variant: int = 0

    def longer(self, blocks: int) -> Prompt:
        return replace(self, blocks=self.blocks + blocks)

    def forked(self, fork: int, variant: int) -> Prompt:
        """The same up to block `fork`, other tokens from there on."""
        return replace(self, fork=fork, variant=variant)


@lru_cache(maxsize=4096)
def _prefix_hash(conversation: int, fork: int, variant: int, index: int) -> bytes:
    before = _prefix_hash(conversation, fork, variant, index - 1) if index else b""
    own = (variant, fork) if index >= fork else (0, 0)
    return hashlib.sha256(before + repr((conversation, index, own)).encode()).digest()


def block_hashes(prompt: Prompt) -> tuple[bytes, ...]:
    """One hash per block, each covering everything before it, as an engine has them."""
    return tuple(_prefix_hash(prompt.conversation, prompt.fork, prompt.variant, i) for i in range(prompt.blocks))


def digest_chain(prompt: Prompt) -> digests.Chain:
    """The digests of the prompt's whole strides."""
    return digests.chain(
        _SEED,
        block_hashes(prompt),
        hash_tokens=BLOCK_TOKENS,
        stride_tokens=STRIDE_TOKENS,
        tokens=prompt.blocks * BLOCK_TOKENS,
    )


def stamp(generation: int, block_hash: bytes) -> int:
    """The 64-bit stamp of one block written in one generation."""
    digest = hashlib.blake2b(block_hash, digest_size=WORD_BYTES, salt=generation.to_bytes(WORD_BYTES, "little"))
    return int.from_bytes(digest.digest(), "little")


@lru_cache(maxsize=4)
def _offsets(words: int) -> Words:
    mixed: Words = np.arange(1, words + 1, dtype=np.uint64) * _ODD
    return mixed ^ (mixed >> np.uint64(29))


def contents(stamps: Sequence[int], block_bytes: int) -> Words:
    """The words of blocks with these stamps, one row per block. For a given offset, stamp to word is one to one."""
    rows = np.array(stamps, dtype=np.uint64)[:, None]
    words: Words = (rows ^ _offsets(block_bytes // WORD_BYTES)[None, :]) * _ODD
    return words
