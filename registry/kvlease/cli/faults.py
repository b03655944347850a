"""What went wrong between this command and a registry, as one sentence that says what to do.

Pure. Invariant: where and what are always said; a reason that programs can match stands in brackets at the end.
"""

from __future__ import annotations

import re
from typing import Final

from kvlease.registry.errors import (
    DeadlineExceeded,
    KvleaseError,
    PermissionDenied,
    RegistryUnavailable,
    Unauthenticated,
)

LAST_ERROR: Final = re.compile(
    r"(?:.*last error: )?(?:UNKNOWN: |UNAVAILABLE: )?(?:ipv[46]:\S+: )?"
    r"(?:Failed to connect to remote host: )?(?P<why>.*)\Z",
    re.DOTALL,
)
"""gRPC tells the story of all addresses that it tried; the end of it is what happened."""


def sentence(registry: str, error: KvleaseError) -> str:
    """For a person who asked `registry`, HOST:PORT."""
    match error:
        case RegistryUnavailable():
            text = f"no registry answers at {registry}: {_why(error.message)}; {advice(error)}"
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
        case RegistryUnavailable() | DeadlineExceeded():
            return "see that `kvlease registry` runs there, and whether it wants TLS (--tls-ca)"
        case _:
            return ""


def _why(message: str) -> str:
    match = LAST_ERROR.match(message)
    return (match["why"] if match is not None else message).strip() or message
