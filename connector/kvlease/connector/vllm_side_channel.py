"""Asks an engine's NIXL side channel for its handshake payload: vLLM's protocol, with a limit of our own.

Guarantee: no more than one question per peer is open (the probe sees to that), and none outlives its limit.
"""

from __future__ import annotations

import logging

import msgspec
from kvlease.connector.probe import MAX_PEERS, Peer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlHandshakePayload,
)
from vllm.utils.network_utils import make_zmq_path
from zmq import LINGER, REQ, ZMQError
from zmq.asyncio import Context

log = logging.getLogger(__name__)


class VllmSideChannel:
    """Used on one event loop. `compatibility_hash` is this engine's own, once its workers have said it."""

    def __init__(self) -> None:
        self.compatibility_hash: str | None = None
        self._context: Context | None = None
        self._told: set[Peer] = set()

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
            if self.compatibility_hash is not None and payload.compatibility_hash != self.compatibility_hash:
                self._tell_incompatible(peer)
                return False
            # Only now: of another version of vLLM it may have another form.
            metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
        except msgspec.MsgspecError as error:
            raise ValueError("the side channel's answer is of another version") from error
        return str(metadata.engine_id) == peer.engine_id

    def _tell_incompatible(self, peer: Peer) -> None:
        """Once for each incarnation: no fingerprint covers what the two differ in, so somebody has to look for it."""
        if peer in self._told:
            return
        if len(self._told) >= MAX_PEERS:
            self._told.clear()
        self._told.add(peer)
        log.warning(
            "kvlease: nothing is read from engine %s: NIXL calls the two engines incompatible (compatibility hash). "
            "Give both the same versions of vLLM and NIXL, model path, attention backend and draft model",
            peer.engine_id,
        )

    async def close(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=0)
