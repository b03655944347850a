"""Engines, leases, ends and renewals: messages to values and back. Resolve and locate are in `wire_resolve.py`.

With it the one place that knows both registry_pb2 and `values.py`. No I/O and no decisions. Requests are validated
at decode against the limits of registry.proto and refused with `InvalidRequest`, which names field and limit; the
caller of a registry turns the same error about an answer into `MalformedAnswer`.
Invariant: decode(encode(value)) == value for every legal value; nothing illegal passes decode.
"""

from __future__ import annotations

from sys import intern

from kvlease.registry.errors import InvalidRequest, Limit
from kvlease.registry.values import (
    DIGEST_BYTES,
    FINGERPRINT_BYTES,
    INCARNATION_BYTES,
    MAX_FINGERPRINT_FIELDS,
    MAX_LABELS,
    MAX_PAGE,
    MAX_RECORD_BYTES,
    EndOrder,
    EndReason,
    EndScope,
    Engine,
    EngineId,
    EngineStatus,
    Fingerprint,
    Incarnation,
    LeaseEvent,
    LeaseFilter,
    LeaseId,
    LeaseView,
    Publication,
    PublishResult,
    Record,
    RenewStatus,
    TenantId,
)
from kvlease.registry.wire_checks import (
    END_IN,
    END_OUT,
    EVENT_IN,
    EVENT_OUT,
    ON_DEADLINE_IN,
    ON_DEADLINE_OUT,
    PUBLISH_IN,
    PUBLISH_OUT,
    RENEW_IN,
    RENEW_OUT,
    STATE_IN,
    STATE_OUT,
    check_blocks,
    check_digests,
    check_fingerprint,
    check_id,
    check_instant,
    check_line,
    check_size,
    check_stride,
    check_traceparent,
    check_unsigned,
    check_url,
    check_width,
    decode_conversation,
    decode_pairs,
    decode_tenant,
    known,
)
from kvlease.v1 import registry_pb2 as pb

# --- engines


def decode_fingerprint(message: pb.Fingerprint) -> Fingerprint:
    """`hash` is 16 bytes, or empty if the lender gave none."""
    if message.hash:
        check_width("fingerprint.hash", message.hash, FINGERPRINT_BYTES)
    fields = decode_pairs("fingerprint.fields", Limit.FINGERPRINT_FIELDS, MAX_FINGERPRINT_FIELDS, message.fields)
    return Fingerprint(hash=message.hash, fields=fields)


def encode_fingerprint(value: Fingerprint) -> pb.Fingerprint:
    return pb.Fingerprint(hash=value.hash, fields=dict(value.fields))


def decode_engine(message: pb.Engine) -> Engine:
    """Raises InvalidRequest."""
    return Engine(
        engine_id=EngineId(check_id("engine_id", message.engine_id)),
        incarnation=Incarnation(check_width("incarnation", message.incarnation, INCARNATION_BYTES)),
        api_url=check_url("api_url", message.api_url),
        version=check_line("version", message.version),
        fingerprint=decode_fingerprint(message.fingerprint),
        labels=decode_pairs("labels", Limit.LABELS, MAX_LABELS, message.labels),
    )


def encode_engine(value: Engine) -> pb.Engine:
    return pb.Engine(
        engine_id=value.engine_id,
        incarnation=value.incarnation,
        api_url=value.api_url,
        version=value.version,
        fingerprint=encode_fingerprint(value.fingerprint),
        labels=dict(value.labels),
    )


def decode_engine_status(message: pb.EngineStatus) -> EngineStatus:
    return EngineStatus(
        engine=decode_engine(message.engine),
        connected=message.connected,
        suspect=message.suspect,
        silent_ms=message.silent_ms,
        leases=message.leases,
        leased_blocks=message.leased_blocks,
        free_blocks=message.free_blocks,
        total_blocks=message.total_blocks,
    )


def encode_engine_status(value: EngineStatus) -> pb.EngineStatus:
    return pb.EngineStatus(
        engine=encode_engine(value.engine),
        connected=value.connected,
        suspect=value.suspect,
        silent_ms=value.silent_ms,
        leases=value.leases,
        leased_blocks=value.leased_blocks,
        free_blocks=value.free_blocks,
        total_blocks=value.total_blocks,
    )


# --- publish


def decode_record(message: pb.Record) -> Record:
    """1-4 096 digests, and 256 KiB in all. The body is not looked at. Raises InvalidRequest."""
    digests, body = check_digests("record.digests", message.digests), message.body
    if not digests:
        raise InvalidRequest("record.digests must not be empty", field="record.digests")
    if len(digests) + len(body) > MAX_RECORD_BYTES:
        raise InvalidRequest(
            f"record may have {MAX_RECORD_BYTES} bytes at most", field="record", limit=Limit.RECORD_BYTES
        )
    return Record(digests=digests, body=body)


def decode_publication(message: pb.PublishItem) -> Publication:
    """Raises InvalidRequest: answered per item as PublishStatus.INVALID."""
    record = decode_record(message.record)
    return Publication(
        lease_id=LeaseId(check_id("lease_id", message.lease_id)),
        tenant=decode_tenant(message.tenant),
        conversation=decode_conversation(message.conversation),
        stride_tokens=check_stride("stride_tokens", message.stride_tokens, len(record.digests) // DIGEST_BYTES),
        block_count=check_blocks("block_count", message.block_count),
        size_bytes=check_size("size_bytes", message.size_bytes),
        deadline_ms=check_instant("deadline_lender_ms", message.deadline_lender_ms),
        on_deadline=known("on_deadline", ON_DEADLINE_IN, message.on_deadline),
        fingerprint_hash=check_fingerprint("fingerprint_hash", message.fingerprint_hash),
        record=record,
        traceparent=check_traceparent(message.traceparent),
        lapsed=message.lapsed,
    )


def encode_publication(value: Publication) -> pb.PublishItem:
    return pb.PublishItem(
        lease_id=value.lease_id,
        tenant=value.tenant,
        conversation=value.conversation or "",
        stride_tokens=value.stride_tokens,
        block_count=value.block_count,
        size_bytes=value.size_bytes,
        deadline_lender_ms=value.deadline_ms,
        on_deadline=ON_DEADLINE_OUT[value.on_deadline],
        fingerprint_hash=value.fingerprint_hash,
        record=pb.Record(digests=value.record.digests, body=value.record.body),
        traceparent=value.traceparent,
        lapsed=value.lapsed,
    )


def decode_publish_result(message: pb.PublishResult) -> PublishResult:
    """`lease_id` is passed as it came: an INVALID item may have had an illegal one."""
    return PublishResult(
        lease_id=LeaseId(message.lease_id),
        status=known("status", PUBLISH_IN, message.status),
        message=message.message,
        superseded=tuple(LeaseId(text) for text in message.superseded),
    )


def encode_publish_result(value: PublishResult) -> pb.PublishResult:
    return pb.PublishResult(
        lease_id=value.lease_id,
        status=PUBLISH_OUT[value.status],
        message=value.message,
        superseded=value.superseded,
    )


# --- session


def decode_ended(message: pb.Ended) -> tuple[LeaseId, EndReason]:
    """Raises InvalidRequest."""
    return LeaseId(check_id("lease_id", message.lease_id)), known("reason", END_IN, message.reason)


def encode_ended(lease_id: LeaseId, reason: EndReason) -> pb.Ended:
    return pb.Ended(lease_id=lease_id, reason=END_OUT[reason])


def decode_renewed(message: pb.Renewed) -> tuple[LeaseId, int]:
    """Lease and its new deadline on the lender's clock, ms. Raises InvalidRequest."""
    lease_id = LeaseId(check_id("lease_id", message.lease_id))
    return lease_id, check_instant("deadline_lender_ms", message.deadline_lender_ms)


def encode_renewed(lease_id: LeaseId, deadline_ms: int) -> pb.Renewed:
    return pb.Renewed(lease_id=lease_id, deadline_lender_ms=deadline_ms)


def decode_renew_status(number: int) -> RenewStatus:
    """Raises InvalidRequest."""
    return known("status", RENEW_IN, number)


def encode_renew_status(value: RenewStatus) -> pb.RenewStatus.ValueType:
    return RENEW_OUT[value]


def decode_renew_refused(message: pb.RenewRefused) -> tuple[LeaseId, RenewStatus]:
    """Raises InvalidRequest."""
    return LeaseId(check_id("lease_id", message.lease_id)), decode_renew_status(message.status)


def encode_renew_refused(lease_id: LeaseId, status: RenewStatus) -> pb.RenewRefused:
    return pb.RenewRefused(lease_id=lease_id, status=RENEW_OUT[status])


# --- leases seen from outside


def decode_lease(message: pb.Lease) -> LeaseView:
    """Raises InvalidRequest. What many leases have in common is one object, for those who keep very many."""
    return LeaseView(
        lease_id=LeaseId(check_id("lease_id", message.lease_id)),
        tenant=TenantId(intern(decode_tenant(message.tenant))),
        conversation=decode_conversation(message.conversation),
        engine_id=EngineId(intern(check_id("engine_id", message.engine_id))),
        incarnation=Incarnation(check_width("incarnation", message.incarnation, INCARNATION_BYTES)),
        tokens=message.tokens,
        stride_tokens=message.stride_tokens,
        blocks=message.blocks,
        size_bytes=message.size_bytes,
        state=known("state", STATE_IN, message.state),
        remaining_ms=message.remaining_ms,
        end_reason=END_IN.get(message.end_reason),
        suspect=message.suspect,
        traceparent=check_traceparent(message.traceparent),
        api_url=intern(check_url("api_url", message.api_url)),
    )


def encode_lease(value: LeaseView) -> pb.Lease:
    return pb.Lease(
        lease_id=value.lease_id,
        tenant=value.tenant,
        conversation=value.conversation or "",
        engine_id=value.engine_id,
        incarnation=value.incarnation,
        tokens=value.tokens,
        stride_tokens=value.stride_tokens,
        blocks=value.blocks,
        size_bytes=value.size_bytes,
        state=STATE_OUT[value.state],
        end_reason=pb.END_REASON_UNSPECIFIED if value.end_reason is None else END_OUT[value.end_reason],
        remaining_ms=value.remaining_ms,
        suspect=value.suspect,
        traceparent=value.traceparent,
        api_url=value.api_url,
    )


def decode_event(message: pb.LeaseEvent) -> LeaseEvent:
    """Raises InvalidRequest."""
    event_type = known("type", EVENT_IN, message.type)
    return LeaseEvent(revision=message.revision, type=event_type, lease=decode_lease(message.lease))


def encode_event(value: LeaseEvent) -> pb.LeaseEvent:
    return pb.LeaseEvent(revision=value.revision, type=EVENT_OUT[value.type], lease=encode_lease(value.lease))


# --- end, renew, list


def decode_renew(message: pb.RenewRequest) -> tuple[TenantId, LeaseId, int]:
    """Tenant, lease, ttl in ms (0: the lender's own). Raises InvalidRequest."""
    return decode_tenant(message.tenant), LeaseId(check_id("lease_id", message.lease_id)), message.ttl_ms


def encode_renew(tenant: TenantId, lease_id: LeaseId, ttl_ms: int) -> pb.RenewRequest:
    """Raises InvalidRequest, as decoding it would."""
    check_id("tenant", tenant)
    check_id("lease_id", lease_id)
    return pb.RenewRequest(tenant=tenant, lease_id=lease_id, ttl_ms=check_unsigned("ttl_ms", ttl_ms, 32))


def decode_end(message: pb.EndRequest) -> EndOrder:
    """RELEASED if no reason is given. Raises InvalidRequest."""
    reason = known("reason", END_IN, message.reason or pb.END_REASON_RELEASED)
    target = message.WhichOneof("target")
    if target == "lease_id":
        scope, name = EndScope.LEASE, check_id("lease_id", message.lease_id)
    elif target == "conversation":
        scope, name = EndScope.CONVERSATION, check_id("conversation", message.conversation)
    elif target == "engine_id":  # a drain, whatever the tenant
        tenant = decode_tenant(message.tenant) if message.tenant else TenantId("")
        name = check_id("engine_id", message.engine_id)
        return EndOrder(tenant=tenant, scope=EndScope.ENGINE, target=name, reason=reason)
    elif target == "whole_tenant" and message.whole_tenant:
        scope, name = EndScope.TENANT, ""
    else:
        raise InvalidRequest("a target must be given", field="target")
    return EndOrder(tenant=decode_tenant(message.tenant), scope=scope, target=name, reason=reason)


def encode_end(value: EndOrder) -> pb.EndRequest:
    """Raises InvalidRequest, as decoding it would."""
    if value.tenant or value.scope is not EndScope.ENGINE:
        check_id("tenant", value.tenant)
    if value.scope is not EndScope.TENANT:
        check_id(f"{value.scope} to end", value.target)
    message = pb.EndRequest(tenant=value.tenant, reason=END_OUT[value.reason])
    match value.scope:
        case EndScope.LEASE:
            message.lease_id = value.target
        case EndScope.CONVERSATION:
            message.conversation = value.target
        case EndScope.ENGINE:
            message.engine_id = value.target
        case EndScope.TENANT:
            message.whole_tenant = True
    return message


def decode_filter(message: pb.WatchRequest | pb.ListLeasesRequest) -> LeaseFilter:
    """Raises InvalidRequest."""
    return LeaseFilter(
        tenant=decode_tenant(message.tenant) if message.tenant else None,
        engine_id=EngineId(check_id("engine_id", message.engine_id)) if message.engine_id else None,
        conversation=decode_conversation(message.conversation),
    )


def decode_page_size(message: pb.ListLeasesRequest, *, default: int = 1_000) -> int:
    """Leases a page. Raises InvalidRequest."""
    if message.page_size > MAX_PAGE:
        raise InvalidRequest(f"page_size may be {MAX_PAGE} at most", field="page_size", limit=Limit.PAGE)
    return message.page_size or default


def encode_watch(value: LeaseFilter, from_revision: int) -> pb.WatchRequest:
    """Raises InvalidRequest, as decoding it would."""
    message = pb.WatchRequest(from_revision=check_unsigned("from_revision", from_revision, 64))
    _fill_filter(message, value)
    return message


def encode_list(value: LeaseFilter, page_size: int) -> pb.ListLeasesRequest:
    """Raises InvalidRequest, as decoding it would."""
    message = pb.ListLeasesRequest(page_size=page_size)
    _fill_filter(message, value)
    return message


def _fill_filter(message: pb.WatchRequest | pb.ListLeasesRequest, value: LeaseFilter) -> None:
    if value.tenant:
        message.tenant = check_id("tenant", value.tenant)
    if value.engine_id:
        message.engine_id = check_id("engine_id", value.engine_id)
    if value.conversation:
        message.conversation = check_id("conversation", value.conversation)
