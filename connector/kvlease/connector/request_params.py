"""What a router tells the connector about one request: the `kvlease` object inside `kv_transfer_params`.

Pure. Anything malformed makes the request an ordinary one: nothing lent, nothing borrowed, counted as `invalid`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from kvlease.connector.record import RecordContent
from kvlease.registry.values import MAX_TRACEPARENT_CHARS, ConversationId, LeaseId, OnDeadline, TenantId, is_id

KEY = "kvlease"
_TEXTS = ("remote_engine_id", "remote_request_id", "remote_host")
_SIZES = ("tp_size", "pp_size", "dcp_size")
MAX_RANKS = 1_024
"""Of one kind of parallelism in a lender; more is not a lender's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    tenant: TenantId
    conversation: ConversationId | None = None
    lease_id: LeaseId | None = None
    traceparent: str = ""
    recompute_threshold: int | None = None
    """Tokens; overrides the engine's `kv_recompute_threshold` for this request."""
    ttl_ms: int | None = None
    """A shorter ttl than the lender's own, for the lease of this turn."""
    on_deadline: OnDeadline | None = None


def parse(params: Mapping[str, object] | None, default_tenant: TenantId) -> RequestParams | None:
    """The request's parameters; None if it has none. Raises ValueError if they are malformed."""
    given = params.get(KEY) if params else None
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"{KEY} must be an object")  # noqa: TRY004 - one error for all that is malformed
    conversation, lease_id = _id(given, "conversation"), _id(given, "lease_id")
    traceparent = given.get("traceparent") or ""
    if not isinstance(traceparent, str) or len(traceparent) > MAX_TRACEPARENT_CHARS:
        raise ValueError("traceparent must be a W3C trace context")
    return RequestParams(
        tenant=TenantId(_id(given, "tenant") or default_tenant),
        conversation=None if conversation is None else ConversationId(conversation),
        lease_id=None if lease_id is None else LeaseId(lease_id),
        traceparent=traceparent,
        recompute_threshold=_count(given, "recompute_threshold"),
        ttl_ms=_count(given, "ttl_ms"),
        on_deadline=None if given.get("on_deadline") is None else OnDeadline(str(given["on_deadline"])),
    )


def _id(given: Mapping[str, object], name: str) -> str | None:
    value = given.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str) or not is_id(value):
        raise ValueError(f"{name} is not an id")
    return value


def _count(given: Mapping[str, object], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number, not negative")
    return value


def engine_params(raw: bytes) -> dict[str, object]:
    """The engine parameters of a record; raises ValueError unless they are an object with all that a READ needs."""
    given = json.loads(raw)
    if not isinstance(given, dict):
        raise ValueError("engine parameters must be an object")  # noqa: TRY004
    for name in _TEXTS:
        if not isinstance(given.get(name), str):
            raise ValueError(f"engine parameters need a {name}")  # noqa: TRY004
    if not _within(given.get("remote_port"), 65_535):
        raise ValueError("engine parameters need a remote_port")
    for name in _SIZES:
        if not _within(given.get(name, 1), MAX_RANKS):
            raise ValueError(f"{name} must be a number of ranks")
    return given


def names_lender(content: RecordContent) -> bool:
    """Whether a record's engine parameters have what a READ from its lender needs, and are that lender's."""
    try:
        return engine_params(content.engine_params)["remote_engine_id"] == content.engine_id
    except ValueError:
        return False


def _within(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= limit
