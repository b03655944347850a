"""A lender's session against a hand-written registry: what it says, in which order, and how it comes back.

With the real registry: `test_client_registry.py`.
"""

from __future__ import annotations

import asyncio

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.registry.errors import (
    DeadlineExceeded,
    EngineIdInUse,
    InvalidRequest,
    RegistryUnavailable,
    SessionGap,
    SessionReplaced,
)
from kvlease.registry.lender_session import LenderSession, SessionLimits
from kvlease.registry.values import (
    MAX_MESSAGE_BYTES,
    EndReason,
    LeaseId,
    PublishResult,
    PublishStatus,
    RenewStatus,
)
from kvlease.registry.wire import encode_ended, encode_engine
from kvlease.v1 import registry_pb2 as pb

from tests.integration.lending_session import (
    ENGINE,
    QUICK,
    SELDOM_MS,
    Heard,
    SteppedClock,
    acknowledge,
    greet,
    lending,
    next_but_heartbeats,
    open_session,
    publication,
)
from tests.integration.registry_peer import peer, soon, until
from tests.ports import free_port


async def test_hello_snapshot_heartbeats_in_numbered_order() -> None:
    async with peer() as registry, lending(registry.endpoint) as lender:
        stream = await registry.session()
        lender.session.pool(free_blocks=7, total_blocks=9)
        hello, presented = await greet(stream, interval_ms=1)
        assert hello == pb.Hello(engine=encode_engine(ENGINE), now_lender_ms=1_000)
        assert presented == []
        await lender.hears("connected")
        assert lender.session.connected
        lender.clock.at_ms = 5_000
        seqs = []
        while True:
            message = await stream.next()
            assert message.WhichOneof("message") == "heartbeat"
            seqs.append(message.seq)
            assert (message.heartbeat.free_blocks, message.heartbeat.total_blocks) == (7, 9)
            if message.heartbeat.now_lender_ms == 5_000:
                break
        assert seqs == list(range(3, 3 + len(seqs))), "numbers go on without a gap"


async def test_publishes_and_ends_are_joined_in_order_and_results_reported() -> None:
    async with peer() as registry, lending(registry.endpoint) as lender:
        stream = await open_session(registry)
        await lender.hears("connected")
        for name in "abc":
            lender.session.publish(publication(name))
        lender.session.renewed(LeaseId("b"), 500_000)
        lender.session.ended(LeaseId("a"), EndReason.PRESSURE)
        published = await next_but_heartbeats(stream)
        assert [item.lease_id for item in published.publish.leases] == ["a", "b", "c"]
        renewed = await next_but_heartbeats(stream)
        assert renewed.renewed.renewed[0] == pb.Renewed(lease_id="b", deadline_lender_ms=500_000)
        ended = await next_but_heartbeats(stream)
        assert ended.ended.ended[0] == pb.Ended(lease_id="a", reason=pb.END_REASON_PRESSURE)
        await acknowledge(
            stream,
            published.seq,
            PublishResult(lease_id=LeaseId("a"), status=PublishStatus.PUBLISHED),
            PublishResult(lease_id=LeaseId("b"), status=PublishStatus.QUOTA),
            PublishResult(lease_id=LeaseId("c"), status=PublishStatus.PUBLISHED, superseded=(LeaseId("x"),)),
        )
        await lender.hears("result", "c", PublishStatus.PUBLISHED)
        assert lender.heard.events == [
            ("connected",),
            ("result", "b", PublishStatus.QUOTA),
            ("result", "c", PublishStatus.PUBLISHED),
        ]
        assert lender.session.leases == 1, "a was ended here, b was refused"


async def test_a_new_stream_presents_what_is_held_now() -> None:
    async with peer() as registry, lending(registry.endpoint) as lender:
        for name in ("kept", "gone", "lapsed", "renewed", "pushed"):
            lender.session.publish(publication(name))
        stream = await registry.session()
        _, presented = await greet(stream)
        assert [item.lease_id for item in presented] == ["kept", "gone", "lapsed", "renewed", "pushed"]
        push = pb.EndPush(leases=[encode_ended(LeaseId("pushed"), EndReason.RELEASED)])
        await stream.send(pb.SessionResponse(end=push))
        await lender.hears("end", "pushed", EndReason.RELEASED)
        stream.end(SessionGap("4 is missing"))
        await lender.hears("disconnected")
        lender.session.ended(LeaseId("gone"), EndReason.REUSED)
        lender.session.lapsed(LeaseId("lapsed"))
        lender.session.renewed(LeaseId("renewed"), 900_000)
        lender.session.publish(publication("new"))
        again = await registry.session()
        _, presented = await greet(again)
        states = {item.lease_id: (item.deadline_ms, item.lapsed) for item in presented}
        assert states == {
            "kept": (481_000, False),
            "lapsed": (481_000, True),
            "renewed": (900_000, False),
            "new": (481_000, False),
        }
        await until(lambda: lender.heard.events.count(("connected",)) == 2, "the second session")


async def test_a_large_snapshot_comes_in_parts_and_only_the_last_closes_it() -> None:
    async with peer() as registry, lending(registry.endpoint) as lender:
        for number in range(60):
            lender.session.publish(publication(f"l-{number}", body=bytes(150 * 1024)))
        stream = await registry.session()
        await stream.next()
        await stream.send(pb.SessionResponse(welcome=pb.Welcome(heartbeat_interval_ms=SELDOM_MS)))
        lasts: list[bool] = []
        names: list[str] = []
        while not (lasts and lasts[-1]):
            message = await stream.next()
            assert message.ByteSize() <= MAX_MESSAGE_BYTES
            assert message.snapshot.leases
            lasts.append(message.snapshot.last)
            names += [item.lease_id for item in message.snapshot.leases]
            assert not lender.session.connected
            await acknowledge(stream, message.seq)
        assert len(lasts) > 1
        assert lasts == [False] * (len(lasts) - 1) + [True]
        assert names == [f"l-{number}" for number in range(60)]
        await lender.hears("connected")


async def test_pushes_reach_the_lender_once_and_are_answered() -> None:
    async with peer() as registry, lending(registry.endpoint) as lender:
        lender.session.publish(publication("a"))
        stream = await open_session(registry)
        push = pb.EndPush(leases=[encode_ended(LeaseId(name), EndReason.RELEASED) for name in ("a", "a", "unknown")])
        await stream.send(pb.SessionResponse(end=push))
        answer = await next_but_heartbeats(stream)
        assert [item.lease_id for item in answer.ended.ended] == ["unknown"], "a waits for its seal to be broken"
        await lender.hears("end", "a", EndReason.RELEASED)
        lender.session.ended(LeaseId("a"), EndReason.RELEASED)
        assert (await next_but_heartbeats(stream)).ended.ended[0].lease_id == "a"
        assert lender.heard.events.count(("end", "a", EndReason.RELEASED)) == 1


async def test_renewals_are_asked_answered_and_declined() -> None:
    async with peer() as registry, lending(registry.endpoint) as lender:
        lender.session.publish(publication("a"))
        stream = await open_session(registry)
        for name in ("a", "unknown"):
            await stream.send(pb.SessionResponse(renew=pb.RenewPush(lease_id=name, ttl_ms=60_000)))
        declined = await next_but_heartbeats(stream)
        assert declined.renew_refused == pb.RenewRefused(lease_id="unknown", status=pb.RENEW_STATUS_UNKNOWN)
        await lender.hears("renew", "a", 60_000)
        lender.session.refuse_renewal(LeaseId("a"), RenewStatus.PRESSURE)
        declined = await next_but_heartbeats(stream)
        assert declined.renew_refused == pb.RenewRefused(lease_id="a", status=pb.RENEW_STATUS_PRESSURE)


async def test_superseded_leases_end_at_the_lender() -> None:
    async with peer() as registry, lending(registry.endpoint) as lender:
        lender.session.publish(publication("old"))
        stream = await open_session(registry)
        lender.session.publish(publication("new"))
        published = await next_but_heartbeats(stream)
        result = PublishResult(
            lease_id=LeaseId("new"), status=PublishStatus.PUBLISHED, superseded=(LeaseId("old"), LeaseId("elsewhere"))
        )
        await acknowledge(stream, published.seq, result)
        await lender.hears("end", "old", EndReason.SUPERSEDED)
        assert lender.session.leases == 1
        assert ("end", "elsewhere", EndReason.SUPERSEDED) not in lender.heard.events


async def test_a_taken_engine_id_is_reported_and_asked_for_again() -> None:
    async with peer() as registry, lending(registry.endpoint) as lender:
        stream = await registry.session()
        await stream.next()
        stream.end(EngineIdInUse("d-1 is held by another incarnation", retry_after_ms=1))
        await lender.hears("refused", "ENGINE_ID_IN_USE", "d-1 is held by another incarnation")
        await open_session(registry)
        await lender.hears("connected")
        assert ("disconnected",) not in lender.heard.events, "it had not been connected"


async def test_a_replaced_session_is_reported_and_opened_again() -> None:
    """It may have been replaced by an older hello of its own, which reached the others late through another replica."""
    async with peer() as registry, lending(registry.endpoint) as lender:
        stream = await open_session(registry)
        await lender.hears("connected")
        stream.end(SessionReplaced("the lender has a newer session at another replica"))
        await lender.hears("refused", "SESSION_REPLACED", "the lender has a newer session at another replica")
        await open_session(registry)
        await lender.hears("connected")


async def test_a_registry_that_never_welcomes_is_left() -> None:
    limits = SessionLimits(backoff_first_ms=10, backoff_cap_ms=50, welcome_timeout_ms=50)
    async with peer() as registry, lending(registry.endpoint, limits) as lender:
        mute = await registry.session()
        await soon(mute.closed.wait(), "the client to give up")
        await registry.session()
        assert lender.heard.events == []


async def test_a_registry_that_falls_silent_is_left() -> None:
    limits = SessionLimits(backoff_first_ms=10, backoff_cap_ms=50, silence_ms=1_500)
    async with peer() as registry, lending(registry.endpoint, limits) as lender:
        stream = await registry.session()
        await greet(stream, interval_ms=10)
        await lender.hears("disconnected")
        await open_session(registry)


async def test_a_registry_that_keeps_acknowledging_is_kept() -> None:
    limits = SessionLimits(backoff_first_ms=10, backoff_cap_ms=50, silence_ms=1_500)
    async with peer() as registry, lending(registry.endpoint, limits) as lender:
        stream = await registry.session()
        await greet(stream, interval_ms=100)
        for _ in range(20):  # longer than the silence that would end it
            message = await stream.next()
            await acknowledge(stream, message.seq)
        assert ("disconnected",) not in lender.heard.events


async def test_a_registry_that_goes_away_is_found_again() -> None:
    port = free_port()
    async with lending(f"127.0.0.1:{port}") as lender:
        lender.session.publish(publication("a"))
        for _ in range(2):
            lender.heard.events.clear()
            async with peer(port) as registry:
                _, presented = await greet(await registry.session())
                assert [item.lease_id for item in presented] == ["a"]
                await lender.hears("connected")
            await lender.hears("disconnected")


async def test_reconnect_moves_the_session() -> None:
    async with peer() as registry, lending(registry.endpoint) as lender:
        stream = await open_session(registry)
        await lender.hears("connected")
        await stream.send(pb.SessionResponse(reconnect=pb.Reconnect()))
        await soon(stream.closed.wait(), "the old stream to close")
        await open_session(registry)


async def test_goodbye_says_the_rest_first() -> None:
    async with peer() as registry, lending(registry.endpoint) as lender:
        lender.session.publish(publication("a"))
        stream = await open_session(registry)
        await lender.hears("connected")
        lender.session.ended(LeaseId("a"), EndReason.DRAINED)
        leaving = asyncio.create_task(lender.session.goodbye())
        assert (await next_but_heartbeats(stream)).ended.ended[0].lease_id == "a"
        goodbye = await next_but_heartbeats(stream)
        assert goodbye.WhichOneof("message") == "goodbye"
        assert not leaving.done(), "not before the registry has it"
        await acknowledge(stream, goodbye.seq)
        await soon(leaving, "the goodbye")
        await soon(lender.running, "run to return")


async def test_goodbye_without_a_registry_ends_at_once() -> None:
    limits = SessionLimits(goodbye_timeout_ms=60_000)
    tried = asyncio.Event()

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tried.set()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as no_registry:
        host, port = no_registry.sockets[0].getsockname()
        async with lending(f"{host}:{port}", limits) as lender:
            await soon(tried.wait(), "an attempt to connect")
            await soon(lender.session.goodbye(), "the goodbye")
            await soon(lender.running, "run to return")


async def test_goodbye_to_a_registry_that_does_not_answer_is_bounded() -> None:
    async with peer() as registry, lending(registry.endpoint, SessionLimits(goodbye_timeout_ms=30)) as lender:
        await open_session(registry)
        await lender.hears("connected")
        with pytest.raises(DeadlineExceeded):
            await soon(lender.session.goodbye(), "the goodbye's bound")


async def test_a_lease_that_breaks_a_limit_is_refused_at_the_door() -> None:
    async with peer() as registry, lending(registry.endpoint) as lender:
        await open_session(registry)
        with pytest.raises(InvalidRequest):
            lender.session.publish(publication("a", body=bytes(256 * 1024)))
        assert lender.session.leases == 0


async def test_a_session_ends_with_its_client() -> None:
    async with peer() as registry:
        async with RegistryClient(registry.endpoint) as client:
            session = LenderSession(client, ENGINE, clock=SteppedClock(0), listener=Heard(), limits=QUICK)
            running = asyncio.create_task(session.run())
            await open_session(registry)
        with pytest.raises(RegistryUnavailable):
            await soon(running, "run to end")
        late = LenderSession(client, ENGINE, clock=SteppedClock(0), listener=Heard(), limits=QUICK)
        with pytest.raises(RegistryUnavailable):
            await late.run()
