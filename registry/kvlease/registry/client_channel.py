"""How a client reaches a registry: channel options, limits, and the channel itself.

The registry's server must permit what is set here, so both sides take their keepalive from this file. No calls.
Invariant: pings are never closer than `MIN_PING_MS`, or the other side closes the connection as abuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio
from kvlease.registry.client_credentials import Credentials
from kvlease.registry.client_fresh import FreshChannel, FreshCredentials
from kvlease.registry.telemetry import TraceparentInterceptor
from kvlease.registry.values import MAX_MESSAGE_BYTES

MIN_PING_MS: Final = 5_000

Option = tuple[str, int]

NO_PROXY: Final[Option] = ("grpc.enable_http_proxy", 0)
"""Whatever http_proxy says: a proxy would read tokens that travel to loopback only, and is no way to a registry."""

CLIENT_OPTIONS: Final[tuple[Option, ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2 * MIN_PING_MS),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # also how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a lender's line and its resolves do not share fate
    NO_PROXY,
)

SERVER_OPTIONS: Final[tuple[Option, ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_MS),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.keepalive_time_ms", 2 * MIN_PING_MS),
    ("grpc.keepalive_timeout_ms", 3_000),
)
"""What the registry's server sets, to go with CLIENT_OPTIONS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Bounds of a client; every wait and every queue has one."""

    call_timeout_ms: int = 2_000
    """Deadline of a call when the caller names none."""
    connect_timeout_ms: int = 1_000
    """One attempt to reach a replica, from the connection to its first answer."""
    stagger_ms: int = 200
    """An attempt that lasts so long is not waited for any more: the next replica is tried beside it."""
    ping_timeout_ms: int = 500
    """A replica that gives cause for doubt and answers nothing for so long is left."""
    ping_pause_ms: int = 250
    """Between two pings for cause; doubles as long as they are answered."""
    idle_ms: int = 1_000
    """A replica that has not been heard for so long is pinged, if there are others."""
    settled_ms: int = 5_000
    """A replica that served so long makes the next pause a short one again."""
    avoid_ms: int = 1_000
    """A replica that failed is not tried for so long, unless all have failed and there was a pause."""
    lookup_timeout_ms: int = 2_000
    lookup_interval_ms: int = 30_000
    """Between two lookups of names while all is well; while no replica works, names are looked up before each round."""
    backoff_first_ms: int = 100
    backoff_cap_ms: int = 1_000
    max_waiting: int = 16_384
    """Resolves without an answer; more are refused as Overloaded."""
    max_pages: int = 1_000
    """Pages of one list: a million leases, a thousand to a page."""


Open = Callable[[str, str], grpc.aio.Channel]
"""Opens a channel to a target; the second text is the name that the other side's certificate has to have."""


def opener(registry: str, credentials: Credentials | None = None) -> Open:
    """How to open channels to the endpoints `registry`. Reads the files of `credentials`, again whenever they change.

    Raises CredentialsInvalid.
    """
    fresh = FreshCredentials(registry, credentials) if credentials is not None and credentials.paths else None

    def open_to(target: str, authority: str) -> grpc.aio.Channel:
        options = (*CLIENT_OPTIONS, ("grpc.default_authority", authority))
        interceptors: list[grpc.aio.ClientInterceptor] = [TraceparentInterceptor()]

        def connect(channel: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
            if channel is None:
                return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
            return grpc.aio.secure_channel(target, channel, options=options, interceptors=interceptors)

        return connect(None) if fresh is None else FreshChannel(fresh, connect)

    return open_to


def open_channel(endpoint: str, credentials: Credentials | None = None) -> grpc.aio.Channel:
    """A channel to `endpoint`, HOST:PORT. Needs a running event loop; connects when first used.

    Raises CredentialsInvalid.
    """
    return opener(endpoint, credentials)(endpoint, endpoint)
