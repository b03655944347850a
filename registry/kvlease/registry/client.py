"""The registry's client, for borrowers, routers and operators. Lenders also hold a session: `lender_session.py`.

A thin asyncio shell over gRPC: encode, call, decode. It decides nothing and keeps no copy of the registry's state.
Invariants: every call has a deadline; whatever fails is a typed error of `errors.py`, chained to its cause; an
answer that breaks the contract is `MalformedAnswer` and reaches nobody.
Shutdown order: resolve stream, then the replicas' channels.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Final, NoReturn, Self, TypeVar

import grpc.aio
from kvlease.registry.backoff import Backoff
from kvlease.registry.batches import split
from kvlease.registry.client_addresses import Lookup, look_up
from kvlease.registry.client_calls import Calls, Method
from kvlease.registry.client_channel import ClientLimits, opener
from kvlease.registry.client_credentials import Credentials
from kvlease.registry.client_endpoints import parse_endpoints
from kvlease.registry.client_replica import Replica, cancelled
from kvlease.registry.client_replicas import Replicas
from kvlease.registry.errors import Compacted, InvalidRequest, MalformedAnswer, RegistryUnavailable
from kvlease.registry.errors_grpc import from_rpc_error
from kvlease.registry.resolve_stream import ResolveStream
from kvlease.registry.values import (
    MAX_PAGE,
    Alias,
    ConversationId,
    EndOrder,
    EndReason,
    EndScope,
    EngineId,
    EngineStatus,
    Hit,
    Incarnation,
    LeaseEvents,
    LeaseFilter,
    LeaseId,
    LeaseList,
    LeaseView,
    Located,
    Miss,
    Publication,
    PublishResult,
    RenewResult,
    ResolveQuery,
    Survey,
    TenantId,
)
from kvlease.registry.wire import (
    decode_event,
    decode_lease,
    decode_publish_result,
    decode_renew_status,
    encode_end,
    encode_list,
    encode_publication,
    encode_renew,
    encode_watch,
)
from kvlease.registry.wire_resolve import (
    check_query,
    decode_answer,
    decode_located,
    encode_locate,
    encode_naming,
    encode_query,
)
from kvlease.registry.wire_survey import decode_survey
from kvlease.v1 import registry_pb2 as pb

Message = TypeVar("Message")
Value = TypeVar("Value")

LeaseEventStream = AsyncGenerator[LeaseEvents, None]

EVERYTHING: Final = LeaseFilter()


class RegistryClient:
    """A client of a registry with one or several replicas. Use it as an async context manager, in one task.

    Its methods may be called from any task of the same event loop. All raise RegistryUnavailable if no replica can
    be reached, DeadlineExceeded if none answers in time (`timeout_ms`, limits.call_timeout_ms by default),
    InvalidRequest if an argument breaks the contract, and MalformedAnswer if the answer does. Which replica is asked,
    and when it is another one: `client_replicas.py`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        credentials: Credentials | None = None,
        limits: ClientLimits | None = None,
        fraction: Callable[[], float] = random.random,
        lookup: Lookup = look_up,
    ) -> None:
        """`endpoint` is HOST:PORT or several with commas between; a name stands for all addresses `lookup` finds.
        `fraction` spreads clients over replicas and reconnects over time: numbers in [0, 1). No I/O here.

        Raises EndpointsInvalid.
        """
        self._endpoint: Final = endpoint
        self._endpoints: Final = parse_endpoints(endpoint)
        self._lookup: Final = lookup
        self._credentials: Final = credentials
        self._limits: Final = limits or ClientLimits()
        self._fraction: Final = fraction
        self._group: Final = asyncio.TaskGroup()
        self._open: _Open | None = None

    async def __aenter__(self) -> Self:
        """Raises CredentialsInvalid."""
        open_to = opener(self._endpoint, self._credentials)
        limits, fraction = self._limits, self._fraction
        replicas = Replicas(self._endpoints, open_to=open_to, lookup=self._lookup, limits=limits, fraction=fraction)
        backoff = Backoff(first_ms=limits.backoff_first_ms, cap_ms=limits.backoff_cap_ms, fraction=fraction)
        stream = ResolveStream(replicas, limits, backoff)
        await self._group.__aenter__()
        runners = (
            self._group.create_task(stream.run(), name="kvlease resolve stream"),
            self._group.create_task(replicas.run(), name="kvlease replicas"),
        )
        self._open = _Open(replicas, stream, runners)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        opened, self._open = self._opened, None
        for runner in opened.runners:
            runner.cancel()
        # The caller's own error is not the group's: it passes as it is, not inside an ExceptionGroup.
        await self._group.__aexit__(None, None, None)

    @property
    def replicas(self) -> Replicas:
        """The replicas in use, for a lender's session beside this client and for metrics."""
        return self._opened.replicas

    @property
    def address(self) -> str:
        """Which replica is in use, "" if none is."""
        replica = self._open.replicas.current if self._open is not None else None
        return "" if replica is None else replica.address.target

    @property
    def place(self) -> int:
        """Its number, from 0, in the order of the endpoints; -1: none is in use. May be read from any thread."""
        return -1 if self._open is None else self._open.replicas.place

    @property
    def moves(self) -> int:
        """How often another replica was taken into use. May be read from any thread."""
        return 0 if self._open is None else self._open.replicas.moves

    @property
    def outstanding(self) -> int:
        """Resolves on the stream that wait for an answer."""
        return self._opened.stream.outstanding

    @property
    def late_answers(self) -> int:
        """Answers on the stream that came after their caller had gone."""
        return self._opened.stream.late_answers

    # --- borrowers ---

    async def resolve(self, query: ResolveQuery, *, timeout_ms: int) -> Hit | Miss:
        """The best lease for a prompt, over the open stream. Fails at once while the registry is away."""
        return await self._opened.stream.resolve(query, timeout_ms=timeout_ms)

    async def resolve_unary(self, query: ResolveQuery, *, timeout_ms: int | None = None) -> Hit | Miss:
        """The same as one unary call. Raises Overloaded where the stream answers a miss with that reason."""
        check_query(query)
        response = await self._call(lambda stub: stub.Resolve, encode_query(query), timeout_ms)
        return _decoded(decode_answer, response)

    # --- routers ---

    async def locate(
        self,
        tenant: TenantId,
        conversation: ConversationId | None = None,
        aliases: Sequence[Alias] = (),
        *,
        timeout_ms: int | None = None,
    ) -> Located:
        """Where a conversation's KV is. `aliases`: longest message prefix first."""
        request = encode_locate(tenant, conversation, aliases)
        return _decoded(decode_located, await self._call(lambda stub: stub.Locate, request, timeout_ms))

    async def name_conversation(
        self,
        tenant: TenantId,
        conversation: ConversationId,
        aliases: Sequence[Alias],
        *,
        ttl_ms: int = 0,
        timeout_ms: int | None = None,
    ) -> None:
        """Give a conversation further names, for `ttl_ms` (0: the registry's default)."""
        request = encode_naming(tenant, conversation, aliases, ttl_ms)
        await self._call(lambda stub: stub.NameConversation, request, timeout_ms)

    async def renew(
        self, tenant: TenantId, lease_id: LeaseId, ttl_ms: int = 0, *, timeout_ms: int | None = None
    ) -> RenewResult:
        """Ask the lender to move a lease's deadline `ttl_ms` ahead (0: its own ttl). Raises LenderSilent."""
        request = encode_renew(tenant, lease_id, ttl_ms)
        response = await self._call(lambda stub: stub.Renew, request, timeout_ms)
        return RenewResult(status=_decoded(decode_renew_status, response.status), remaining_ms=response.remaining_ms)

    # --- ends ---

    async def end_lease(
        self,
        tenant: TenantId,
        lease_id: LeaseId,
        reason: EndReason = EndReason.RELEASED,
        *,
        timeout_ms: int | None = None,
    ) -> int:
        """End a lease for good; how many were ended (0: it was not there). Safe to repeat, as are the three below."""
        order = EndOrder(tenant=tenant, scope=EndScope.LEASE, target=lease_id, reason=reason)
        return await self._end(order, timeout_ms)

    async def end_conversation(
        self,
        tenant: TenantId,
        conversation: ConversationId,
        reason: EndReason = EndReason.RELEASED,
        *,
        timeout_ms: int | None = None,
    ) -> int:
        """End all leases of a conversation; how many were ended."""
        order = EndOrder(tenant=tenant, scope=EndScope.CONVERSATION, target=conversation, reason=reason)
        return await self._end(order, timeout_ms)

    async def end_engine(
        self, engine_id: EngineId, reason: EndReason = EndReason.DRAINED, *, timeout_ms: int | None = None
    ) -> int:
        """End all leases of an engine, of all tenants; how many were ended."""
        order = EndOrder(tenant=TenantId(""), scope=EndScope.ENGINE, target=engine_id, reason=reason)
        return await self._end(order, timeout_ms)

    async def end_tenant(
        self, tenant: TenantId, reason: EndReason = EndReason.RELEASED, *, timeout_ms: int | None = None
    ) -> int:
        """End all leases of a tenant; how many were ended."""
        order = EndOrder(tenant=tenant, scope=EndScope.TENANT, target="", reason=reason)
        return await self._end(order, timeout_ms)

    # --- lenders, beside their session ---

    async def publish(
        self,
        engine_id: EngineId,
        incarnation: Incarnation,
        publications: Sequence[Publication],
        *,
        timeout_ms: int | None = None,
    ) -> list[PublishResult]:
        """Make leases resolvable; one result each, in order. As many calls as the message limit asks for.

        Raises NoSession if the lender has no session. Publishing the same again is safe.
        """
        results: list[PublishResult] = []
        for batch in split(map(encode_publication, publications), pb.PublishItem.ByteSize):
            request = pb.PublishRequest(engine_id=engine_id, incarnation=incarnation, leases=batch)
            response = await self._call(lambda stub: stub.Publish, request, timeout_ms)
            if len(response.results) != len(batch):
                raise MalformedAnswer(f"{len(batch)} leases published, {len(response.results)} results")
            results.extend(_decoded(decode_publish_result, result) for result in response.results)
        return results

    # --- operators and watchers ---

    async def list_leases(
        self, selection: LeaseFilter = EVERYTHING, *, page_size: int = MAX_PAGE, timeout_ms: int | None = None
    ) -> LeaseList:
        """Every resolvable lease that matches, of all pages of one replica; `timeout_ms` is for each page.

        Leases may change between two pages. The revision is the first page's, so a watch from it sees every such
        change; a lease that is on two pages is taken from the later one.
        """
        calls, wait_ms = self._opened.calls, self._timeout_ms(timeout_ms)

        async def pages(replica: Replica) -> LeaseList:
            leases: dict[tuple[TenantId, LeaseId], LeaseView] = {}
            request = encode_list(selection, page_size)
            revision: int | None = None
            for _ in range(self._limits.max_pages):
                response = await calls.ask(replica, lambda stub: stub.ListLeases, request, timeout_ms=wait_ms)
                revision = response.revision if revision is None else revision
                for message in response.leases:
                    lease = _decoded(decode_lease, message)
                    leases[lease.tenant, lease.lease_id] = lease
                if not response.next_page_token:
                    return LeaseList(revision=revision, leases=tuple(leases.values()), source=replica.address.target)
                request.page_token = response.next_page_token
            raise MalformedAnswer(f"a list of more than {self._limits.max_pages} pages")

        return await calls.of_one(pages, timeout_ms=wait_ms)

    async def list_engines(self, *, timeout_ms: int | None = None) -> tuple[EngineStatus, ...]:
        """Every engine with a session or with leases."""
        return (await self.survey(timeout_ms=timeout_ms)).engines

    async def survey(self, *, timeout_ms: int | None = None) -> Survey:
        """The same, and what the registry that answered says of itself."""
        response = await self._call(lambda stub: stub.ListEngines, pb.ListEnginesRequest(), timeout_ms)
        return _decoded(decode_survey, response)

    async def watch(
        self, selection: LeaseFilter = EVERYTHING, *, from_revision: int = 0, source: str = ""
    ) -> LeaseEventStream:
        """Lease events after `from_revision` (0: from now on). The first item says after which revision it starts.

        Has no deadline: it lasts until it is closed (use contextlib.aclosing) or fails. Raises Compacted if the
        revision is not kept any more or the watcher fell behind, and RegistryUnavailable when the stream ends: list
        again, then watch. A revision means something to the replica only that said it: give a list's `source`, and
        Compacted is raised where another one is in use by now.
        """
        request = encode_watch(selection, from_revision)
        replica = await self._opened.calls.replica(timeout_ms=self._limits.call_timeout_ms)
        if source and source != replica.address.target:
            raise Compacted(f"revision {from_revision} is of {source}, and {replica.address.target} is in use now")
        call = replica.stub.Watch(request)
        with replica.carrying(call):
            try:
                while isinstance(message := await call.read(), pb.WatchResponse):
                    replica.heard()
                    events = tuple(_decoded(decode_event, event) for event in message.events)
                    yield LeaseEvents(revision=message.revision, events=events, newest=message.newest_revision)
                self._opened.replicas.release(replica)
                raise RegistryUnavailable("the registry closed the watch")
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                if isinstance(failure, RegistryUnavailable):
                    self._opened.replicas.leave(replica, failure)
                raise failure from error
            except asyncio.CancelledError as error:
                if cancelled():
                    raise
                raise RegistryUnavailable("the registry was left") from error

    # --- inside ---

    @property
    def _opened(self) -> _Open:
        if self._open is None:
            raise RegistryUnavailable("the client is not open")
        return self._open

    async def _end(self, order: EndOrder, timeout_ms: int | None) -> int:
        response = await self._call(lambda stub: stub.End, encode_end(order), timeout_ms)
        return response.ended

    async def _call(self, method: Method[Message, Value], request: Message, timeout_ms: int | None) -> Value:
        return await self._opened.calls.call(method, request, timeout_ms=self._timeout_ms(timeout_ms))

    def _timeout_ms(self, given: int | None) -> int:
        return self._limits.call_timeout_ms if given is None else given


class _Open:
    """What exists between __aenter__ and __aexit__."""

    __slots__ = ("calls", "replicas", "runners", "stream")

    def __init__(self, replicas: Replicas, stream: ResolveStream, runners: tuple[asyncio.Task[NoReturn], ...]) -> None:
        self.replicas: Final = replicas
        self.stream: Final = stream
        self.runners: Final = runners
        self.calls: Final = Calls(replicas)


def _decoded(decode: Callable[[Message], Value], message: Message) -> Value:
    """An answer as a value; the fault of an answer is the registry's, not the caller's."""
    try:
        return decode(message)
    except InvalidRequest as error:
        raise MalformedAnswer(f"the registry's answer: {error.message}") from error
