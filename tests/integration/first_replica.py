"""Clients that begin with the first of several replicas, so that a case knows which one to break.

By itself a client that waits for its first replica for 200 ms tries the next one beside it, which on a busy machine
happens to one of fifty.
"""

from __future__ import annotations

from typing import Final

from kvlease.registry.client import RegistryClient
from kvlease.registry.client_addresses import Lookup, look_up
from kvlease.registry.client_channel import ClientLimits

ALONE: Final = ClientLimits(stagger_ms=30_000)
"""An attempt has failed before another one is made beside it."""


def in_order() -> float:
    """All replicas rank alike, so that their order in the list decides."""
    return 0.0


def at_the_first(endpoints: str, *, limits: ClientLimits = ALONE, lookup: Lookup = look_up) -> RegistryClient:
    """A client of `endpoints` that takes the first of them if it answers at all."""
    return RegistryClient(endpoints, fraction=in_order, limits=limits, lookup=lookup)
