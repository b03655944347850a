"""What connections to etcd are made with: the newest usable contents of the credential files.

A certificate is replaced while the client is open; gRPC fixes what a channel shows when the channel is made. So whoever
makes channels asks here, and makes another one when the answer is another object. Knows nothing of channels.
Invariant: files that cannot be used never replace what was read; that is logged once, and they are looked at again.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final

import grpc
from kvlease.etcd.credentials import EtcdCredentials
from kvlease.etcd.errors import CredentialsInvalid

RELOAD_S: Final = 1.0
"""Between two looks at whether files have changed."""

_log = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int], ...]


class Proof:
    """The contents of the files of `credentials`, read by `load` and again when they change."""

    def __init__(self, credentials: EtcdCredentials) -> None:
        """No I/O."""
        self._credentials: Final = credentials
        self._paths: Final = tuple(
            Path(x) for x in (credentials.tls_ca, credentials.tls_cert, credentials.tls_key) if x
        )
        self._looked_s = 0.0
        self._seen: Signature = ()
        self._refused: Signature = ()
        self._channel: grpc.ChannelCredentials | None = None

    def load(self) -> None:
        """Read the files. Blocks: small local files. Raises CredentialsInvalid."""
        self._seen = self._signature()
        self._channel = self._credentials.load()
        self._looked_s = time.monotonic()

    def newest(self) -> grpc.ChannelCredentials | None:
        """Another object once the files have changed; None without TLS. Looks at them once in RELOAD_S at most."""
        now_s = time.monotonic()
        if self._paths and now_s - self._looked_s >= RELOAD_S:
            self._looked_s = now_s
            self._refresh()
        return self._channel

    def _refresh(self) -> None:
        seen = self._signature()
        if seen in (self._seen, self._refused):
            return
        try:
            loaded = self._credentials.load()
        except CredentialsInvalid as error:
            self._refused = seen
            _log.warning("new credentials for etcd are not usable, the old ones stay: %s", error.message)
            return
        if self._signature() == seen:  # else half replaced: the next look sees the rest
            self._seen, self._refused, self._channel = seen, (), loaded
            _log.info("credentials for etcd were read again")

    def _signature(self) -> Signature:
        """Differs once a file was replaced, rewritten or taken away."""
        found = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError:
                continue
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)
