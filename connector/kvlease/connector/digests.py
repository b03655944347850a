"""Digest chains: one 16-byte digest per stride of tokens, each covering everything before it.

Pure. The engine has hashed every block of a request already, each hash covering the whole prefix (tokens, LoRA name,
cache salt, multimodal inputs, prompt embeddings). A stride's digest is the engine's hash at the stride's end, cut to 16
bytes and seeded with what both engines must agree on, so a chain costs no hashing at all.

Invariant: equal digests at one place mean equal tokens, equal request identity and equal fingerprint up to that place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, Self

from kvlease.registry.values import DIGEST_BYTES, FINGERPRINT_BYTES, MAX_DIGESTS, Fingerprint, TenantId

DEFAULT_STRIDE_TOKENS: Final = 64
MAX_SEEDS: Final = 1_024
_FINGERPRINT_DOMAIN: Final = b"kvlease fingerprint 1\0"
_SEED_DOMAIN: Final = b"kvlease seed 1\0"


def fingerprint(fields: Mapping[str, str]) -> Fingerprint:
    """The fingerprint of these fields: their names and values, sorted, hashed to 16 bytes."""
    ordered = tuple(sorted(fields.items()))
    digest = hashlib.sha256(_FINGERPRINT_DOMAIN)
    for name, value in ordered:
        for part in (name.encode(), value.encode()):
            digest.update(len(part).to_bytes(4, "little"))
            digest.update(part)
    return Fingerprint(hash=digest.digest()[:FINGERPRINT_BYTES], fields=ordered)


def seed(fingerprint_hash: bytes, tenant: TenantId, adapter: bytes = b"") -> bytes:
    """What a tenant's chains start from on engines with this fingerprint (32 bytes). `adapter`: its version, if any."""
    return hashlib.sha256(_SEED_DOMAIN + fingerprint_hash + tenant.encode() + b"\0" * bool(adapter) + adapter).digest()


def stride_for(block_tokens: int, hash_tokens: int, wanted: int = DEFAULT_STRIDE_TOKENS) -> int:
    """The smallest multiple of `block_tokens` and `hash_tokens` that is at least `wanted` tokens.

    Both are powers of two times a small factor in practice; the common multiple is found by counting up.
    """
    stride = max(block_tokens, hash_tokens)
    step = stride
    while stride % block_tokens or stride % hash_tokens or stride < wanted:
        stride += step
    return stride


class Chain:
    """A digest chain that is not made before somebody asks for it: an engine's step pays for a list of hashes only.

    Immutable to the eye; what was made once is kept. May be handed from thread to thread.
    """

    __slots__ = ("_digests", "_ends", "_seed")

    def __init__(self, seed_bytes: bytes, ends: Sequence[bytes]) -> None:
        """`ends`: the engine's hash at the end of each stride, all of one length; the list is the chain's own."""
        self._seed = seed_bytes[:DIGEST_BYTES]
        self._ends = ends
        self._digests: bytes | None = None

    @classmethod
    def of(cls, digests: bytes) -> Self:
        """A chain of digests that exist already. Raises ValueError unless they are whole ones."""
        if len(digests) % DIGEST_BYTES:
            raise ValueError(f"a digest chain of {len(digests)} bytes is no multiple of {DIGEST_BYTES}")
        ends = [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]
        return cls(bytes(DIGEST_BYTES), ends)

    def __len__(self) -> int:
        """How many strides it covers."""
        return len(self._ends)

    def extends(self, other: Chain) -> bool:
        """Whether this chain begins with all of `other`: the same tokens, or more of them.

        One hash tells, since each covers everything before it.
        """
        count = len(other._ends)
        if self._seed != other._seed or count > len(self._ends):
            return False
        return not count or self._ends[count - 1] == other._ends[count - 1]

    @property
    def digests(self) -> bytes:
        """The digests, concatenated: the first half of each hash, with the seed laid over it.

        The hash is as hard to collide as before, and one operation over all strides costs a tenth of hashing each.
        """
        if self._digests is None:
            cut = b"".join([end[:DIGEST_BYTES] for end in self._ends])
            mask = int.from_bytes(self._seed * len(self._ends), "little")
            self._digests = (int.from_bytes(cut, "little") ^ mask).to_bytes(len(cut), "little")
        return self._digests


def chain(
    seed_bytes: bytes, block_hashes: Sequence[bytes], *, hash_tokens: int, stride_tokens: int, tokens: int
) -> Chain:
    """The chain of the whole strides within the first `tokens` tokens, at most MAX_DIGESTS of them.

    `block_hashes` has one prefix hash per `hash_tokens` tokens, as the engine computed them. Raises ValueError if they
    are too short to rest on.
    """
    per_stride = stride_tokens // hash_tokens
    strides = min(tokens // stride_tokens, len(block_hashes) // per_stride, MAX_DIGESTS)
    if strides and len(block_hashes[0]) < DIGEST_BYTES:
        raise ValueError(
            f"the engine's block hashes are shorter than {DIGEST_BYTES} bytes: digests cannot rest on them"
        )
    return Chain(seed_bytes, block_hashes[per_stride - 1 : strides * per_stride : per_stride])


class Seeds:
    """Seeds for one fingerprint, remembered for the tenants and adapters seen last (at most MAX_SEEDS)."""

    def __init__(self, fingerprint_hash: bytes) -> None:
        self._fingerprint_hash = fingerprint_hash
        self._seeds: dict[tuple[TenantId, bytes], bytes] = {}

    def of(self, tenant: TenantId, adapter: bytes = b"") -> bytes:
        known = self._seeds.get((tenant, adapter))
        if known is None:
            if len(self._seeds) >= MAX_SEEDS:
                del self._seeds[next(iter(self._seeds))]
            known = self._seeds[tenant, adapter] = seed(self._fingerprint_hash, tenant, adapter)
        return known
