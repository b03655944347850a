"""Plain values to etcd's messages and back. Pure: the only module that knows both sides, beside the calls themselves.

Invariant: nothing of protobuf leaves the package, and nothing is guessed: an answer that does not fit the question is
`Refused`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvlease.etcd.errors import Refused
from kvlease.etcd.ops import Compare, DeleteOp, GetOp, Op, PutOp, Relation, Target
from kvlease.etcd.values import (
    DeleteResult,
    Event,
    EventKind,
    GetResult,
    Header,
    KeyValue,
    LeaseId,
    Member,
    OpResult,
    PutResult,
    Revision,
    Status,
    TxnResult,
)
from kvlease.etcdv3 import etcd_pb2 as pb

_RELATIONS: Final = {
    Relation.EQUAL: pb.Compare.EQUAL,
    Relation.NOT_EQUAL: pb.Compare.NOT_EQUAL,
    Relation.GREATER: pb.Compare.GREATER,
    Relation.LESS: pb.Compare.LESS,
}


def header(message: pb.ResponseHeader) -> Header:
    return Header(
        cluster_id=message.cluster_id,
        member_id=message.member_id,
        revision=Revision(message.revision),
        raft_term=message.raft_term,
    )


def key_value(message: pb.KeyValue) -> KeyValue:
    return KeyValue(
        key=message.key,
        value=message.value,
        create_revision=Revision(message.create_revision),
        mod_revision=Revision(message.mod_revision),
        version=message.version,
        lease=LeaseId(message.lease),
    )


def event(message: pb.Event) -> Event:
    return Event(
        kind=EventKind.DELETE if message.type == pb.Event.DELETE else EventKind.PUT,
        kv=key_value(message.kv),
        previous=key_value(message.prev_kv) if message.HasField("prev_kv") else None,
    )


def range_request(op: GetOp) -> pb.RangeRequest:
    return pb.RangeRequest(
        key=op.key,
        range_end=op.end,
        limit=op.limit,
        revision=op.revision,
        keys_only=op.keys_only,
        count_only=op.count_only,
        serializable=op.serializable,
    )


def put_request(op: PutOp) -> pb.PutRequest:
    return pb.PutRequest(key=op.key, value=op.value, lease=op.lease, prev_kv=op.previous)


def delete_request(op: DeleteOp) -> pb.DeleteRangeRequest:
    return pb.DeleteRangeRequest(key=op.key, range_end=op.end, prev_kv=op.previous)


def txn_request(compares: Iterable[Compare], success: Iterable[Op], failure: Iterable[Op]) -> pb.TxnRequest:
    return pb.TxnRequest(
        compare=[_compare(one) for one in compares],
        success=[_request_op(one) for one in success],
        failure=[_request_op(one) for one in failure],
    )


def get_result(message: pb.RangeResponse, head: Header | None = None) -> GetResult:
    return GetResult(
        header=head or header(message.header),
        kvs=tuple(key_value(kv) for kv in message.kvs),
        more=message.more,
        count=message.count,
    )


def put_result(message: pb.PutResponse, head: Header | None = None) -> PutResult:
    return PutResult(
        header=head or header(message.header),
        previous=key_value(message.prev_kv) if message.HasField("prev_kv") else None,
    )


def delete_result(message: pb.DeleteRangeResponse, head: Header | None = None) -> DeleteResult:
    return DeleteResult(
        header=head or header(message.header),
        deleted=message.deleted,
        previous=tuple(key_value(kv) for kv in message.prev_kvs),
    )


def txn_result(message: pb.TxnResponse, success: Sequence[Op], failure: Sequence[Op]) -> TxnResult:
    """Raises Refused if the answers are not those of the branch that was taken."""
    head = header(message.header)
    results = tuple(_op_result(one, head) for one in message.responses)
    if len(results) != len(success if message.succeeded else failure):
        raise Refused(f"etcd answered {len(results)} operations of a transaction with another number", code="INTERNAL")
    return TxnResult(header=head, succeeded=message.succeeded, results=results)


def status(message: pb.StatusResponse) -> Status:
    return Status(
        header=header(message.header),
        version=message.version,
        db_bytes=message.dbSize,
        leader=message.leader,
        raft_index=message.raftIndex,
        raft_term=message.raftTerm,
    )


def member(message: pb.Member) -> Member:
    return Member(
        member_id=message.ID,
        name=message.name,
        peer_urls=tuple(message.peerURLs),
        client_urls=tuple(message.clientURLs),
        is_learner=message.isLearner,
    )


def _compare(one: Compare) -> pb.Compare:
    message = pb.Compare(key=one.key, range_end=one.end, result=_RELATIONS[one.relation])
    match one.target, one.operand:
        case Target.VALUE, bytes(value):
            message.target, message.value = pb.Compare.VALUE, value
        case Target.VERSION, int(number):
            message.target, message.version = pb.Compare.VERSION, number
        case Target.CREATE_REVISION, int(number):
            message.target, message.create_revision = pb.Compare.CREATE, number
        case Target.MOD_REVISION, int(number):
            message.target, message.mod_revision = pb.Compare.MOD, number
        case Target.LEASE, int(number):
            message.target, message.lease = pb.Compare.LEASE, number
    return message


def _request_op(op: Op) -> pb.RequestOp:
    match op:
        case GetOp():
            return pb.RequestOp(request_range=range_request(op))
        case PutOp():
            return pb.RequestOp(request_put=put_request(op))
        case DeleteOp():
            return pb.RequestOp(request_delete_range=delete_request(op))


def _op_result(message: pb.ResponseOp, head: Header) -> OpResult:
    match message.WhichOneof("response"):
        case "response_range":
            return get_result(message.response_range, head)
        case "response_put":
            return put_result(message.response_put, head)
        case "response_delete_range":
            return delete_result(message.response_delete_range, head)
        case other:
            raise Refused(f"etcd answered an operation with {other}", code="INTERNAL")
