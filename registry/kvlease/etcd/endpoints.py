"""One channel to each endpoint, and which of them is used now. Knows nothing of what is said over them.

The current endpoint is sticky: everything goes there until a caller leaves it for the next one. Constructing does no
I/O; a channel connects when it is first used. When credentials were replaced, what is begun goes out on a new channel,
and what is open stays where it is. Invariant: `leave` moves on from the endpoint that failed, not from one that
somebody else has moved to meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from kvlease.etcd.errors import ClientClosed, InvalidRequest
from kvlease.etcd.limits import EtcdLimits
from kvlease.etcd.proof import Proof

Req = TypeVar("Req", bound=Message)
Res = TypeVar("Res", bound=Message)

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Method(Generic[Req, Res]):
    """A call of etcd's API: its path, and what it takes and answers."""

    path: str
    request: type[Req]
    response: type[Res]


class Endpoint:
    """One member's client address and the channel to it."""

    def __init__(self, name: str, proof: Proof, limits: EtcdLimits) -> None:
        """Needs a running event loop."""
        self.name: Final = name
        self._proof: Final = proof
        self._limits: Final = limits
        self._shown = proof.newest()
        self._made = _open_channel(name, self._shown, limits)
        self._unary: Final[dict[str, Callable[..., Any]]] = {}
        self._closed = False

    @property
    def _channel(self) -> grpc.aio.Channel:
        """The one for what is begun now. An older one goes with the last call that is on it."""
        shown = self._proof.newest()
        if shown is not self._shown and not self._closed:
            self._shown, self._made = shown, _open_channel(self.name, shown, self._limits)
            self._unary.clear()
        return self._made

    @property
    def ready(self) -> bool:
        """Whether there is a connection now. If not, one is being made."""
        return self._channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    @property
    def refused(self) -> bool:
        """Whether the last attempt to connect has failed; the channel tries again by itself."""
        return self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def connected(self, timeout_s: float) -> bool:
        """Whether there is a connection now, or within `timeout_s`; a failed attempt ends the wait. Nothing is sent."""
        try:
            async with asyncio.timeout(timeout_s):
                channel = self._channel
                while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                    if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                        return False
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            return False
        return True

    def unary(
        self, method: Method[Req, Res], request: Req, *, timeout_s: float, metadata: Metadata
    ) -> grpc.aio.UnaryUnaryCall[Req, Res]:
        """Start a call; awaiting it gives the answer."""
        channel = self._channel
        call = self._unary.get(method.path)
        if call is None:
            serialize: Callable[[Req], bytes] = method.request.SerializeToString
            call = self._unary[method.path] = channel.unary_unary(
                method.path,
                request_serializer=serialize,
                response_deserializer=method.response.FromString,
            )
        started: grpc.aio.UnaryUnaryCall[Req, Res] = call(request, timeout=timeout_s, metadata=metadata)
        return started

    def stream(
        self, method: Method[Req, Res], *, timeout_s: float | None, metadata: Metadata
    ) -> grpc.aio.StreamStreamCall[Req, Res]:
        """Open a stream; whoever opens it cancels it."""
        serialize: Callable[[Req], bytes] = method.request.SerializeToString
        call = self._channel.stream_stream(
            method.path, request_serializer=serialize, response_deserializer=method.response.FromString
        )
        return call(timeout=timeout_s, metadata=metadata)

    async def close(self) -> None:
        self._closed = True
        await self._made.close()


class Endpoints:
    """All endpoints of one cluster."""

    def __init__(self, names: Sequence[str], limits: EtcdLimits) -> None:
        """`names` are host:port. Raises InvalidRequest if there is none, or one twice."""
        if not names or len(set(names)) != len(names):
            raise InvalidRequest(f"endpoints must be different host:port pairs, at least one, not {list(names)}")
        self._names: Final = tuple(names)
        self._limits: Final = limits
        self._all: tuple[Endpoint, ...] = ()
        self._current = 0

    def open(self, proof: Proof) -> None:
        """Make the channels, with what `proof` has loaded; needs a running event loop."""
        self._all = tuple(Endpoint(name, proof, self._limits) for name in self._names)

    @property
    def is_open(self) -> bool:
        return bool(self._all)

    @property
    def current(self) -> Endpoint:
        """The one to use. Raises ClientClosed."""
        if not self._all:
            raise ClientClosed("the etcd client is not open")
        return self._all[self._current]

    def named(self, name: str) -> Endpoint:
        """Raises InvalidRequest for one that the client was not given, ClientClosed."""
        for endpoint in self._all:
            if endpoint.name == name:
                return endpoint
        if not self._all:
            raise ClientClosed("the etcd client is not open")
        raise InvalidRequest(f"{name} is none of the endpoints {list(self._names)}")

    def __len__(self) -> int:
        return len(self._names)

    def leave(self, endpoint: Endpoint) -> None:
        """Use the next one from now on, unless `endpoint` is not the current one any more."""
        if self._all and self._all[self._current] is endpoint:
            self._current = (self._current + 1) % len(self._all)

    async def close(self) -> None:
        """Ends every call that is still open. Idempotent."""
        closing, self._all = self._all, ()
        for endpoint in closing:
            await endpoint.close()


def _open_channel(name: str, credentials: grpc.ChannelCredentials | None, limits: EtcdLimits) -> grpc.aio.Channel:
    options = (
        ("grpc.max_receive_message_length", limits.max_answer_bytes),
        ("grpc.keepalive_time_ms", limits.ping_ms),
        ("grpc.keepalive_timeout_ms", limits.ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 0),  # etcd counts such pings as abuse
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),  # also how long one attempt to connect may take
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", 0),  # what may be repeated is decided in calls.py
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
    if credentials is None:
        return grpc.aio.insecure_channel(name, options=options)
    return grpc.aio.secure_channel(name, credentials, options=options)
