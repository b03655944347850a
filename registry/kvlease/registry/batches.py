"""Cutting lists into messages that stay under the size and item limits. Pure; no protobuf.

Invariants: order is kept, nothing is lost or repeated, and no batch is empty. An item that is larger than the room
is a batch of its own: whether it is legal is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from kvlease.registry.values import MAX_BATCH, MAX_MESSAGE_BYTES, Publication

T = TypeVar("T")

MESSAGE_ROOM_BYTES: Final = MAX_MESSAGE_BYTES - 64 * 1024
"""What a sender fills of a message; the rest is for framing and small fields."""

_FIELDS_BYTES: Final = 1024
"""More than all fields of a published lease beside its record: four ids, hashes, numbers, traceparent."""


def publication_bytes(publication: Publication) -> int:
    """Upper bound of a publication's size in a message."""
    return len(publication.record.digests) + len(publication.record.body) + _FIELDS_BYTES


def split(items: Iterable[T], size: Callable[[T], int], *, room_bytes: int = MESSAGE_ROOM_BYTES) -> Iterator[list[T]]:
    """`items` in order, in batches of at most MAX_BATCH items and `room_bytes` bytes by `size`."""
    batch: list[T] = []
    used = 0
    for item in items:
        item_bytes = size(item)
        if batch and (len(batch) == MAX_BATCH or used + item_bytes > room_bytes):
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += item_bytes
    if batch:
        yield batch
