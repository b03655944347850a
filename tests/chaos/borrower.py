"""The borrower process of a chaos run: asks a real registry for every turn, and READs what it is told from any lender.

`python -m tests.chaos.borrower SETTINGS`, with ChaosBorrowerSettings as JSON. The product's borrower decides and the
connector's thread asks; `tests.nixl.loads` reads, proves and judges every word that is used. Which prompts there are,
lenders say; of what they say about leases, nothing is used but the name.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import Final

from kvlease.connector.borrower import Ask, ComputeReason, Read
from kvlease.connector.link import Answer
from kvlease.registry.values import DEFAULT_TENANT

from tests.chaos.lender import open_link
from tests.chaos.messages import ChaosBorrowerSettings, Turns, to_line
from tests.nixl import content, faults
from tests.nixl.agent import die_with_parent
from tests.nixl.borrower import OWN_VARIANT, TERMS
from tests.nixl.content import BLOCK_TOKENS, Prompt
from tests.nixl.link import Link
from tests.nixl.loads import Loads, now_ms
from tests.nixl.messages import BorrowerSettings, Offer

OFFERS_AT_ONCE: Final = 4
OFFERS_KEPT: Final = 16
REPORT_EVERY_S: Final = 0.25
IDLE_S: Final = 0.002
RESOLVE_WAIT_MS: Final = 500
RECONNECT_S: Final = 0.25
FOREVER_S: Final = 1e9


class ChaosBorrower:
    """All turns of one process, on one thread; the connector's thread asks beside it."""

    def __init__(self, settings: ChaosBorrowerSettings) -> None:
        self._settings = settings
        self._random = random.Random(settings.seed)
        reads = BorrowerSettings(
            socket="",
            seed=settings.seed,
            reads=0,
            fault=settings.fault,
            block_bytes=settings.block_bytes,
            read_limit_ms=settings.read_limit_ms,
            linger_ms=settings.linger_ms,
        )
        self._loads = Loads(reads, self._random)
        self._links = [Link(path, self._loads.agent, FOREVER_S) for path in settings.sockets]
        self._retry_at = [0.0 for _ in self._links]
        self._registry = open_link(settings.registry, "chaos-borrower", RESOLVE_WAIT_MS)
        self._borrower = faults.borrower(settings.fault, TERMS)
        self._offers: deque[Offer] = deque(maxlen=OFFERS_KEPT)
        self._asking: dict[str, Prompt] = {}
        self._number = 0
        self._turns = Turns(pid=os.getpid())
        self._idle = threading.Event()
        """Never set: under a faked wall clock `time.sleep` fails."""

    def run(self) -> None:
        self._registry.start()
        turn_at = report_at = time.monotonic()
        while True:
            moved = self._loads.step()
            self._keep_links()
            while self._registry.answers:
                self._answered(self._registry.answers.popleft())
                moved = True
            now_s = time.monotonic()
            if now_s >= turn_at and self._offers and len(self._loads) < self._settings.in_flight:
                turn_at = now_s + self._random.uniform(0, 2 * self._settings.turn_ms / 1_000)
                self._ask(self._random.choice(self._offers))
            if now_s >= report_at:
                report_at = now_s + REPORT_EVERY_S
                self._turns.counts = asdict(self._loads.tally())
                print(to_line(self._turns), flush=True)
            if not moved:
                self._idle.wait(IDLE_S)

    def _keep_links(self) -> None:
        """Handshakes with lenders that have come back, once nothing is being read from what was there before."""
        for number, link in enumerate(self._links):
            if not link.up and time.monotonic() >= self._retry_at[number] and not self._loads.using(link):
                self._retry_at[number] = time.monotonic() + RECONNECT_S
                link.connect()
            link.ask(OFFERS_AT_ONCE)
            self._offers.extend(link.answers(0))

    def _ask(self, offer: Offer) -> None:
        """A turn of the conversation that the offer is of, perhaps edited, begins."""
        self._number += 1
        self._turns.turns += 1
        request_id = f"r{self._number}"
        prompt = offer.prompt
        if self._random.random() < 0.3:
            common = prompt.fork if prompt.variant else prompt.blocks
            prompt = prompt.forked(self._random.randrange(common), OWN_VARIANT + self._number)
        prompt = prompt.longer(2)
        ask = Ask(
            request_id=request_id,
            tenant=DEFAULT_TENANT,
            conversation=None,
            lease_id=offer.lease_id if self._random.random() < 0.5 else None,
            chain=content.digest_chain(prompt),
            prompt_tokens=prompt.blocks * BLOCK_TOKENS,
        )
        question = self._borrower.begin(ask, now_ms())
        if question is None:
            self._compute(request_id, ComputeReason.SHORT_PROMPT)
            return
        self._asking[request_id] = prompt
        self._registry.resolve(request_id, question)

    def _answered(self, answer: Answer) -> None:
        request_id, prompt = answer.request_id, self._asking.pop(answer.request_id)
        self._borrower.answered(request_id, answer.found)
        self._borrower.probed(request_id, reachable=answer.reachable)
        skipped = self._random.randrange(3) if self._random.random() < 0.3 else 0
        decision = self._borrower.decide(request_id, skipped * BLOCK_TOKENS, now_ms())
        self._borrower.forget(request_id)
        if not isinstance(decision, Read):
            self._compute(request_id, getattr(decision, "reason", ComputeReason.RESOLVE_TIMEOUT))
            return
        link = self._link_to(decision.content.engine_id)
        if link is None or link.agent_name is None:
            self._compute(request_id, ComputeReason.LENDER_UNREACHABLE)
        elif not self._loads.begin(request_id, decision, prompt, link, skipped):
            self._compute(request_id, ComputeReason.LIMIT)

    def _link_to(self, engine_id: str) -> Link | None:
        """Lenders are named d0, d1, ... in the order of their sockets."""
        number = int(engine_id.removeprefix("d"))
        return self._links[number] if number < len(self._links) else None

    def _compute(self, request_id: str, reason: ComputeReason) -> None:
        self._turns.computed[reason] = self._turns.computed.get(reason, 0) + 1


def main() -> None:
    die_with_parent()
    ChaosBorrower(ChaosBorrowerSettings(**json.loads(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
