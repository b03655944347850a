"""Where a registry's replicas are, as settings and flags say it: HOST:PORT, or several with commas between.

Pure: no name is looked up here (`client_addresses.py` does that). Connector, router and command line read their lists
with this, so that all of them refuse the same things with the same words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Final

MAX_ENDPOINTS: Final = 32
"""In one list. Replicas are few; a name may stand for all of them."""
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HOST: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252})")


class EndpointsInvalid(ValueError):
    """This is no list of endpoints; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One item of the list. `host` is a name or an IP address, without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_address(self) -> bool:
        """Whether there is nothing to look up."""
        return _address(self.host)


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """The endpoints of `text`, in its order. Raises EndpointsInvalid."""
    parts = [part.strip() for part in text.split(",")]
    if parts == [""]:
        raise EndpointsInvalid("must be HOST:PORT, or several with commas between, not empty")
    if "" in parts:
        raise EndpointsInvalid(f"has a comma too many: {text!r}")
    if len(parts) > MAX_ENDPOINTS:
        raise EndpointsInvalid(f"has {len(parts)} endpoints, at most {MAX_ENDPOINTS} are allowed; use a name for all")
    endpoints = tuple(_endpoint(part) for part in parts)
    for number, endpoint in enumerate(endpoints):
        if endpoint in endpoints[:number]:
            raise EndpointsInvalid(f"names {endpoint} twice")
    return endpoints


def _endpoint(text: str) -> Endpoint:
    scheme = _SCHEME.match(text)
    if scheme is not None:
        rest = text[scheme.end() :].partition("/")[0]
        raise EndpointsInvalid(f"must be HOST:PORT without {scheme[0]}: {rest}")
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
        raise EndpointsInvalid(f"must be HOST:PORT, the port from 1 to 65535, not {text!r}")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    if bracketed or ":" in name:
        if not _address(name) or ":" not in name:
            raise EndpointsInvalid(f"must be HOST:PORT, not {text!r}")
        if not bracketed:
            raise EndpointsInvalid(f"needs brackets around an IPv6 address, as in '[{name}]:{port}'")
        return Endpoint(str(IPv6Address(name)), int(port))
    if not _HOST.fullmatch(name):
        raise EndpointsInvalid(f"must be HOST:PORT, the host a name or an address, not {text!r}")
    return Endpoint(name.lower(), int(port))


def _address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
