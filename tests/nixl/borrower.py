"""The borrower process: reads leased blocks into its own memory, proves each READ, and judges every word it accepts.

`python -m tests.nixl.borrower SETTINGS`, with BorrowerSettings as JSON; started by `pair.py`; reports Counts as JSON
lines. The product's borrower decides what to read; `loads.py` reads and judges.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import deque
from typing import Final

from kvlease.connector.borrower import Ask, BorrowTerms, Read
from kvlease.registry.values import DEFAULT_TENANT, Hit, Incarnation, LeaseState

from tests.nixl import content, faults
from tests.nixl.agent import die_with_parent
from tests.nixl.content import BLOCK_TOKENS, STRIDE_TOKENS
from tests.nixl.link import Link
from tests.nixl.loads import Loads, now_ms
from tests.nixl.messages import ENGINE, BorrowerSettings, Offer, to_line

OFFERS_AT_ONCE: Final = 6
REPORT_EVERY_S: Final = 0.1
CONNECT_EVERY_S: Final = 0.02
IDLE_WAIT_S: Final = 0.0001
RETRY_AFTER_S: Final = 0.05
"""Without an answer for so long, a borrower with nothing to do tries its last records again."""
DRAIN_S: Final = 10.0
OWN_VARIANT: Final = 1 << 40
TERMS: Final = BorrowTerms(
    fingerprint_hash=content.FINGERPRINT.hash,
    block_tokens=BLOCK_TOKENS,
    stride_tokens=STRIDE_TOKENS,
    threshold_tokens=0,
)


class BorrowerProcess:
    """One borrower of one lender."""

    def __init__(self, settings: BorrowerSettings) -> None:
        self._settings = settings
        self._random = random.Random(settings.seed)
        self._loads = Loads(settings, self._random)
        self._counts = self._loads.counts
        self._link = Link(settings.socket, self._loads.agent, settings.patience_s)
        self._borrower = faults.borrower(settings.fault, TERMS)
        self._offers: deque[Offer] = deque()
        self._remembered: deque[Offer] = deque(maxlen=OFFERS_AT_ONCE)
        self._number = 0

    def run(self) -> None:
        report_at = retry_at = time.monotonic()
        while self._counts.reads < self._settings.reads or len(self._loads):
            moved = self._loads.step()
            if not self._loads and not self._link.up and self._reconnect():
                self._counts.incarnations = self._link.incarnations
                self._offers.extendleft(self._remembered)
            if self._counts.reads < self._settings.reads:
                if len(self._offers) < OFFERS_AT_ONCE // 2:
                    self._link.ask(OFFERS_AT_ONCE)
                self._offers.extend(self._link.answers(0 if moved or self._offers else IDLE_WAIT_S))
                if self._offers or self._loads:
                    retry_at = time.monotonic() + RETRY_AFTER_S
                elif time.monotonic() >= retry_at:
                    self._offers.extend(self._remembered)
                while self._offers and self._link.up and len(self._loads) < self._settings.in_flight:
                    if not self._begin(self._offers.popleft()):
                        break
            if not moved and self._loads:
                time.sleep(IDLE_WAIT_S)
            if time.monotonic() >= report_at:
                report_at += REPORT_EVERY_S
                self._report()
        until = time.monotonic() + DRAIN_S
        while self._loads.late and time.monotonic() < until:
            self._loads.look_after_late()
            time.sleep(IDLE_WAIT_S)
        self._loads.finish()
        self._counts.done = True
        self._report()

    def _reconnect(self) -> bool:
        time.sleep(CONNECT_EVERY_S)
        return self._link.connect()

    def _report(self) -> None:
        print(to_line(self._loads.tally()), flush=True)

    def _begin(self, offer: Offer) -> bool:
        """Decides on an offer as the scheduler's side does; False if there is no room for it now."""
        self._number += 1
        request_id = f"r{self._number}"
        prompt = offer.prompt
        if self._random.random() < 0.4:
            common = prompt.fork if prompt.variant else prompt.blocks
            prompt = prompt.forked(self._random.randrange(common), OWN_VARIANT + self._number)
        prompt = prompt.longer(2)
        question = self._borrower.begin(
            Ask(
                request_id=request_id,
                tenant=DEFAULT_TENANT,
                conversation=None,
                lease_id=offer.lease_id,
                chain=content.digest_chain(prompt),
                prompt_tokens=prompt.blocks * BLOCK_TOKENS,
            ),
            now_ms(),
        )
        hit = Hit(
            lease_id=offer.lease_id,
            engine_id=ENGINE,
            incarnation=Incarnation(offer.incarnation),
            conversation=None,
            record=offer.record,
            matched_strides=0,
            state=LeaseState.LIVE,
            remaining_ms=0,
        )
        if question is not None:
            self._borrower.answered(request_id, question.judge(hit))
            self._borrower.probed(request_id, reachable=True)
        skipped = self._random.randrange(3) if self._random.random() < 0.3 else 0
        decision = self._borrower.decide(request_id, skipped * BLOCK_TOKENS, now_ms())
        self._borrower.forget(request_id)
        if not isinstance(decision, Read) or self._link.agent_name is None:
            self._counts.not_asked += 1
            return True
        if not self._loads.begin(request_id, decision, prompt, self._link, skipped):
            return False
        self._remembered.append(offer)
        return True


def main() -> None:
    die_with_parent()
    BorrowerProcess(BorrowerSettings(**json.loads(sys.argv[1]))).run()
    # All is said. Taking an agent down, NIXL now and then crashes over TCP on a busy machine.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
