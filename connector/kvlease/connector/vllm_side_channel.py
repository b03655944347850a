"""Asks an engine's NIXL side channel for its handshake payload: vLLM's protocol, with a limit of our own.

Guarantee: no more than one question per peer is open (the probe sees to that), and none outlives its limit.
"""

from __future__ import annotations

import msgspec
from kvlease.connector.probe import Peer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlHandshakePayload,
)
from vllm.utils.network_utils import make_zmq_path
from zmq import LINGER, REQ, ZMQError
from zmq.asyncio import Context


class VllmSideChannel:
    """Used on one event loop. `compatibility_hash` is this engine's own, once its workers have said it."""

    def __init__(self) -> None:
        self.compatibility_hash: str | None = None
        self._context: Context | None = None

    async def answers_for(self, peer: Peer) -> bool:
        """Whether rank 0 of this engine answers there and fits ours; raises ValueError or OSError."""
        if self._context is None:
            self._context = Context()
        socket = self._context.socket(REQ)
        try:
            socket.setsockopt(LINGER, 0)
            socket.connect(make_zmq_path("tcp", peer.host, peer.port))
            await socket.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
            answer = await socket.recv_multipart()
        except ZMQError as error:
            raise OSError(str(error)) from error
        finally:
            socket.close()
        try:
            payload = msgspec.msgpack.decode(answer[0], type=NixlHandshakePayload)
            metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
        except msgspec.MsgspecError as error:
            raise ValueError("the side channel's answer is of another version") from error
        if self.compatibility_hash is not None and payload.compatibility_hash != self.compatibility_hash:
            return False
        return str(metadata.engine_id) == peer.engine_id

    async def close(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=0)
