"""The connector's thread when it cannot work: the engine's thread notices nothing and nothing piles up for it.

The link is the product's, its registry unreachable or its credentials unreadable; the side channel, which belongs to an
engine, says yes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvlease.connector.borrower import Ask, BorrowTerms, ComputeReason, Question
from kvlease.connector.digests import Chain
from kvlease.connector.journal import Journal, Note
from kvlease.connector.link import MAX_RESOLVES_IN_FLIGHT, Link
from kvlease.connector.probe import LenderProbe, Peer
from kvlease.connector.settings import ConnectorSettings
from kvlease.registry.clock import SystemClock
from kvlease.registry.telemetry import configure_tracing
from kvlease.registry.values import DEFAULT_TENANT, ConversationId

QUESTION = Question(
    ask=Ask(
        request_id="r",
        tenant=DEFAULT_TENANT,
        conversation=ConversationId("c"),
        lease_id=None,
        chain=Chain.of(b""),
        prompt_tokens=1,
    ),
    terms=BorrowTerms(fingerprint_hash=b"", block_tokens=16, stride_tokens=64),
)
NOTE = Note(name="read", start_ns=1, end_ns=2)
WAIT_S = 10.0


class OpenSideChannel:
    async def answers_for(self, peer: Peer) -> bool:
        return True

    async def close(self) -> None:
        return None


@contextmanager
def link(**given: object) -> Iterator[Link]:
    told: Mapping[str, object] = {"registry": "127.0.0.1:1", "resolve_wait_ms": 5_000, **given}
    settings, clock = ConnectorSettings.load(told), SystemClock()
    opened = Link(
        settings,
        clock,
        Journal(configure_tracing("test")),
        LenderProbe(OpenSideChannel(), clock, settings.probe_ms),
    )
    try:
        yield opened
    finally:
        opened.close()


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, "nothing happened in time"
        time.sleep(0.001)


def thread_of(opened: Link) -> threading.Thread:
    return opened._thread


def test_nothing_is_kept_for_a_thread_that_has_ended(tmp_path: Path) -> None:
    """Credentials that can be read no more end it at once; the engine goes on for weeks."""
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length-0123456789\n")
    token.chmod(0o600)
    with link(token_file=str(token)) as opened:
        token.unlink()
        opened.start()
        until(lambda: not thread_of(opened).is_alive())
        for number in range(100):
            opened.note(NOTE)
            opened.call(opened.with_session, lambda session: session.pool(1, 2))
            opened.resolve(f"request-{number}", QUESTION)
        assert not opened._work
        assert [answer.found for answer in opened.answers] == [ComputeReason.REGISTRY_UNAVAILABLE] * 100


def test_resolves_that_are_over_make_room_for_others() -> None:
    """More than may be in flight, one batch after the other: each is answered, and at rest none is in flight."""
    with link() as opened:
        opened.start()
        asked = 0
        while asked <= MAX_RESOLVES_IN_FLIGHT + 100:
            for _ in range(500):
                opened.resolve(f"request-{asked}", QUESTION)
                asked += 1
            until(lambda: len(opened.answers) == 500)
            reasons = {answer.found for answer in opened.answers}
            assert reasons == {ComputeReason.REGISTRY_UNAVAILABLE}
            opened.answers.clear()
        until(lambda: opened._asked == opened._answered)


def test_too_many_resolves_in_flight_are_refused_at_once() -> None:
    with link() as opened:
        for number in range(MAX_RESOLVES_IN_FLIGHT + 1):
            opened.resolve(f"request-{number}", QUESTION)
        assert [answer.found for answer in opened.answers] == [ComputeReason.OVERLOADED]
