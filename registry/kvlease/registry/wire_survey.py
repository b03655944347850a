"""What a registry says of itself and its engines, as a message and back.

Pure. Invariant: what an older registry does not say reads as unknown, never as an error.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvlease.registry.values import EngineStatus, RegistryStatus, Survey
from kvlease.registry.wire import decode_engine_status, encode_engine_status
from kvlease.registry.wire_checks import check_text
from kvlease.v1 import registry_pb2 as pb


def encode_survey(registry: RegistryStatus, engines: Iterable[EngineStatus]) -> pb.ListEnginesResponse:
    told = pb.RegistryStatus(replica_id=registry.replica_id, version=registry.version, shedding=registry.shedding)
    return pb.ListEnginesResponse(engines=map(encode_engine_status, engines), registry=told)


def decode_survey(message: pb.ListEnginesResponse) -> Survey:
    """Raises InvalidRequest if the answer breaks the contract."""
    told = message.registry
    registry = RegistryStatus(
        replica_id=check_text("replica_id", told.replica_id),
        version=check_text("version", told.version),
        shedding=told.shedding,
    )
    return Survey(registry=registry, engines=tuple(map(decode_engine_status, message.engines)))
