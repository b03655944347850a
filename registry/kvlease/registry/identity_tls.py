"""The server's certificate, and callers known by theirs: URIs in the subject alternative name are their grants.

    URI:kvlease://lender/d0?tenant=acme

gRPC does the handshake and verifies the chain; here files become its configuration, again whenever they change.
Invariant: a certificate that does not fit its key, or a bundle that holds none, never replaces one that works.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

import grpc
from kvlease.registry.errors import Unauthenticated
from kvlease.registry.identity import SCHEME, Identity, IdentityInvalid
from kvlease.registry.identity_gate import Caller, CallFacts
from kvlease.registry.pem import check_bundle, check_pair
from kvlease.registry.secret_files import FileUnusable, Signature, read_public, read_secret, signature

_KNOWN: Final = 4_096
"""Identities kept parsed: about one for each certificate in use."""


class ServerCertificates:
    """Certificate and key of a server, and the CA whose clients it accepts; None: clients show no certificate."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert: Final = cert
        self._key: Final = key
        self._client_ca: Final = client_ca
        self._signature: Signature = ()
        self._loaded: grpc.ServerCertificateConfiguration | None = None
        self._news: grpc.ServerCertificateConfiguration | None = None

    def refresh(self) -> bool:
        """Read the files if they changed; whether they did. Blocks. Raises FileUnusable; what was loaded then stands.

        Handshakes from now on use what was read; connections that are open stay open.
        """
        paths = [self._cert, self._key, *([self._client_ca] if self._client_ca is not None else [])]
        seen = signature(paths)
        if seen == self._signature:
            return False
        cert, key = read_public(self._cert), read_secret(self._key)
        client_ca = read_public(self._client_ca) if self._client_ca is not None else None
        check_pair(self._cert, self._key)
        if client_ca is not None and self._client_ca is not None:
            check_bundle(self._client_ca, client_ca)
        if signature(paths) != seen:
            raise FileUnusable(f"{self._cert}: changed while it was read")
        self._loaded = self._news = grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)
        self._signature = seen
        return True

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`, after the first `refresh`."""
        assert self._loaded is not None, "refresh comes first"
        return grpc.dynamic_ssl_server_credentials(
            self._loaded,
            self._fetch,  # type: ignore[arg-type]  # None is allowed, the stubs do not say so
            require_client_authentication=self._client_ca is not None,
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC for each handshake, on a thread of its own; None: as before."""
        news, self._news = self._news, None
        return news


class CertifiedCallers:
    """A `CallerSource` for servers that ask for certificates."""

    def identify(self, call: CallFacts) -> Caller:
        """Raises Unauthenticated."""
        if not call.is_certified:
            raise Unauthenticated("the connection was opened without a certificate")
        names = tuple(name for name in call.names if name.startswith(SCHEME))
        if not names:
            raise Unauthenticated(f"the certificate has no {SCHEME} URI in its subject alternative name")
        try:
            return Caller(identity=_identity(names))
        except IdentityInvalid as error:
            raise Unauthenticated(f"the certificate's {SCHEME} URI: {error}") from error

    def stands(self, caller: Caller) -> bool:
        """A certificate is looked at when a connection opens."""
        del caller
        return True


@lru_cache(maxsize=_KNOWN)
def _identity(names: tuple[str, ...]) -> Identity:
    return Identity.parse(names)
