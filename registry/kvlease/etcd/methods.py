"""The calls of etcd's v3 API that the client makes, by etcd's own method paths. Nothing but the list.

Invariant: paths and messages pair as in etcd's rpc.proto; the messages are our subset of them (proto/kvlease/etcdv3).
"""

from __future__ import annotations

from typing import Final

from kvlease.etcd.endpoints import Method
from kvlease.etcdv3 import etcd_pb2 as pb

RANGE: Final = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
PUT: Final = Method("/etcdserverpb.KV/Put", pb.PutRequest, pb.PutResponse)
DELETE: Final = Method("/etcdserverpb.KV/DeleteRange", pb.DeleteRangeRequest, pb.DeleteRangeResponse)
TXN: Final = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
COMPACT: Final = Method("/etcdserverpb.KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
LEASE_GRANT: Final = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
LEASE_REVOKE: Final = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
LEASE_KEEP_ALIVE: Final = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
)
LEASE_TIME_TO_LIVE: Final = Method(
    "/etcdserverpb.Lease/LeaseTimeToLive", pb.LeaseTimeToLiveRequest, pb.LeaseTimeToLiveResponse
)
WATCH: Final = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)
STATUS: Final = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
MEMBER_LIST: Final = Method("/etcdserverpb.Cluster/MemberList", pb.MemberListRequest, pb.MemberListResponse)
AUTHENTICATE: Final = Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse)
