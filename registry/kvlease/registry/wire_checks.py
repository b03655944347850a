"""What every decode rests on: the limits of registry.proto as checks, and the enum tables.

No message is turned into a value here; that is `wire.py` and `wire_resolve.py`.
Invariant: a check returns its argument or raises `InvalidRequest` naming field and limit, and never repeats the
offending text, which may be hostile or private. A member that the contract lacks fails at import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, TypeVar

from kvlease.registry.errors import InvalidRequest, Limit
from kvlease.registry.values import (
    DIGEST_BYTES,
    FINGERPRINT_BYTES,
    MAX_BATCH,
    MAX_BLOCKS,
    MAX_DIGESTS,
    MAX_ID_CHARS,
    MAX_INSTANT_MS,
    MAX_SIZE_BYTES,
    MAX_TEXT_CHARS,
    MAX_TOKENS,
    MAX_TRACEPARENT_CHARS,
    ConversationId,
    EndReason,
    LeaseEventType,
    LeaseState,
    MissReason,
    OnDeadline,
    PublishStatus,
    RenewStatus,
    TenantId,
    is_id,
)
from kvlease.v1 import registry_pb2 as pb

T = TypeVar("T")

MAX_DIGEST_BYTES: Final = MAX_DIGESTS * DIGEST_BYTES
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")

# Enums, by name; a member that the contract lacks fails here, at import.
STATE_OUT: Final = {m: pb.LeaseState.Value(f"LEASE_STATE_{m.name}") for m in LeaseState}
END_OUT: Final = {m: pb.EndReason.Value(f"END_REASON_{m.name}") for m in EndReason}
ON_DEADLINE_OUT: Final = {m: pb.OnDeadline.Value(f"ON_DEADLINE_{m.name}") for m in OnDeadline}
MISS_OUT: Final = {m: pb.MissReason.Value(f"MISS_REASON_{m.name}") for m in MissReason}
RENEW_OUT: Final = {m: pb.RenewStatus.Value(f"RENEW_STATUS_{m.name}") for m in RenewStatus}
PUBLISH_OUT: Final = {m: pb.PublishStatus.Value(f"PUBLISH_STATUS_{m.name}") for m in PublishStatus}
EVENT_OUT: Final = {m: pb.LeaseEventType.Value(f"LEASE_EVENT_TYPE_{m.name}") for m in LeaseEventType}

STATE_IN: Final[Mapping[int, LeaseState]] = {n: m for m, n in STATE_OUT.items()}
END_IN: Final[Mapping[int, EndReason]] = {n: m for m, n in END_OUT.items()}
ON_DEADLINE_IN: Final[Mapping[int, OnDeadline]] = {0: OnDeadline.LAPSE} | {n: m for m, n in ON_DEADLINE_OUT.items()}
MISS_IN: Final[Mapping[int, MissReason]] = {n: m for m, n in MISS_OUT.items()}
RENEW_IN: Final[Mapping[int, RenewStatus]] = {n: m for m, n in RENEW_OUT.items()}
PUBLISH_IN: Final[Mapping[int, PublishStatus]] = {n: m for m, n in PUBLISH_OUT.items()}
EVENT_IN: Final[Mapping[int, LeaseEventType]] = {n: m for m, n in EVENT_OUT.items()}


def check_id(field: str, text: str) -> str:
    """`text` if it is a legal id. Raises InvalidRequest, without repeating the text: it may be hostile."""
    if not is_id(text):
        raise InvalidRequest(
            f"{field} must be 1-{MAX_ID_CHARS} characters of [A-Za-z0-9._:@/+=-]", field=field, limit=Limit.ID
        )
    return text


def check_width(field: str, value: bytes, width: int) -> bytes:
    """`value` if it is exactly `width` bytes long. Raises InvalidRequest."""
    if len(value) != width:
        raise InvalidRequest(f"{field} must be {width} bytes, not {len(value)}", field=field)
    return value


def check_batch(field: str, count: int) -> None:
    """Raises InvalidRequest unless `count` is 1 to MAX_BATCH."""
    if not 1 <= count <= MAX_BATCH:
        raise InvalidRequest(f"{field} must have 1-{MAX_BATCH} items, not {count}", field=field, limit=Limit.BATCH)


def check_instant(field: str, value_ms: int) -> int:
    """`value_ms` if it can be an instant of a monotonic clock. Raises InvalidRequest.

    What is reckoned from two instants and goes into a message has to fit there, too.
    """
    if not 0 <= value_ms <= MAX_INSTANT_MS:
        raise InvalidRequest(f"{field} must be 0 to {MAX_INSTANT_MS} ms", field=field)
    return value_ms


def check_unsigned(field: str, value: int, bits: int) -> int:
    """`value` if a message can hold it, before one is made. Raises InvalidRequest."""
    if not 0 <= value < 1 << bits:
        raise InvalidRequest(f"{field} must be 0 to {(1 << bits) - 1}", field=field)
    return value


def check_blocks(field: str, count: int) -> int:
    if count > MAX_BLOCKS:
        raise InvalidRequest(f"{field} may be {MAX_BLOCKS} at most", field=field, limit=Limit.BLOCKS)
    return count


def check_size(field: str, size_bytes: int) -> int:
    if size_bytes > MAX_SIZE_BYTES:
        raise InvalidRequest(f"{field} may be {MAX_SIZE_BYTES} at most", field=field)
    return size_bytes


def check_stride(field: str, tokens: int, strides: int) -> int:
    """`tokens` of each stride, if there may be so many `strides` of them. Raises InvalidRequest."""
    if not tokens:
        raise InvalidRequest(f"{field} must be positive", field=field)
    if tokens * strides > MAX_TOKENS:
        raise InvalidRequest(f"{field} times {strides} digests may be {MAX_TOKENS} at most", field=field)
    return tokens


def check_digests(field: str, digests: bytes) -> bytes:
    if len(digests) % DIGEST_BYTES:
        raise InvalidRequest(f"{field} must be a multiple of {DIGEST_BYTES} bytes, not {len(digests)}", field=field)
    if len(digests) > MAX_DIGEST_BYTES:
        raise InvalidRequest(f"{field} may have {MAX_DIGESTS} digests at most", field=field, limit=Limit.DIGESTS)
    return digests


def check_text(field: str, text: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequest(f"{field} may have {MAX_TEXT_CHARS} characters at most", field=field, limit=Limit.TEXT)
    return text


def check_line(field: str, text: str) -> str:
    """A text without control characters: operators see it in their terminals."""
    if _CONTROL.search(text):
        raise InvalidRequest(f"{field} must have no control characters", field=field)
    return check_text(field, text)


def check_url(field: str, text: str) -> str:
    """A line that is ASCII, as URLs are: so its characters are also its bytes in a message."""
    if not text.isascii():
        raise InvalidRequest(f"{field} must be ASCII", field=field)
    return check_line(field, text)


def check_traceparent(text: str) -> str:
    if len(text) > MAX_TRACEPARENT_CHARS:
        raise InvalidRequest(
            f"traceparent may have {MAX_TRACEPARENT_CHARS} characters at most",
            field="traceparent",
            limit=Limit.TRACEPARENT,
        )
    return text


def known(field: str, table: Mapping[int, T], number: int) -> T:
    member = table.get(number)
    if member is None:
        raise InvalidRequest(f"{field} has no value {number}", field=field)
    return member


@lru_cache(maxsize=1_024)
def decode_tenant(text: str) -> TenantId:
    """Remembered: every resolve names one of a few, and leases of a tenant share one string. Raises InvalidRequest."""
    return TenantId(check_id("tenant", text))


@lru_cache(maxsize=1_024)
def check_fingerprint(field: str, value: bytes) -> bytes:
    """`value` if it is as wide as it must be. Remembered: leases of one kind share it. Raises InvalidRequest."""
    return check_width(field, value, FINGERPRINT_BYTES)


def decode_conversation(text: str) -> ConversationId | None:
    return ConversationId(check_id("conversation", text)) if text else None


def decode_pairs(field: str, limit: Limit, most: int, pairs: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    if len(pairs) > most:
        raise InvalidRequest(f"{field} may have {most} entries at most", field=field, limit=limit)
    return tuple(sorted((check_text(field, k), check_text(field, v)) for k, v in pairs.items()))
