"""A lender's session on the wire: its messages in order to the service, the outbox back to the lender.

Edge code without decisions: who may have a session, what a gap means and what a message does is the table's business.
Tasks of each session: the reader and the writer of the stream, one that acknowledges, and one for each message that
waits for the store. The end of reader or writer ends all, and then the service is told that the session is gone.
Invariant: messages are applied in order, and acknowledged in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, assert_never

from kvlease.registry.errors import InvalidRequest, KvleaseError, SessionGap
from kvlease.registry.outbox import Ack, Ends, GoElsewhere, Message, Outbox, Renewal
from kvlease.registry.service import RegistryService
from kvlease.registry.servicer_publish import Publications
from kvlease.registry.values import MAX_BATCH, PublishResult
from kvlease.registry.wire import (
    decode_ended,
    decode_engine,
    decode_renew_refused,
    decode_renewed,
    encode_ended,
    encode_publish_result,
)
from kvlease.registry.wire_checks import check_instant
from kvlease.v1 import registry_pb2 as pb

HELLO_WAIT_S: Final = 5.0
"""For the first message of a stream; whoever connects and says nothing does not keep a place."""

PIPELINED: Final = 64
"""Messages of one session that wait for the store at a time; further ones wait on the wire."""

UnderWay = asyncio.Queue[tuple[int, asyncio.Task[Sequence[PublishResult] | KvleaseError]] | None]
Requests = AsyncIterator[pb.SessionRequest]
Write = Callable[[pb.SessionResponse], Awaitable[None]]


async def serve_session(service: RegistryService, requests: Requests, write: Write, welcome: pb.Welcome) -> None:
    """One session, from hello to the end of the stream. Raises what closes it, as a KvleaseError."""
    outbox = await _greet(service, requests)
    fault: KvleaseError | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(_read(service, requests, outbox), name="kvlease session reader")
            try:
                await write(pb.SessionResponse(welcome=welcome))
                while (messages := await outbox.take(max_ends=MAX_BATCH)) is not None:
                    for message in messages:
                        await write(_encode(message))
            except KvleaseError as error:
                fault = error
            reader.cancel()
    finally:
        service.close_session(outbox.session)
    if fault is not None:
        raise fault


async def _greet(service: RegistryService, requests: Requests) -> Outbox:
    try:
        async with asyncio.timeout(HELLO_WAIT_S):
            first = await anext(requests, None)
    except TimeoutError as error:
        raise InvalidRequest("a session starts with a hello", field="message") from error
    if first is None or first.WhichOneof("message") != "hello":
        raise InvalidRequest("a session starts with a hello", field="message")
    if first.seq != 1:
        raise SessionGap(f"message 1 expected, {first.seq} received")
    now_lender_ms = check_instant("now_lender_ms", first.hello.now_lender_ms)
    return await service.open_session(decode_engine(first.hello.engine), now_lender_ms)


async def _read(service: RegistryService, requests: Requests, outbox: Outbox) -> None:
    """Apply messages in order until the lender closes. What is wrong with one closes the outbox, and so the stream.

    A message does not wait for the store to have the one before it, so that many share a transaction when it is slow.
    """
    under_way: UnderWay = asyncio.Queue(PIPELINED)
    fault: KvleaseError | None = None
    async with asyncio.TaskGroup() as tasks:
        acknowledging = tasks.create_task(_acknowledge(outbox, under_way), name="kvlease session acks")
        try:
            async for request in requests:
                if acknowledging.done():
                    break
                service.receive(outbox.session, request.seq)
                # Tasks start in the order in which they are made, and change the table before they first wait.
                await under_way.put((request.seq, tasks.create_task(_attempt(service, outbox, request))))
                if request.WhichOneof("message") == "goodbye":
                    break
        except KvleaseError as error:
            fault = error
        if not acknowledging.done():
            await under_way.put(None)
    fault = acknowledging.result() or fault
    if fault is None:
        outbox.finish()
    else:
        outbox.close(fault)


async def _acknowledge(outbox: Outbox, under_way: UnderWay) -> KvleaseError | None:
    """Acknowledge in order what is done; the first error, after which nothing is."""
    while (message := await under_way.get()) is not None:
        seq, attempt = message
        outcome = await attempt
        if isinstance(outcome, KvleaseError):
            outbox.close(outcome)
            return outcome
        outbox.ack(seq, outcome)
    return None


async def _attempt(
    service: RegistryService, outbox: Outbox, request: pb.SessionRequest
) -> Sequence[PublishResult] | KvleaseError:
    try:
        return await _apply(service, outbox, request)
    except KvleaseError as error:
        return error


async def _apply(service: RegistryService, outbox: Outbox, request: pb.SessionRequest) -> Sequence[PublishResult]:
    session = outbox.session
    match request.WhichOneof("message"):
        case "heartbeat":
            beat = request.heartbeat
            service.heartbeat(
                session,
                now_lender_ms=check_instant("now_lender_ms", beat.now_lender_ms),
                free_blocks=beat.free_blocks,
                total_blocks=beat.total_blocks,
            )
        case "publish":
            items = Publications(request.publish.leases)
            return items.results(await service.publish_in(session, items.good))
        case "snapshot":
            items = Publications(request.snapshot.leases)
            return items.results(await service.snapshot(session, items.good, last=request.snapshot.last))
        case "ended":
            await service.ended(session, [decode_ended(x) for x in request.ended.ended])
        case "renewed":
            await service.renewed(session, [decode_renewed(x) for x in request.renewed.renewed])
        case "renew_refused":
            await service.refuse_renewal(session, *decode_renew_refused(request.renew_refused))
        case "goodbye":
            await service.goodbye(session)
        case "hello":
            raise InvalidRequest("a session has one hello", field="message")
        case None:
            pass  # a message of a newer lender: acknowledged, so that the numbers go on
    return ()


def _encode(message: Message) -> pb.SessionResponse:
    match message:
        case Ack():
            results = [encode_publish_result(x) for x in message.results]
            return pb.SessionResponse(ack=pb.Ack(seq=message.seq, results=results))
        case Ends():
            return pb.SessionResponse(end=pb.EndPush(leases=[encode_ended(*x) for x in message.leases]))
        case Renewal():
            return pb.SessionResponse(renew=pb.RenewPush(lease_id=message.lease_id, ttl_ms=message.ttl_ms))
        case GoElsewhere():
            return pb.SessionResponse(reconnect=pb.Reconnect())
        case _:
            assert_never(message)
