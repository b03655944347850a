"""The yardstick: a grpc.aio server that does nothing with what it gets. `python -m tests.bench.echo_server`.

Two services. `Bytes`: no protobuf at all; a request begins with the size of the answer wanted, little-endian.
`Messages`: requests and answers of the registry's shape are parsed and built, the answers being those it was told
beforehand, by size of the digest chain. What a registry costs beyond the first is its whole work, beyond the second
its decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio
import uvloop
from kvlease.registry.client_channel import SERVER_OPTIONS
from kvlease.registry.values import DIGEST_BYTES
from kvlease.v1 import registry_pb2 as pb

from tests.bench.payloads import NEXT_TURN_STRIDES
from tests.bench.served import say, until_left

SIZE_BYTES: Final = 4
BYTES_SERVICE: Final = "bench.Bytes"
MESSAGES_SERVICE: Final = "bench.Messages"

BytesContext = grpc.aio.ServicerContext[bytes, bytes]
Context = grpc.aio.ServicerContext[object, object]


class BytesEcho:
    """Answers of the size asked for; each size is allocated once."""

    def __init__(self) -> None:
        self._answers: dict[bytes, bytes] = {}

    async def unary(self, request: bytes, context: BytesContext) -> bytes:
        return self._answer(request)

    async def stream(self, requests: AsyncIterator[bytes], context: BytesContext) -> AsyncIterator[bytes]:
        async for request in requests:
            yield self._answer(request)

    def _answer(self, request: bytes) -> bytes:
        size = request[:SIZE_BYTES]
        answer = self._answers.get(size)
        if answer is None:
            answer = self._answers[size] = bytes(int.from_bytes(size, "little"))
        return answer


class MessagesEcho:
    """Answers of the registry's shape, without a registry behind them."""

    def __init__(self) -> None:
        self._hits: dict[int, pb.Hit] = {}

    async def learn(self, request: pb.ResolveResponse, context: Context) -> pb.ResolveResponse:
        """From now on, the answer to a question with NEXT_TURN_STRIDES more digests than this hit has."""
        self._hits[len(request.hit.record.digests) + NEXT_TURN_STRIDES * DIGEST_BYTES] = request.hit
        return request

    async def unary(self, request: pb.ResolveRequest, context: Context) -> pb.ResolveResponse:
        response = pb.ResolveResponse()
        self._fill(request, response)
        return response

    async def stream(
        self, requests: AsyncIterator[pb.ResolveStreamRequest], context: Context
    ) -> AsyncIterator[pb.ResolveStreamResponse]:
        async for message in requests:
            response = pb.ResolveStreamResponse()
            for item in message.requests:
                answer = response.answers.add(correlation_id=item.correlation_id)
                self._fill(item.request, answer.response)
            yield response

    async def publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        status = pb.PUBLISH_STATUS_PUBLISHED
        results = [pb.PublishResult(lease_id=item.lease_id, status=status) for item in request.leases]
        return pb.PublishResponse(results=results)

    def _fill(self, request: pb.ResolveRequest, response: pb.ResolveResponse) -> None:
        known = self._hits[len(request.digests)]
        hit = response.hit
        hit.lease_id = known.lease_id
        hit.engine_id = known.engine_id
        hit.incarnation = known.incarnation
        hit.record.digests = known.record.digests
        hit.record.body = known.record.body
        hit.matched_strides = known.matched_strides
        hit.state = known.state
        hit.remaining_ms = known.remaining_ms
        hit.conversation = known.conversation


def handlers() -> tuple[grpc.GenericRpcHandler, ...]:
    plain, messages = BytesEcho(), MessagesEcho()
    return (
        grpc.method_handlers_generic_handler(
            BYTES_SERVICE,
            {
                "Unary": grpc.unary_unary_rpc_method_handler(plain.unary),
                "Stream": grpc.stream_stream_rpc_method_handler(plain.stream),
            },
        ),
        grpc.method_handlers_generic_handler(
            MESSAGES_SERVICE,
            {
                "Learn": grpc.unary_unary_rpc_method_handler(
                    messages.learn, pb.ResolveResponse.FromString, pb.ResolveResponse.SerializeToString
                ),
                "Unary": grpc.unary_unary_rpc_method_handler(
                    messages.unary, pb.ResolveRequest.FromString, pb.ResolveResponse.SerializeToString
                ),
                "Stream": grpc.stream_stream_rpc_method_handler(
                    messages.stream, pb.ResolveStreamRequest.FromString, pb.ResolveStreamResponse.SerializeToString
                ),
                "Publish": grpc.unary_unary_rpc_method_handler(
                    messages.publish, pb.PublishRequest.FromString, pb.PublishResponse.SerializeToString
                ),
            },
        ),
    )


async def serve() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers(handlers())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say({"port": port})
    try:
        await until_left()
    finally:
        await server.stop(0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
