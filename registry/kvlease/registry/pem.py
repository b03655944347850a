"""Certificates and keys are looked at before they are used: gRPC itself takes anything and fails at the handshake.

Invariant: nothing of a file's content is in any message.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from kvlease.registry.secret_files import FileUnusable


def check_pair(cert: Path, key: Path) -> None:
    """Raises FileUnusable unless the key is the certificate's, and not encrypted. Blocks."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise FileUnusable(f"{cert} and {key}: not a certificate and its key, PEM, without password") from error


def check_bundle(path: Path, content: bytes) -> None:
    """Raises FileUnusable unless there is a certificate in it."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise FileUnusable(f"{path}: not a certificate of a CA, PEM") from error


def _no_password() -> str:
    """OpenSSL would ask on the terminal."""
    return ""
