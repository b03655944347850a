"""A slice of the fuzz run: every rpc, a couple of thousand messages, on a real registry.

Memory and latency are not judged here; `python -m tests.fuzz --check` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio
import pytest

from tests.fuzz.attack import Attacker, Verdicts
from tests.fuzz.campaign import Result, run
from tests.fuzz.messages import RPCS, Maker

MESSAGES = 2_000


async def test_whatever_is_sent_gets_a_typed_answer() -> None:
    result = await run(MESSAGES, seed=7)
    assert not result.verdicts.faults, "\n".join(result.verdicts.faults)
    assert result.verdicts.messages >= MESSAGES
    assert {rpc for rpc, _ in result.verdicts.outcomes} == set(RPCS)
    reasons = {reason for _, reason in result.verdicts.outcomes}
    assert {"OK", "INVALID_ARGUMENT", "SESSION_GAP"} <= reasons, "good and bad messages alike get that far"


def test_memory_that_is_kept_has_grown_and_memory_that_comes_and_goes_has_not() -> None:
    def grown(*memory_bytes: int) -> int:
        return Result(
            verdicts=Verdicts(),
            memory_bytes=memory_bytes,
            alone_p99_ms=1.0,
            busy_p99_ms=1.0,
            beside_p99_ms=1.0,
            honest_resolves=1,
        ).grown_bytes

    assert grown(10, 50, 30, 90, 35, 30, 200, 30) == 0
    assert grown(*range(10, 50, 5)) == 20


@pytest.mark.parametrize("rpc", RPCS)
def test_well_formed_messages_are_messages(rpc: str) -> None:
    maker = Maker(1, well_formed=True)
    for _ in range(100):
        RPCS[rpc].FromString(maker.make(rpc))


@pytest.mark.parametrize("rpc", RPCS)
def test_equal_seeds_make_equal_messages(rpc: str) -> None:
    first, second, other = ([maker.make(rpc) for _ in range(50)] for maker in (Maker(1), Maker(1), Maker(2)))
    assert first == second
    assert first != other


async def test_an_answer_without_a_reason_is_a_fault() -> None:
    """Judged by a server that fails as servers do when nobody has thought of it."""

    async def fail(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        raise ValueError(request)

    handler = grpc.method_handlers_generic_handler(
        "kvlease.v1.Registry", {"Resolve": grpc.unary_unary_rpc_method_handler(fail)}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    verdicts = Verdicts()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await Attacker(channel, Maker(1), verdicts).call("Resolve")
    finally:
        await server.stop(0)
    faults: Sequence[str] = verdicts.faults
    assert len(faults) == 1
    assert "without a reason" in faults[0]
