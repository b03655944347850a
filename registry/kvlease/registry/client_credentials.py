"""What a client of the registry proves itself with: certificates, or a token, or (on loopback) nothing.

Paths only; contents are read when a connection is made and again whenever they change (`client_fresh.py`).
Invariant: a token never travels unencrypted to another host, and no content is in any repr or message.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import grpc
from kvlease.registry.client_endpoints import parse_endpoints
from kvlease.registry.pem import check_bundle, check_pair
from kvlease.registry.secret_files import FileUnusable, read_public, read_secret

MIN_TOKEN_CHARS: Final = 32
"""Shorter ones can be guessed; `openssl rand -hex 32` makes 64."""


class CredentialsInvalid(ValueError):
    """These credentials cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Where a client's credentials are. `tls_ca`: whom to believe that it is the registry; without it, no TLS."""

    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        """Raises CredentialsInvalid if they do not fit together."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise CredentialsInvalid("tls_cert and tls_key go together: give both or neither")
        if self.tls_cert and not self.tls_ca:
            raise CredentialsInvalid("tls_cert needs tls_ca: the CA of the registry's certificate")

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        return tuple(Path(x) for x in (self.tls_ca, self.tls_cert, self.tls_key, self.token_file) if x)

    def check(self, registry: str) -> None:
        """Whether a client of the endpoints `registry` could start with these. Blocks. Raises CredentialsInvalid."""
        self.load(registry)

    def load(self, registry: str) -> LoadedCredentials:
        """Read all files. Blocks: small local files. Raises CredentialsInvalid, EndpointsInvalid."""
        if self.token_file and not self.tls_ca and not all(is_loopback(x.host) for x in parse_endpoints(registry)):
            raise CredentialsInvalid("token_file needs tls_ca: the token would travel unencrypted to another host")
        try:
            return LoadedCredentials(channel=self._channel(), token=self._token())
        except FileUnusable as error:
            raise CredentialsInvalid(str(error)) from error

    def _channel(self) -> grpc.ChannelCredentials | None:
        if not self.tls_ca:
            return None
        ca = read_public(Path(self.tls_ca))
        check_bundle(Path(self.tls_ca), ca)
        if not self.tls_cert:
            return grpc.ssl_channel_credentials(ca)
        cert, key = read_public(Path(self.tls_cert)), read_secret(Path(self.tls_key))
        check_pair(Path(self.tls_cert), Path(self.tls_key))
        return grpc.ssl_channel_credentials(ca, key, cert)

    def _token(self) -> str:
        if not self.token_file:
            return ""
        text = read_secret(Path(self.token_file)).decode("ascii", "replace").strip()
        if len(text) < MIN_TOKEN_CHARS or not text.isascii() or not text.isprintable() or " " in text:
            raise CredentialsInvalid(
                f"{self.token_file}: not a token: one line of at least {MIN_TOKEN_CHARS} printable characters"
            )
        return text


class LoadedCredentials:
    """Contents of the files. No repr shows them."""

    __slots__ = ("channel", "token")

    def __init__(self, *, channel: grpc.ChannelCredentials | None, token: str) -> None:
        self.channel: Final = channel
        self.token: Final = token


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine whatever the network says."""
    name = host.removeprefix("[").removesuffix("]")
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
