"""What went wrong between this command and a registry, as one sentence that says what to do.

Pure. Invariant: where and what are always said; a reason that programs can match stands in brackets at the end.
"""

from __future__ import annotations

from typing import Final

from kvlease.registry.errors import (
    DeadlineExceeded,
    KvleaseError,
    PermissionDenied,
    RegistryUnavailable,
    Unauthenticated,
)

# In gRPC's words.
_CERTIFICATE: Final = "CERTIFICATE_VERIFY_FAILED"
_CLOSED: Final = ("Socket closed", "Connection reset")
"""All that a client hears of a registry that does not accept its certificate."""


def sentence(registry: str, error: KvleaseError) -> str:
    """For a person who asked `registry`, its endpoints."""
    match error:
        case RegistryUnavailable():
            named = error.message.startswith("no registry answers at ")
            text = f"{error.message if named else f'{registry}: {error.message}'}; {advice(error)}"
        case DeadlineExceeded():
            text = f"no answer from {registry} in time; give it longer with --timeout-ms, or {advice(error)}"
        case Unauthenticated() | PermissionDenied():
            text = f"{registry}: {error.message}; {advice(error)}"
        case _:
            text = f"{registry}: {error.message}"
    return f"{text} ({error.reason.value})"


def advice(error: KvleaseError) -> str:
    """What to do about it; "" if nothing is known to help."""
    match error:
        case Unauthenticated() | PermissionDenied():
            return "give --tls-ca, --tls-cert and --tls-key, or --token-file, of a router or an operator"
        case RegistryUnavailable() if "does not serve" in error.message:
            return "its log says why: a registry that has no contact with its store, or is going away, does not serve"
        case RegistryUnavailable() if _CERTIFICATE in error.message:
            return "see that --tls-ca is the CA of its certificate, and that its certificate is valid"
        case RegistryUnavailable() if any(x in error.message for x in _CLOSED):
            return (
                "see that `kvlease registry` runs there, and whether it wants TLS (--tls-ca) "
                "and a certificate of its CA from you (--tls-cert, --tls-key)"
            )
        case RegistryUnavailable() | DeadlineExceeded():
            return "see that `kvlease registry` runs there, and whether it wants TLS (--tls-ca)"
        case _:
            return ""
