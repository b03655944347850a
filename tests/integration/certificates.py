"""A small certificate authority for tests: real certificates in real files, made when asked.

Elliptic keys, because they are made in a millisecond. Everything is valid from a day ago until tomorrow.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kvlease.registry.client_credentials import Credentials

_DAY: Final = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where a certificate and its key are, and the CA that the other side's is from."""

    ca: Path
    cert: Path
    key: Path

    @property
    def credentials(self) -> Credentials:
        return Credentials(tls_ca=str(self.ca), tls_cert=str(self.cert), tls_key=str(self.key))


class Authority:
    """Signs certificates and keeps them under `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder: Final = folder
        self._name: Final = name
        self._key: Final = ec.generate_private_key(ec.SECP256R1())
        self.pem: Final = _certificate(name, self._key, name, self._key, names=(), is_ca=True)
        self.ca: Final = folder / f"{name}.pem"
        put(self.ca, self.pem)

    def server(self, name: str = "registry") -> Files:
        """A certificate for loopback, by address and by name."""
        return self.issue(name, x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1")))

    def client(self, name: str, *uris: str) -> Files:
        """A certificate whose subject alternative names are these URIs. A name used before is replaced."""
        return self.issue(name, *(x509.UniformResourceIdentifier(uri) for uri in uris))

    def issue(self, name: str, *names: x509.GeneralName) -> Files:
        key = ec.generate_private_key(ec.SECP256R1())
        files = Files(ca=self.ca, cert=self._folder / f"{name}.pem", key=self._folder / f"{name}.key")
        put(files.key, _pem(key))
        put(files.cert, _certificate(name, key, self._name, self._key, names=names))
        return files


def put(path: Path, content: bytes) -> None:
    """Write a file in one step, as what rotates certificates does: readers see the old one or the new one."""
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(content)
    fresh.chmod(0o600)
    os.replace(fresh, path)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    names: tuple[x509.GeneralName, ...],
    is_ca: bool = False,
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(names)), critical=False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
