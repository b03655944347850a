"""The gRPC edge: each rpc of registry.proto decodes, calls the service, encodes. `Session` is in `servicer_session.py`.

No decisions about leases, no metrics, no status codes: errors are raised as they are and leave through `calls.py`.
What is shed is shed here, before it is decoded: the least work there can be.
Invariant: nothing reaches the service that `wire` has not validated.
"""
# ruff: noqa: N802 - the names are the contract's

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import grpc.aio
from kvlease.registry.errors import LimitReached, Overloaded
from kvlease.registry.identity import Rpc
from kvlease.registry.overload import Overload
from kvlease.registry.release import installed_version
from kvlease.registry.service import RegistryService
from kvlease.registry.servicer_publish import Publications
from kvlease.registry.servicer_session import serve_session
from kvlease.registry.values import (
    INCARNATION_BYTES,
    EngineId,
    Incarnation,
    LeaseId,
    RegistryStatus,
)
from kvlease.registry.wire import (
    decode_end,
    decode_filter,
    decode_page_size,
    decode_renew,
    encode_event,
    encode_lease,
    encode_publish_result,
    encode_renew_status,
)
from kvlease.registry.wire_answers import answer_bytes, batch_bytes, shed_bytes
from kvlease.registry.wire_checks import check_batch, check_id, check_width
from kvlease.registry.wire_resolve import (
    decode_locate,
    decode_naming,
    decode_query,
    encode_located,
)
from kvlease.registry.wire_survey import encode_survey
from kvlease.v1 import registry_pb2 as pb
from kvlease.v1 import registry_pb2_grpc

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Registry"].full_name
PROGRESS_S: Final = 5.0
"""A watcher hears at least this often, if only how far it has got."""
PAGE_LEASES: Final = 2_000
"""Leases in one answer at most, whatever was asked: with the longest ids and URLs they are below the message limit."""

Context = grpc.aio.ServicerContext[object, object]
SessionContext = grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse]
ResolveContext = grpc.aio.ServicerContext[pb.ResolveStreamRequest, bytes]
WatchContext = grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse]


class RegistryServicer(registry_pb2_grpc.RegistryServicer):
    """One instance serves all calls; it has no state but the number of its resolve streams."""

    def __init__(
        self,
        service: RegistryService,
        *,
        welcome: pb.Welcome,
        max_resolve_streams: int,
        overload: Overload,
        on_shed: Callable[[int], None],
    ) -> None:
        """`on_shed` hears how many resolves were shed."""
        self._service: Final = service
        self._overload: Final = overload
        self._on_shed: Final = on_shed
        self._welcome: Final = welcome
        self._version: Final = installed_version()
        self._max_resolve_streams: Final = max_resolve_streams
        self._resolve_streams = 0

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: SessionContext
    ) -> None:
        await serve_session(self._service, request_iterator, context.write, self._welcome)

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        engine_id = EngineId(check_id("engine_id", request.engine_id))
        incarnation = Incarnation(check_width("incarnation", request.incarnation, INCARNATION_BYTES))
        check_batch("leases", len(request.leases))
        items = Publications(request.leases)
        results = items.results(await self._service.publish(engine_id, incarnation, items.good))
        return pb.PublishResponse(results=[encode_publish_result(x) for x in results])

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        result = await self._service.renew(*decode_renew(request))
        return pb.RenewResponse(status=encode_renew_status(result.status), remaining_ms=result.remaining_ms)

    async def End(self, request: pb.EndRequest, context: Context) -> pb.EndResponse:
        return pb.EndResponse(ended=await self._service.end(decode_end(request)))

    async def Resolve(self, request: pb.ResolveRequest, context: Context) -> bytes:  # type: ignore[override]
        self._check_load(Rpc.RESOLVE)
        return answer_bytes(*self._service.resolve((decode_query(request),)))

    async def ResolveStream(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ResolveStreamRequest], context: ResolveContext
    ) -> None:
        if self._resolve_streams >= self._max_resolve_streams:
            raise LimitReached("too many resolve streams", limit="max_resolve_streams")
        self._resolve_streams += 1
        try:
            async for message in request_iterator:
                if self._overload.sheds(Rpc.RESOLVE_STREAM):
                    self._on_shed(len(message.requests))
                    await context.write(shed_bytes(message))
                else:
                    await context.write(batch_bytes(self._service.resolve, message))
        finally:
            self._resolve_streams -= 1

    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateResponse:
        self._check_load(Rpc.LOCATE)
        return encode_located(self._service.locate(*decode_locate(request)))

    async def NameConversation(
        self, request: pb.NameConversationRequest, context: Context
    ) -> pb.NameConversationResponse:
        await self._service.name_conversation(*decode_naming(request))
        return pb.NameConversationResponse()

    async def Watch(self, request: pb.WatchRequest, context: WatchContext) -> None:  # type: ignore[override]
        with self._service.watch(decode_filter(request), request.from_revision) as watch:
            await context.write(pb.WatchResponse(revision=watch.revision, newest_revision=watch.newest))
            while (news := await watch.next(wait_s=PROGRESS_S)) is not None:
                events = [encode_event(x) for x in news.events]
                await context.write(
                    pb.WatchResponse(revision=news.revision, events=events, newest_revision=news.newest)
                )

    async def ListLeases(self, request: pb.ListLeasesRequest, context: Context) -> pb.ListLeasesResponse:
        self._check_load(Rpc.LIST_LEASES)
        limit = min(decode_page_size(request), PAGE_LEASES)
        after = LeaseId(check_id("page_token", request.page_token)) if request.page_token else None
        page = self._service.list_leases(decode_filter(request), after=after, limit=limit)
        return pb.ListLeasesResponse(
            leases=[encode_lease(x) for x in page.leases], revision=page.revision, next_page_token=page.after or ""
        )

    async def ListEngines(self, request: pb.ListEnginesRequest, context: Context) -> pb.ListEnginesResponse:
        registry = RegistryStatus(
            replica_id=self._welcome.replica_id,
            version=self._version,
            shedding=self._overload.sheds(Rpc.RESOLVE),
        )
        return encode_survey(registry, self._service.list_engines())

    def _check_load(self, rpc: Rpc) -> None:
        if self._overload.sheds(rpc):
            if rpc is Rpc.RESOLVE:
                self._on_shed(1)
            raise Overloaded("this registry has more to do than it can")


def add_to_server(servicer: RegistryServicer, server: grpc.aio.Server) -> None:
    """All rpcs of the contract, those for resolves with handlers that answer with bytes instead of messages.

    grpc asks handlers registered by method first, the last one for each, and then generic ones in their order; which
    kind the generated code adds is its own business, so ours stand first in both.
    """
    resolves: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Resolve": grpc.unary_unary_rpc_method_handler(
            servicer.Resolve, request_deserializer=pb.ResolveRequest.FromString
        ),
        "ResolveStream": grpc.stream_stream_rpc_method_handler(
            servicer.ResolveStream, request_deserializer=pb.ResolveStreamRequest.FromString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, resolves),))
    registry_pb2_grpc.add_RegistryServicer_to_server(servicer, server)
    server.add_registered_method_handlers(SERVICE, resolves)
