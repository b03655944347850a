"""The addresses behind the endpoints of a registry: names are looked up, again and again, because replicas come and go.

Edge code: the resolver of the machine, in a thread. No connections here.
Invariants: each name has one lookup under way at most, so a resolver that hangs takes one thread; a name that cannot
be looked up keeps the addresses it had.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from kvlease.registry.client_endpoints import Endpoint

MAX_ADDRESSES: Final = 64
"""Of one name; more are left out."""
_log = logging.getLogger(__name__)

Lookup = Callable[[str], Awaitable[Sequence[str]]]
"""The IP addresses of a host's name, best first. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Address:
    """One address of one endpoint. `spare`: of the family that the name has less use for, so tried after the others."""

    endpoint: Endpoint
    ip: str
    spare: bool = False

    @property
    def target(self) -> str:
        """For gRPC."""
        return str(Endpoint(self.ip, self.endpoint.port))

    def __str__(self) -> str:
        return self.target if self.endpoint.is_address else f"{self.endpoint} at {self.ip}"


async def look_up(host: str) -> Sequence[str]:
    """A `Lookup` by the machine's resolver: hosts file, DNS, whatever it is set up for."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class AddressBook:
    """What is known of a list of endpoints. Nothing is, of names, until `refresh`."""

    def __init__(self, endpoints: Sequence[Endpoint], lookup: Lookup) -> None:
        self._endpoints: Final = tuple(endpoints)
        self._lookup: Final = lookup
        self._known: Final[dict[Endpoint, tuple[Address, ...]]] = {
            x: (Address(x, x.host),) for x in self._endpoints if x.is_address
        }
        self._running: Final[dict[Endpoint, asyncio.Task[tuple[Address, ...]]]] = {}
        self.faults: Final[dict[Endpoint, str]] = {}
        """Names that could not be looked up the last time, and why."""

    @property
    def changes(self) -> bool:
        """Whether there is anything to look up."""
        return any(not x.is_address for x in self._endpoints)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All, in the order of the list; those of a name in the order of their IP addresses. No target twice."""
        found: dict[str, Address] = {}
        for endpoint in self._endpoints:
            for address in self._known.get(endpoint, ()):
                found.setdefault(address.target, address)
        return tuple(found.values())

    async def refresh(self, *, limit_s: float) -> None:
        """Look every name up, for `limit_s` at most; what takes longer goes on and counts next time."""
        names = [x for x in self._endpoints if not x.is_address]
        if not names:
            return
        for name in names:
            if name not in self._running:
                self._running[name] = asyncio.create_task(self._ask(name), name=f"kvlease lookup of {name.host}")
        await asyncio.wait(self._running.values(), timeout=limit_s)
        for name in names:
            self._take(name)

    def close(self) -> None:
        """Wait for nothing any more."""
        for task in self._running.values():
            task.cancel()

    def _take(self, name: Endpoint) -> None:
        task = self._running[name]
        if not task.done():
            self._fault(name, "the lookup takes too long")
            return
        del self._running[name]
        error = task.exception()
        if error is not None:
            self._fault(name, str(getattr(error, "strerror", None) or error))
        elif not task.result():
            self._fault(name, "has no address")
        else:
            self.faults.pop(name, None)
            self._known[name] = task.result()

    async def _ask(self, name: Endpoint) -> tuple[Address, ...]:
        ips = list(await self._lookup(name.host))[:MAX_ADDRESSES]
        version = ip_address(ips[0]).version if ips else 0
        ordered = sorted(ips, key=lambda ip: (ip_address(ip).version, ip_address(ip).packed))
        return tuple(Address(name, ip, spare=ip_address(ip).version != version) for ip in ordered)

    def _fault(self, name: Endpoint, text: str) -> None:
        if name not in self.faults:
            _log.warning("%s cannot be looked up: %s", name.host, text)
        self.faults[name] = text
