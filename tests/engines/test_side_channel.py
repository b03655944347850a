"""The probe's side channel, against vLLM's own listener: who is there, and who is there and cannot be read from.

The payloads are made here, the protocol around them is vLLM's. No engine, no NIXL.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="the listener is vLLM's: install the engines (make engines-venv)")

import msgspec
from kvlease.connector.probe import Peer
from kvlease.connector.vllm_side_channel import VllmSideChannel
from kvlease.registry.values import EngineId, Incarnation
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload

from tests.ports import free_port

pytestmark = pytest.mark.engines

HASH = "ours"


def metadata(engine_id: str) -> bytes:
    return msgspec.msgpack.encode(
        NixlAgentMetadata(
            engine_id=engine_id,
            agent_metadata=b"",
            kv_caches_base_addr=[],
            device_id=0,
            num_blocks=1,
            block_lens=[],
            block_strides=[],
            kv_cache_layout="LBHNC",
            block_size=32,
            ssm_sizes=(0, 0),
            attn_backend_name="CPU_ATTN",
            physical_blocks_per_logical_kv_block=1,
        )
    )


@pytest.fixture
def lender(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """Someone who answers as the payload says, where a record says that engine `d` is."""
    payload, port = msgspec.msgpack.encode(request.param), free_port()
    ready, stop = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=NixlBaseConnectorScheduler._nixl_handshake_listener,
        args=({(0, 0): payload}, ready, stop, "127.0.0.1", port),
    )
    thread.start()
    assert ready.wait(20)
    yield Peer(engine_id=EngineId("d"), incarnation=Incarnation(bytes(16)), host="127.0.0.1", port=port)
    stop.set()
    thread.join(20)


def payload(agent: bytes, compatibility_hash: str = HASH) -> NixlHandshakePayload:
    return NixlHandshakePayload(compatibility_hash=compatibility_hash, agent_metadata_bytes=agent)


@pytest.mark.parametrize(
    ("lender", "good", "told"),
    [
        (payload(metadata("d")), True, 0),
        (payload(metadata("somebody-else")), False, 0),
        (payload(metadata("d"), "theirs"), False, 1),
        (payload(b"of a later version", "theirs"), False, 1),
    ],
    indirect=["lender"],
    ids=["there", "another-engine", "incompatible", "incompatible-and-unreadable"],
)
async def test_an_engine_that_cannot_be_read_from_is_said_to_be_so_once(
    lender: Peer, good: bool, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    """R6: what NIXL compares and no fingerprint covers, such as the attention backend."""
    caplog.set_level(logging.WARNING, "kvlease.connector.vllm_side_channel")
    channel = VllmSideChannel()
    channel.compatibility_hash = HASH
    try:
        for _ in range(2):
            assert await channel.answers_for(lender) is good
    finally:
        await channel.close()
    assert [record.args for record in caplog.records if record.name.startswith("kvlease")] == [("d",)] * told
