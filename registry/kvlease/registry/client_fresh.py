"""A channel whose credentials may change under it: certificates rotate and tokens are replaced without a restart.

gRPC fixes a channel's credentials when it is made. So this is a channel made of channels: each call goes out on the
newest, and another is made when the files have changed. Streams that are open stay where they are; what opens one
again (a lender's session, a resolve stream) gets the newest.
Invariant: files that cannot be used never replace credentials that were read; they are logged once and tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from kvlease.registry.client_credentials import Credentials, CredentialsInvalid, LoadedCredentials
from kvlease.registry.secret_files import RELOAD_S, FileUnusable, Signature, signature

_log = logging.getLogger(__name__)

Connect = Callable[[grpc.ChannelCredentials | None], grpc.aio.Channel]
# What grpc's stubs hand over and get back: messages and calls of any rpc, passed on without looking.
Call = Any


class FreshCredentials:
    """The newest usable contents of the files of `credentials`, for any number of channels."""

    def __init__(self, registry: str, credentials: Credentials) -> None:
        """Reads the files. `registry`: its endpoints. Raises CredentialsInvalid."""
        self._registry: Final = registry
        self._credentials: Final = credentials
        self._faulty: Signature | None = None
        self._looked_s = time.monotonic()
        try:
            self._seen = signature(credentials.paths)
        except FileUnusable as error:
            raise CredentialsInvalid(str(error)) from error
        self._loaded = credentials.load(registry)

    def newest(self) -> LoadedCredentials:
        """Another object once they have changed. Looks at the files, at most every RELOAD_S: a few microseconds."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= RELOAD_S:
            self._looked_s = now_s
            self._refresh()
        return self._loaded

    def _refresh(self) -> None:
        try:
            seen = signature(self._credentials.paths)
            if seen == self._seen:
                return
            loaded = self._credentials.load(self._registry)
            if signature(self._credentials.paths) != seen:
                return  # half replaced; the next look sees the rest
        except (FileUnusable, CredentialsInvalid) as error:
            self._note_fault(error)
            return
        self._seen, self._faulty, self._loaded = seen, None, loaded
        _log.info("credentials for the registry at %s were read again", self._registry)

    def _note_fault(self, error: Exception) -> None:
        try:
            now = signature(self._credentials.paths)
        except FileUnusable:
            now = ()
        if now != self._faulty:
            self._faulty = now
            _log.warning("new credentials for the registry are not usable, the old ones stay: %s", error)


class FreshChannel(grpc.aio.Channel):
    """A `grpc.aio.Channel` to one address with `credentials`. `connect` makes the channels that it consists of."""

    def __init__(self, credentials: FreshCredentials, connect: Connect) -> None:
        self._credentials: Final = credentials
        self._connect: Final = connect
        self._closed = False
        self._loaded = credentials.newest()
        self._inner = connect(self._loaded.channel)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Sent with every call."""
        return (("authorization", f"Bearer {self._loaded.token}"),) if self._loaded.token else ()

    def newest(self) -> grpc.aio.Channel:
        """The channel for the next call."""
        if not self._closed and (loaded := self._credentials.newest()) is not self._loaded:
            # The old channel is left to the calls that are on it, and goes with the last of them.
            self._loaded, self._inner = loaded, self._connect(loaded.channel)
        return self._inner

    # --- grpc.aio.Channel

    async def __aenter__(self) -> FreshChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.newest().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Call:
        return _Method(self, "unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Call:
        return _Method(self, "unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Call:
        return _Method(self, "stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Call:
        return _Method(self, "stream_stream", args, options)


class _Method:
    """One rpc of a stub: called on the newest channel."""

    __slots__ = ("_args", "_channel", "_kind", "_method", "_of", "_options")

    def __init__(self, channel: FreshChannel, kind: str, args: Sequence[Any], options: dict[str, Any]) -> None:
        self._channel: Final = channel
        self._kind: Final = kind
        self._args: Final = args
        self._options: Final = options
        self._of: grpc.aio.Channel | None = None
        self._method: Call = None

    def __call__(self, *args: Any, **options: Any) -> Call:
        newest = self._channel.newest()
        if newest is not self._of:
            self._of, self._method = newest, getattr(newest, self._kind)(*self._args, **self._options)
        metadata = self._channel.metadata
        if metadata:
            options["metadata"] = (*(options.get("metadata") or ()), *metadata)
        return self._method(*args, **options)
