"""Digest chains: equal exactly where tokens, identity and fingerprint are equal, and in whole strides only.

The chain is compared with a naive one, and two chains with the tokens they were made of; no engine, no registry.
"""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlease.connector.digests import MAX_SEEDS, Chain, Seeds, chain, fingerprint, seed, stride_for
from kvlease.registry.values import DIGEST_BYTES, FINGERPRINT_BYTES, MAX_DIGESTS, TenantId, common_strides

FIELDS = {"model": "m", "kv_dtype": "fp16", "block_tokens": "16"}
SEED = seed(fingerprint(FIELDS).hash, TenantId("t"))


def hashes(tokens: list[int]) -> list[bytes]:
    """What an engine with 4 tokens a block would have hashed: each hash covers everything before it."""
    found: list[bytes] = []
    running = b""
    for start in range(0, len(tokens) // 4 * 4, 4):
        running = hashlib.sha256(running + repr(tokens[start : start + 4]).encode()).digest()
        found.append(running)
    return found


def made(tokens: list[int], *, seed_bytes: bytes = SEED, stride_tokens: int = 8) -> Chain:
    return chain(seed_bytes, hashes(tokens), hash_tokens=4, stride_tokens=stride_tokens, tokens=len(tokens))


def digests(tokens: list[int], *, seed_bytes: bytes = SEED, stride_tokens: int = 8) -> bytes:
    return made(tokens, seed_bytes=seed_bytes, stride_tokens=stride_tokens).digests


tokens_lists = st.lists(st.integers(0, 2), max_size=40)


@given(tokens_lists, tokens_lists, tokens_lists)
def test_two_chains_agree_on_exactly_the_common_whole_strides(
    common: list[int], one: list[int], other: list[int]
) -> None:
    a, b = common + one, common + other
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_strides(digests(a), digests(b)) == same // 8


@given(tokens_lists)
def test_a_chain_equals_the_naive_one(tokens: list[int]) -> None:
    block_hashes = hashes(tokens)
    naive = b"".join(
        bytes(a ^ b for a, b in zip(SEED[:DIGEST_BYTES], block_hashes[2 * stride + 1][:DIGEST_BYTES], strict=True))
        for stride in range(len(tokens) // 8)
    )
    assert digests(tokens) == naive


@given(tokens_lists, tokens_lists)
def test_a_chain_extends_exactly_those_that_its_digests_begin_with(one: list[int], other: list[int]) -> None:
    for left, right in ((one, other), (one, one[: len(other)]), (one, one + other)):
        a, b = made(left), made(right)
        assert a.extends(b) == a.digests.startswith(b.digests)
    assert not made(one, seed_bytes=bytes(32)).extends(made(one)), "of another tenant or fingerprint"


def test_digests_that_exist_already_are_a_chain() -> None:
    assert Chain.of(digests([1] * 24)).digests == digests([1] * 24)
    assert len(Chain.of(b"")) == 0
    with pytest.raises(ValueError, match="no multiple of 16"):
        Chain.of(bytes(17))


def test_a_chain_keeps_what_it_was_made_of() -> None:
    """The engine may cut a request's list of hashes later, when somebody else's thread asks for digests."""
    block_hashes = hashes([1] * 40)
    found = chain(SEED, block_hashes, hash_tokens=4, stride_tokens=8, tokens=40)
    del block_hashes[1:]
    assert found.digests == digests([1] * 40)


def test_a_chain_covers_no_token_past_those_that_count() -> None:
    block_hashes = hashes(list(range(40)))
    for tokens in (0, 7, 8, 15, 16, 39, 40, 400):
        found = chain(SEED, block_hashes, hash_tokens=4, stride_tokens=8, tokens=tokens)
        assert len(found) == min(tokens, 40) // 8
        assert len(found.digests) == len(found) * DIGEST_BYTES


def test_a_chain_is_bounded() -> None:
    found = chain(SEED, [bytes(32)] * (MAX_DIGESTS + 5), hash_tokens=4, stride_tokens=4, tokens=4 * (MAX_DIGESTS + 5))
    assert len(found) == MAX_DIGESTS


def test_hashes_too_short_to_rest_on_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter than 16 bytes"):
        chain(SEED, [bytes(8)] * 4, hash_tokens=4, stride_tokens=4, tokens=16)


@pytest.mark.parametrize(
    "other",
    [
        seed(fingerprint({**FIELDS, "kv_dtype": "fp8"}).hash, TenantId("t")),
        seed(fingerprint(FIELDS).hash, TenantId("u")),
    ],
    ids=["fingerprint", "tenant"],
)
def test_another_fingerprint_or_tenant_shares_no_digest(other: bytes) -> None:
    tokens = list(range(16))
    assert not common_strides(digests(tokens), digests(tokens, seed_bytes=other))


def test_a_fingerprint_does_not_depend_on_the_order_of_its_fields() -> None:
    found = fingerprint(FIELDS)
    assert found == fingerprint(dict(reversed(FIELDS.items())))
    assert len(found.hash) == FINGERPRINT_BYTES
    assert found.fields == tuple(sorted(FIELDS.items()))


def test_a_fingerprint_keeps_names_and_values_apart() -> None:
    assert fingerprint({"ab": "c"}).hash != fingerprint({"a": "bc"}).hash
    assert fingerprint({"a": "b", "c": "d"}).hash != fingerprint({"a": "bc", "": "d"}).hash


def test_differences_between_fingerprints_have_names() -> None:
    other = fingerprint({**FIELDS, "kv_dtype": "fp8", "lora": "x"})
    assert fingerprint(FIELDS).differences(other) == ("kv_dtype", "lora")


@given(st.sampled_from([16, 32, 48, 64, 96]), st.sampled_from([16, 32, 48]), st.integers(1, 256))
def test_a_stride_holds_whole_blocks_and_whole_hashes(block: int, hashed: int, wanted: int) -> None:
    stride = stride_for(block, hashed, wanted)
    assert stride >= wanted
    assert stride % block == 0
    assert stride % hashed == 0
    assert all(s % block or s % hashed for s in range(max(wanted, 1), stride)), "not the smallest"


def test_remembered_seeds_are_the_same_seeds_and_are_bounded() -> None:
    seeds = Seeds(b"f" * FINGERPRINT_BYTES)
    for _ in range(2):
        for number in range(MAX_SEEDS + 2):
            tenant = TenantId(f"tenant{number}")
            assert seeds.of(tenant) == seed(b"f" * FINGERPRINT_BYTES, tenant)
