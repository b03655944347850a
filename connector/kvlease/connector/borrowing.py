"""Borrowing on the engine's thread: asks through the link, answers the scheduler, keeps late blocks out of use.

Knows the pool by its shape only, no vLLM import. Nothing here waits: a decision that is not there yet is `Wait`,
and the core bounds how often.

Invariant: every request that began here ends in exactly one count, borrowed or computed with a reason.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvlease.connector import digests
from kvlease.connector.borrower import Ask, Borrower, BorrowTerms, Compute, ComputeReason, Decision, Read
from kvlease.connector.instruments import Instruments
from kvlease.connector.journal import Note
from kvlease.connector.lending import Pool
from kvlease.connector.link import Link
from kvlease.connector.loads import LoadReport, WorkerReports
from kvlease.connector.quarantine import Quarantine
from kvlease.connector.request_params import RequestParams
from kvlease.registry.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedRequest:
    request_id: str
    params: RequestParams
    prompt_tokens: int
    block_hashes: Sequence[bytes]
    adapter: bytes = b""
    """Version of its LoRA adapter; empty: none."""


@dataclass(slots=True)
class _Story:
    """What the spans and counts of one request need."""

    params: RequestParams
    begun_ns: int
    prompt_tokens: int
    adapter: bytes
    resolved: bool = False
    read: Read | None = None
    read_ns: int = 0
    local_blocks: tuple[int, ...] = ()
    report: LoadReport | None = None
    """Of all ranks that have reported so far."""
    settled: bool = False
    counted: bool = False
    gone: bool = False


class Borrowing:
    """All borrows of one engine's scheduler."""

    def __init__(
        self,
        terms: BorrowTerms,
        *,
        hash_tokens: int,
        pool: Pool,
        link: Link,
        clock: Clock,
        instruments: Instruments,
    ) -> None:
        self._terms = terms
        self._hash_tokens = hash_tokens
        self._pool = pool
        self._link = link
        self._clock = clock
        self._instruments = instruments
        self._core = Borrower(terms)
        self._quarantine = Quarantine()
        self._stories: dict[str, _Story] = {}
        self._seeds = digests.Seeds(terms.fingerprint_hash)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._stories

    def rebase(self, fingerprint_hash: bytes) -> None:
        """Other weights from now on: what was found for the earlier ones is not read."""
        self._terms = replace(self._terms, fingerprint_hash=fingerprint_hash)
        self._seeds = digests.Seeds(fingerprint_hash)
        self._core.rebase(self._terms)

    def arrived(self, request: ArrivedRequest) -> None:
        """A prompt that may borrow: asks the registry at once, so that queueing hides the round trip."""
        self._take_answers()
        ask = Ask(
            request_id=request.request_id,
            tenant=request.params.tenant,
            conversation=request.params.conversation,
            lease_id=request.params.lease_id,
            chain=digests.chain(
                self._seeds.of(request.params.tenant, request.adapter),
                request.block_hashes,
                hash_tokens=self._hash_tokens,
                stride_tokens=self._terms.stride_tokens,
                tokens=request.prompt_tokens,
            ),
            prompt_tokens=request.prompt_tokens,
            threshold_tokens=request.params.recompute_threshold,
        )
        self._stories[request.request_id] = _Story(
            params=request.params,
            begun_ns=time.monotonic_ns(),
            prompt_tokens=request.prompt_tokens,
            adapter=request.adapter,
        )
        question = self._core.begin(ask, self._clock.now_ms())
        if question is not None:
            self._link.resolve(request.request_id, question)
        elif request.request_id not in self._core:
            self._count_miss(self._stories[request.request_id], ComputeReason.LIMIT)

    def refused(self, reason: ComputeReason) -> None:
        """A prompt that might borrow, but for what the engine knows of it before anybody is asked."""
        self._instruments.computed.labels(reason.value).inc()

    def confirm(self, request_id: str, adapter: bytes) -> None:
        """Nothing is read for a request that computes with another adapter version than it asked for."""
        if self._stories[request_id].adapter != adapter:
            self._core.failed(request_id, ComputeReason.ADAPTER_CHANGED)

    def decide(self, request_id: str, computed_tokens: int) -> Decision:
        """What to do for a request that is up for admission."""
        self._take_answers()
        decision = self._core.decide(request_id, computed_tokens, self._clock.now_ms())
        if isinstance(decision, Compute) and decision.first:
            self._count_miss(self._stories[request_id], decision.reason)
            self._note_resolve(request_id, decision.reason)
        return decision

    def committed(self, request_id: str, read: Read, local_blocks: tuple[int, ...]) -> None:
        """The engine has room: `local_blocks` are where the READ will write."""
        self._core.commit(request_id)
        story = self._stories[request_id]
        story.read, story.read_ns, story.local_blocks = read, time.monotonic_ns(), local_blocks
        self._note_resolve(request_id, None)

    def failed(self, request_id: str) -> None:
        """The READ that was decided on cannot be ordered: the request computes."""
        self._core.failed(request_id, ComputeReason.READ_FAILED)

    def reported(self, reports: WorkerReports) -> None:
        """Workers have finished loads, or late READs have landed."""
        for report in reports.loads:
            if report.late:
                story = self._stories.get(report.request_id)
                blocks = story.local_blocks if story else ()
                taken = self._quarantine.enter(report.request_id, report.rank, blocks)
                self._pool.touch([self._pool.blocks[block] for block in taken])
                self._instruments.reads_late.inc()
            if (story := self._stories.get(report.request_id)) is not None:
                story.report = report if story.report is None else story.report.merged(report)
        for request_id, rank in reports.landed_late:
            given = self._quarantine.leave(request_id, rank)
            self._pool.free_blocks([self._pool.blocks[block] for block in given])
        if reports.loads or reports.landed_late:
            self._instruments.quarantined.set(self._quarantine.blocks)

    def settled(self, request_id: str) -> None:
        """Every rank has reported the request's load: it counts now, once. Called after `reported`."""
        story = self._stories.get(request_id)
        if story is not None:
            story.settled = True
            if story.report is not None:
                self._count(story, story.report)
            if story.gone:
                del self._stories[request_id]

    def forget(self, request_id: str) -> None:
        """The request is gone from the engine; where its READ writes is remembered until that is over."""
        self._core.forget(request_id)
        story = self._stories.get(request_id)
        if story is None:
            return
        if story.read is not None and not story.settled:
            story.gone = True
            return
        del self._stories[request_id]
        self._count_miss(story, ComputeReason.ABORTED)

    def _take_answers(self) -> None:
        answers = self._link.answers
        while answers:
            item = answers.popleft()
            self._core.answered(item.request_id, item.found)
            self._core.probed(item.request_id, reachable=item.reachable)

    def _count_miss(self, story: _Story, reason: ComputeReason) -> None:
        """Counts how the borrow ended, unless it has ended already: one preempted after a good READ was borrowed."""
        if not story.counted:
            story.counted = True
            self._instruments.computed.labels(reason.value).inc()

    def _count(self, story: _Story, report: LoadReport) -> None:
        if report.reason is not None:
            self._core.read_failed(report.request_id, report.reason)
        read = story.read
        instruments = self._instruments
        instruments.read_seconds.observe(report.read_us / 1e6)
        instruments.read_bytes.inc(report.bytes_read)
        if report.reason is None:
            instruments.prove_seconds.observe(report.prove_us / 1e6)
            story.counted = True
            instruments.borrows.inc()
            instruments.reused_tokens.inc(read.load_tokens if read else 0)
        else:
            self._count_miss(story, report.reason)
            if report.reason is ComputeReason.READ_FAILED:
                instruments.reads_failed.inc()
            elif report.reason is not ComputeReason.READ_TIMEOUT:
                instruments.reads_refused.labels(report.reason.value).inc()
        if read is None or not self._link.traced:
            return
        outcome = "borrowed" if report.reason is None else report.reason.value
        about = (("kvlease.lease_id", read.lease_id), ("kvlease.conversation", story.params.conversation or ""))
        now_ns = time.monotonic_ns()
        proven_ns = now_ns - report.prove_us * 1_000
        self._link.note(
            Note(
                name="read",
                start_ns=min(story.read_ns, proven_ns),
                end_ns=proven_ns,
                traceparent=story.params.traceparent,
                lent_by=read.traceparent,
                attributes=(
                    *about,
                    ("kvlease.lender", read.content.engine_id),
                    ("kvlease.tokens_reused", read.load_tokens if report.reason is None else 0),
                    ("kvlease.bytes_read", report.bytes_read),
                    ("kvlease.outcome", outcome),
                ),
            )
        )
        if report.prove_us:
            self._link.note(
                Note(
                    name="prove",
                    start_ns=proven_ns,
                    end_ns=now_ns,
                    traceparent=story.params.traceparent,
                    attributes=(*about, ("kvlease.seals", len(read.proofs)), ("kvlease.outcome", outcome)),
                )
            )

    def _note_resolve(self, request_id: str, reason: ComputeReason | None) -> None:
        story = self._stories.get(request_id)
        if story is None or story.resolved:
            return
        story.resolved = True
        if not self._link.traced:
            return
        read = story.read
        self._link.note(
            Note(
                name="resolve",
                start_ns=story.begun_ns,
                end_ns=time.monotonic_ns(),
                traceparent=story.params.traceparent,
                lent_by=read.traceparent if read else "",
                attributes=(
                    ("kvlease.lease_id", read.lease_id if read else ""),
                    ("kvlease.conversation", story.params.conversation or ""),
                    ("kvlease.prompt_tokens", story.prompt_tokens),
                    ("kvlease.tokens_matched", read.matched_tokens if read else 0),
                    ("kvlease.outcome", "hit" if reason is None else reason.value),
                ),
            )
        )
