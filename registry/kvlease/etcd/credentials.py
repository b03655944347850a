"""What the client proves itself with: a certificate, or a user and password, or both, or nothing.

Files are read when the client opens, and when they have changed (`proof.py`); a password's before each login.
Invariant: a password never travels unencrypted to another host, and neither it nor a key is in any repr or message.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import grpc
from kvlease.etcd.errors import CredentialsInvalid

MAX_PASSWORD_BYTES: Final = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdCredentials:
    """`tls_ca`, `tls_cert`, `tls_key` are paths of PEM files; without `tls_ca` there is no TLS.

    `password_file` is the path of a file with the password, for one that may change while the client is open.
    """

    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""

    def __post_init__(self) -> None:
        """Raises CredentialsInvalid if they do not fit together."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise CredentialsInvalid("tls_cert and tls_key go together: give both or neither")
        if self.tls_cert and not self.tls_ca:
            raise CredentialsInvalid("tls_cert needs tls_ca: the CA of etcd's certificates")
        if bool(self.user) != bool(self.password or self.password_file):
            raise CredentialsInvalid("user and password go together: give both or neither")
        if self.password and self.password_file:
            raise CredentialsInvalid("password and password_file say the same: give one of them")

    def check_endpoints(self, endpoints: Sequence[str]) -> None:
        """Raises CredentialsInvalid if the password would travel unencrypted to another host."""
        if self.user and not self.tls_ca and not all(is_loopback(one.rpartition(":")[0]) for one in endpoints):
            raise CredentialsInvalid("user and password need tls_ca: they would travel unencrypted to another host")

    def read_password(self) -> str:
        """The password as of now. Blocks: a small local file. Raises CredentialsInvalid."""
        if not self.password_file:
            return self.password
        try:
            with Path(self.password_file).open("rb") as file:
                content = file.read(MAX_PASSWORD_BYTES + 1)
        except OSError as error:
            raise CredentialsInvalid(f"{self.password_file}: {error.strerror or error}") from error
        try:
            password = content.decode().strip()
        except UnicodeDecodeError:  # the error would repeat what is in the file
            raise CredentialsInvalid(f"{self.password_file}: not UTF-8 text") from None
        if not password or len(content) > MAX_PASSWORD_BYTES:
            raise CredentialsInvalid(f"{self.password_file}: no password, or more than {MAX_PASSWORD_BYTES} bytes")
        return password

    def load(self) -> grpc.ChannelCredentials | None:
        """What a channel needs, None without TLS. Blocks: small local files. Raises CredentialsInvalid."""
        if not self.tls_ca:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.tls_ca)
            if not self.tls_cert:
                return grpc.ssl_channel_credentials(Path(self.tls_ca).read_bytes())
            context.load_cert_chain(self.tls_cert, self.tls_key, password=_no_passphrase)
            return grpc.ssl_channel_credentials(
                Path(self.tls_ca).read_bytes(), Path(self.tls_key).read_bytes(), Path(self.tls_cert).read_bytes()
            )
        except OSError as error:  # ssl.SSLError is one
            files = ", ".join(path for path in (self.tls_ca, self.tls_cert, self.tls_key) if path)
            raise CredentialsInvalid(f"{files}: not a CA, or not a certificate and its key: {error}") from error


def _no_passphrase() -> str:
    raise CredentialsInvalid("tls_key has a passphrase: give one without")


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine whatever the network says."""
    name = host.removeprefix("[").removesuffix("]")
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
