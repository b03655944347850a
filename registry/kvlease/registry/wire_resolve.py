"""Resolve, locate and aliases: messages to values and back.

No I/O and no decisions. Requests are refused with `InvalidRequest`; the caller of a registry turns the same error
about an answer into `MalformedAnswer`.
Invariant: decode(encode(value)) == value for every legal value; nothing illegal passes decode.
This is the hot path: `decode_query` and `fill_answer` build nothing that is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlease.registry.errors import InvalidRequest, Limit
from kvlease.registry.values import (
    ALIAS_BYTES,
    DIGEST_BYTES,
    FINGERPRINT_BYTES,
    INCARNATION_BYTES,
    MAX_ALIASES,
    Alias,
    ConversationId,
    EngineId,
    Hit,
    Incarnation,
    LeaseId,
    Located,
    Miss,
    MissReason,
    ResolveQuery,
    TenantId,
    is_id,
)
from kvlease.registry.wire import decode_fingerprint, decode_lease, decode_record, encode_fingerprint, encode_lease
from kvlease.registry.wire_checks import (
    END_IN,
    END_OUT,
    MAX_DIGEST_BYTES,
    MISS_IN,
    MISS_OUT,
    STATE_IN,
    STATE_OUT,
    check_digests,
    check_id,
    check_traceparent,
    check_unsigned,
    check_width,
    decode_conversation,
    decode_tenant,
    known,
)
from kvlease.v1 import registry_pb2 as pb


def decode_query(message: pb.ResolveRequest) -> ResolveQuery:
    """Raises InvalidRequest."""
    tenant, lease_id, conversation, digests = message.tenant, message.lease_id, message.conversation, message.digests
    fingerprint_hash, stride_tokens = message.fingerprint_hash, message.stride_tokens
    if digests:
        if len(digests) % DIGEST_BYTES or len(digests) > MAX_DIGEST_BYTES:
            check_digests("digests", digests)
        if not stride_tokens:
            raise InvalidRequest("stride_tokens must be given with digests", field="stride_tokens")
    elif not (lease_id or conversation):
        raise InvalidRequest("one of lease_id, conversation and digests must be given", field="digests")
    if fingerprint_hash and len(fingerprint_hash) != FINGERPRINT_BYTES:
        check_width("fingerprint_hash", fingerprint_hash, FINGERPRINT_BYTES)
    if lease_id and not is_id(lease_id):
        check_id("lease_id", lease_id)
    if conversation and not is_id(conversation):
        check_id("conversation", conversation)
    return ResolveQuery(
        decode_tenant(tenant),
        lease_id or None,  # type: ignore[arg-type]  # these two are checked, and to call a NewType costs something
        conversation or None,  # type: ignore[arg-type]
        digests,
        stride_tokens,
        fingerprint_hash,
    )


def check_query(value: ResolveQuery) -> None:
    """What `decode_query` would refuse, before it is sent. Raises InvalidRequest."""
    check_id("tenant", value.tenant)
    if value.lease_id:
        check_id("lease_id", value.lease_id)
    if value.conversation:
        check_id("conversation", value.conversation)
    if value.fingerprint_hash:
        check_width("fingerprint_hash", value.fingerprint_hash, FINGERPRINT_BYTES)
    check_digests("digests", value.digests)
    check_unsigned("stride_tokens", value.stride_tokens, 32)
    if value.digests and not value.stride_tokens:
        raise InvalidRequest("stride_tokens must be given with digests", field="stride_tokens")
    if not (value.digests or value.lease_id or value.conversation):
        raise InvalidRequest("one of lease_id, conversation and digests must be given", field="digests")


def fill_query(target: pb.ResolveRequest, value: ResolveQuery) -> None:
    """Write `value` into an empty message in place."""
    target.tenant = value.tenant
    if value.lease_id:
        target.lease_id = value.lease_id
    if value.conversation:
        target.conversation = value.conversation
    target.digests = value.digests
    target.stride_tokens = value.stride_tokens
    target.fingerprint_hash = value.fingerprint_hash


def encode_query(value: ResolveQuery) -> pb.ResolveRequest:
    message = pb.ResolveRequest()
    fill_query(message, value)
    return message


def fill_answer(target: pb.ResolveResponse, answer: Hit | Miss) -> None:
    """Write `answer` into an empty message in place: no copy of the record beyond protobuf's own."""
    if isinstance(answer, Hit):
        hit = target.hit
        hit.lease_id = answer.lease_id
        hit.engine_id = answer.engine_id
        hit.incarnation = answer.incarnation
        record = hit.record
        record.digests = answer.record.digests
        record.body = answer.record.body
        hit.matched_strides = answer.matched_strides
        hit.state = STATE_OUT[answer.state]
        hit.remaining_ms = answer.remaining_ms
        if answer.traceparent:
            hit.traceparent = answer.traceparent
        if answer.conversation:
            hit.conversation = answer.conversation
        return
    miss = target.miss
    miss.reason = MISS_OUT[answer.reason]
    if answer.end_reason is not None:
        miss.end_reason = END_OUT[answer.end_reason]
    if answer.lender_fingerprint is not None:
        miss.lender_fingerprint.CopyFrom(encode_fingerprint(answer.lender_fingerprint))


def encode_answer(answer: Hit | Miss) -> pb.ResolveResponse:
    message = pb.ResolveResponse()
    fill_answer(message, answer)
    return message


def decode_answer(message: pb.ResolveResponse) -> Hit | Miss:
    """A miss with a reason that this version does not know is UNKNOWN. Raises InvalidRequest."""
    if message.HasField("hit"):
        hit = message.hit
        record = decode_record(hit.record)
        if hit.matched_strides > len(record.digests) // DIGEST_BYTES:
            raise InvalidRequest("matched_strides exceeds the record's digests", field="matched_strides")
        return Hit(
            lease_id=LeaseId(check_id("lease_id", hit.lease_id)),
            engine_id=EngineId(check_id("engine_id", hit.engine_id)),
            incarnation=Incarnation(check_width("incarnation", hit.incarnation, INCARNATION_BYTES)),
            conversation=decode_conversation(hit.conversation),
            record=record,
            matched_strides=hit.matched_strides,
            state=known("state", STATE_IN, hit.state),
            remaining_ms=hit.remaining_ms,
            traceparent=check_traceparent(hit.traceparent),
        )
    if message.HasField("miss"):
        miss = message.miss
        return Miss(
            reason=MISS_IN.get(miss.reason, MissReason.UNKNOWN),
            end_reason=END_IN.get(miss.end_reason),
            lender_fingerprint=(
                decode_fingerprint(miss.lender_fingerprint) if miss.HasField("lender_fingerprint") else None
            ),
        )
    raise InvalidRequest("a resolve is answered by a hit or a miss", field="answer")


def decode_located(message: pb.LocateResponse) -> Located:
    """Raises InvalidRequest."""
    conversation = decode_conversation(message.conversation)
    if not message.found:
        reason = MISS_IN.get(message.reason, MissReason.UNKNOWN)
        return Located(conversation=conversation, lease=None, reason=reason)
    return Located(conversation=conversation, lease=decode_lease(message.lease), api_url=message.api_url)


def encode_located(value: Located) -> pb.LocateResponse:
    message = pb.LocateResponse(
        found=value.lease is not None, conversation=value.conversation or "", api_url=value.api_url
    )
    if value.lease is not None:
        message.lease.CopyFrom(encode_lease(value.lease))
    if value.reason is not None:
        message.reason = MISS_OUT[value.reason]
    return message


def decode_aliases(aliases: Sequence[bytes]) -> tuple[Alias, ...]:
    """Raises InvalidRequest."""
    if len(aliases) > MAX_ALIASES:
        raise InvalidRequest(f"aliases may have {MAX_ALIASES} items at most", field="aliases", limit=Limit.ALIASES)
    return tuple(Alias(check_width("aliases", alias, ALIAS_BYTES)) for alias in aliases)


def decode_locate(message: pb.LocateRequest) -> tuple[TenantId, ConversationId | None, tuple[Alias, ...]]:
    """Tenant, conversation, aliases. Raises InvalidRequest."""
    aliases = decode_aliases(message.aliases)
    if not (message.conversation or aliases):
        raise InvalidRequest("one of conversation and aliases must be given", field="conversation")
    return decode_tenant(message.tenant), decode_conversation(message.conversation), aliases


def encode_locate(tenant: TenantId, conversation: ConversationId | None, aliases: Sequence[Alias]) -> pb.LocateRequest:
    """Raises InvalidRequest, as decoding it would."""
    check_id("tenant", tenant)
    name = check_id("conversation", conversation) if conversation else ""
    return pb.LocateRequest(tenant=tenant, conversation=name, aliases=decode_aliases(aliases))


def decode_naming(message: pb.NameConversationRequest) -> tuple[TenantId, ConversationId, tuple[Alias, ...], int]:
    """Tenant, conversation, aliases, ttl in ms (0: the registry's default). Raises InvalidRequest."""
    conversation = ConversationId(check_id("conversation", message.conversation))
    return decode_tenant(message.tenant), conversation, decode_aliases(message.aliases), message.ttl_ms


def encode_naming(
    tenant: TenantId, conversation: ConversationId, aliases: Sequence[Alias], ttl_ms: int
) -> pb.NameConversationRequest:
    """Raises InvalidRequest, as decoding it would."""
    check_id("tenant", tenant)
    check_id("conversation", conversation)
    return pb.NameConversationRequest(
        tenant=tenant,
        conversation=conversation,
        aliases=decode_aliases(aliases),
        ttl_ms=check_unsigned("ttl_ms", ttl_ms, 32),
    )
