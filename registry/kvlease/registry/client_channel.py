"""How a client reaches a registry: channel options, limits, and the channel itself.

The registry's server must permit what is set here, so both sides take their keepalive from this file. No calls.
Invariant: pings are never closer than `MIN_PING_MS`, or the other side closes the connection as abuse.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio
from kvlease.registry.client_credentials import Credentials
from kvlease.registry.client_fresh import FreshChannel
from kvlease.registry.errors import RegistryUnavailable
from kvlease.registry.telemetry import TraceparentInterceptor
from kvlease.registry.values import MAX_MESSAGE_BYTES

MIN_PING_MS: Final = 5_000

Option = tuple[str, int]

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
    """One attempt to reach the registry."""
    backoff_first_ms: int = 100
    backoff_cap_ms: int = 1_000
    max_waiting: int = 16_384
    """Resolves without an answer; more are refused as Overloaded."""
    max_pages: int = 1_000
    """Pages of one list: a million leases, a thousand to a page."""


def open_channel(endpoint: str, credentials: Credentials | None = None) -> grpc.aio.Channel:
    """A channel to `endpoint` (host:port, or any gRPC target). Needs a running event loop; connects when first used.

    Reads the files of `credentials`, again whenever they change. Raises CredentialsInvalid.
    """

    def connect(channel: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        interceptors: list[grpc.aio.ClientInterceptor] = [TraceparentInterceptor()]
        if channel is None:
            return grpc.aio.insecure_channel(endpoint, options=CLIENT_OPTIONS, interceptors=interceptors)
        return grpc.aio.secure_channel(endpoint, channel, options=CLIENT_OPTIONS, interceptors=interceptors)

    if credentials is None or not credentials.paths:
        return connect(None)
    return FreshChannel(endpoint, credentials, connect)


async def connected(channel: grpc.aio.Channel, *, timeout_ms: int, patient: bool) -> None:
    """Wait until `channel` has a connection; the channel itself paces its attempts.

    `patient` waits on while attempts fail; otherwise the first failed attempt ends the wait. Raises
    RegistryUnavailable after `timeout_ms` at the latest.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                failed = state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not patient
                if failed or state is grpc.ChannelConnectivity.SHUTDOWN:
                    raise RegistryUnavailable("the registry cannot be reached")
                await channel.wait_for_state_change(state)
    except TimeoutError as error:
        raise RegistryUnavailable(f"no connection to the registry within {timeout_ms} ms") from error
