"""Each ttl is set in one place: a second setting of the same would one day say something else.

A lease's is its lender's, and routers renew without knowing it. A session's is the registry's, and lenders are told it.
"""

from __future__ import annotations

import pytest
from kvlease.connector.settings import ConnectorSettings
from kvlease.registry.lender_session import SessionLimits
from kvlease.registry.settings import RegistrySettings
from kvlease.router.settings import RouterSettings
from kvlease.v1 import registry_pb2 as pb
from pydantic_settings import BaseSettings

TOLD = {"heartbeat_interval_ms", "suspect_after_ms", "session_ttl_ms"}
"""The registry's, in the Welcome."""


def times(settings: type[BaseSettings]) -> set[str]:
    """Settings about how long leases and sessions last."""
    words = ("ttl", "heartbeat", "suspect", "lease_duration", "lifetime", "deadline_ms")
    return {name for name in settings.model_fields if any(word in name for word in words)}


@pytest.mark.parametrize(
    ("settings", "own"),
    [(RegistrySettings, TOLD), (RouterSettings, set()), (ConnectorSettings, {"lease_ttl_ms", "max_lifetime_ms"})],
)
def test_no_part_sets_what_is_anothers(settings: type[BaseSettings], own: set[str]) -> None:
    assert times(settings) == own


def test_what_the_registry_sets_is_told_to_lenders() -> None:
    assert {x.name for x in pb.Welcome.DESCRIPTOR.fields} - {"replica_id"} == TOLD
    assert not [x for x in SessionLimits.__dataclass_fields__ if "heartbeat" in x or "ttl_ms" in x]
