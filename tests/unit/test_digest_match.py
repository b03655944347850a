"""common_strides: the binary search agrees with a plain loop on every pair of real digest chains.

A chain is real if each digest covers everything before it, so the generated ones are made of hashes.
"""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlease.registry.values import DIGEST_BYTES, common_strides


def chain(strides: list[int], seed: bytes = b"") -> bytes:
    digests, state = [], seed
    for stride in strides:
        state = hashlib.sha256(state + stride.to_bytes(4, "little")).digest()
        digests.append(state[:DIGEST_BYTES])
    return b"".join(digests)


def by_loop(a: bytes, b: bytes) -> int:
    count = 0
    while (count + 1) * DIGEST_BYTES <= min(len(a), len(b)):
        piece = slice(count * DIGEST_BYTES, (count + 1) * DIGEST_BYTES)
        if a[piece] != b[piece]:
            break
        count += 1
    return count


@given(
    common=st.lists(st.integers(0, 3), max_size=40),
    left=st.lists(st.integers(0, 3), max_size=40),
    right=st.lists(st.integers(0, 3), max_size=40),
)
def test_agrees_with_a_loop(common: list[int], left: list[int], right: list[int]) -> None:
    a, b = chain(common + left), chain(common + right)
    assert common_strides(a, b) == by_loop(a, b)
    assert common_strides(b, a) == common_strides(a, b) >= len(common)


@pytest.mark.parametrize("total", [1, 2, 3, 7, 8, 9, 64, 4096])
def test_every_length_of_prefix(total: int) -> None:
    whole = chain(list(range(total)))
    for common in {0, 1, total // 2, total - 1, total}:
        other = whole[: common * DIGEST_BYTES] + chain(list(range(total - common)), seed=b"another history")
        assert common_strides(whole, other) == common


def test_nothing_is_common_with_nothing_or_with_half_a_digest() -> None:
    whole = chain([1, 2, 3])
    assert common_strides(b"", whole) == common_strides(whole, b"") == 0
    assert common_strides(whole, whole[: DIGEST_BYTES // 2]) == 0
    assert common_strides(whole, whole[: 2 * DIGEST_BYTES + 3]) == 2
