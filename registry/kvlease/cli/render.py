"""How answers look: tables for people, one JSON object per line for programs.

Values in, text out. Times to go are given in seconds for people and in milliseconds for programs; ids are never cut.
The JSON keys are the field names of the values and stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from kvlease.cli.diagnosis import Finding
from kvlease.cli.stdout import flush, say
from kvlease.cli.visible import visible
from kvlease.registry.values import DIGEST_BYTES, EngineStatus, Hit, LeaseEvent, LeaseId, LeaseList, LeaseView, Miss

if TYPE_CHECKING:
    from kvlease.cli.bench import Report
    from kvlease.cli.bench_figures import Figure

Json = Mapping[str, str | int | float | bool | Mapping[str, str] | None]


LISTED: Final = "listed"
"""In the place of an event's type: not an event, but what there is."""


class Output:
    """Writes to stdout."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json: Final = as_json

    def leases(self, found: LeaseList) -> None:
        if self._as_json:
            for lease in found.leases:
                _line(_lease(lease))
            return
        rows = [
            (x.lease_id, x.tenant, x.conversation or "-", x.engine_id, _state(x), str(x.tokens), _blocks(x), _left(x))
            for x in found.leases
        ]
        _table(("lease", "tenant", "conversation", "engine", "state", "tokens", "blocks", "left"), rows)
        say(f"{len(rows)} leases at revision {found.revision}")

    def engines(self, engines: Sequence[EngineStatus]) -> None:
        if self._as_json:
            for engine in engines:
                _line(_engine(engine))
            return
        rows = [
            (
                x.engine.engine_id,
                "suspect" if x.suspect else "connected" if x.connected else "away",
                _seconds(x.silent_ms),
                str(x.leases),
                f"{x.leased_blocks}",
                f"{x.free_blocks}/{x.total_blocks}",
                x.engine.api_url or "-",
                x.engine.version or "-",
            )
            for x in engines
        ]
        _table(("engine", "state", "silent", "leases", "leased", "free blocks", "url", "version"), rows)

    def ended(self, count: int, lease_id: LeaseId | None = None) -> None:
        """`lease_id`: which, if one was named."""
        if self._as_json:
            _line({"ended": count} if lease_id is None else {"ended": count, "lease_id": lease_id})
            return
        hint = "" if count else ": none matched, or all had ended; see kvlease leases"
        which = "" if lease_id is None else f": {lease_id}"
        say(f"{count} {'lease' if count == 1 else 'leases'} ended{which}{hint}")

    def findings(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            if self._as_json:
                _line({**asdict(finding), "grade": finding.grade.value})
                continue
            say(f"{finding.grade.value:8}{finding.about}: {finding.subject}: {finding.text}")
            if finding.advice:
                say(f"{'':8}to do: {finding.advice}")

    def report(self, registry: str, report: Report) -> None:
        """Of `kvlease bench`. `registry`: HOST:PORT."""
        about: Json = {
            "registry": registry,
            "replica_id": report.registry.replica_id,
            "version": report.registry.version,
            "tokens": report.tokens,
            "record_bytes": report.record_bytes,
            "leases": report.leases,
        }
        if self._as_json:
            _line({"what": "about", **about})
            for figure in report.figures:
                _line({name: round(x, 3) if isinstance(x, float) else x for name, x in asdict(figure).items()})
            return
        say(
            f"{registry}: {report.registry.replica_id}, kvlease {report.registry.version}; {report.leases} leases of "
            f"{report.tokens} tokens, a record of {report.record_bytes} bytes each"
        )
        rows = [
            (_together(x), _latency(x.p50_ms), _latency(x.p99_ms), f"{x.rate:.0f} /s", str(x.calls), str(x.failed))
            for x in report.figures
        ]
        _table(("what", "p50", "p99", "rate", "calls", "failed"), rows)

    def answer(self, answer: Hit | Miss, *, stride_tokens: int) -> None:
        if isinstance(answer, Miss):
            self._miss(answer)
            return
        matched, strides = answer.matched_strides, len(answer.record.digests) // DIGEST_BYTES
        if self._as_json:
            _line(
                {
                    "lease_id": answer.lease_id,
                    "engine_id": answer.engine_id,
                    "conversation": answer.conversation,
                    "matched_strides": matched,
                    "strides": strides,
                    "state": answer.state.value,
                    "remaining_ms": answer.remaining_ms,
                    "record_bytes": len(answer.record.digests) + len(answer.record.body),
                    "traceparent": answer.traceparent,
                }
            )
            return
        say(
            f"hit: lease {answer.lease_id} on {answer.engine_id}, {matched} of {strides} strides "
            f"({matched * stride_tokens} tokens at {stride_tokens} a stride), {answer.state.value}, "
            f"{_seconds(answer.remaining_ms)} left"
        )

    def listed(self, found: LeaseList) -> None:
        """What there is, in the place of events that are not kept any more."""
        for lease in found.leases:
            self._news(found.revision, LISTED, lease)

    def event(self, event: LeaseEvent) -> None:
        self._news(event.revision, event.type.value, event.lease)

    def _news(self, revision: int, what: str, lease: LeaseView) -> None:
        if self._as_json:
            _line({"revision": revision, "type": what, **_lease(lease)})
        else:
            why = f" ({lease.end_reason.value})" if lease.end_reason is not None else ""
            say(
                f"{revision} {what}{why} lease {lease.lease_id} of {lease.tenant}, "
                f"conversation {lease.conversation or '-'}, on {lease.engine_id}, {lease.tokens} tokens"
            )
        flush()

    def _miss(self, miss: Miss) -> None:
        ended = miss.end_reason.value if miss.end_reason is not None else None
        fields = dict(miss.lender_fingerprint.fields) if miss.lender_fingerprint is not None else None
        if self._as_json:
            _line({"miss": miss.reason.value, "end_reason": ended, "lender_fingerprint": fields})
            return
        detail = f" ({ended})" if ended else ""
        say(f"miss: {miss.reason.value}{detail}")
        for name, value in (fields or {}).items():
            say(f"  lender's {name}: {value}")


def _lease(lease: LeaseView) -> Json:
    return {
        "lease_id": lease.lease_id,
        "tenant": lease.tenant,
        "conversation": lease.conversation,
        "engine_id": lease.engine_id,
        "incarnation": lease.incarnation.hex(),
        "tokens": lease.tokens,
        "stride_tokens": lease.stride_tokens,
        "blocks": lease.blocks,
        "size_bytes": lease.size_bytes,
        "state": lease.state.value,
        "remaining_ms": lease.remaining_ms,
        "end_reason": lease.end_reason.value if lease.end_reason is not None else None,
        "suspect": lease.suspect,
        "traceparent": lease.traceparent,
    }


def _engine(status: EngineStatus) -> Json:
    engine = status.engine
    return {
        "engine_id": engine.engine_id,
        "incarnation": engine.incarnation.hex(),
        "api_url": engine.api_url,
        "version": engine.version,
        "fingerprint": dict(engine.fingerprint.fields),
        "labels": dict(engine.labels),
        "connected": status.connected,
        "suspect": status.suspect,
        "silent_ms": status.silent_ms,
        "leases": status.leases,
        "leased_blocks": status.leased_blocks,
        "free_blocks": status.free_blocks,
        "total_blocks": status.total_blocks,
    }


def _line(fields: Json) -> None:
    say(json.dumps(fields, ensure_ascii=False))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be: an id that is cut cannot be copied."""
    lines = [tuple(head.upper() for head in heads), *(tuple(visible(cell) for cell in row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    for line in lines:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _state(lease: LeaseView) -> str:
    return f"{lease.state.value}, suspect" if lease.suspect else lease.state.value


def _blocks(lease: LeaseView) -> str:
    return str(lease.blocks) if not lease.size_bytes else f"{lease.blocks} ({lease.size_bytes / 2**20:.1f} MiB)"


def _left(lease: LeaseView) -> str:
    return _seconds(lease.remaining_ms)


def _together(figure: Figure) -> str:
    return figure.what if figure.callers == 1 else f"{figure.what}, {figure.callers} at once"


def _latency(value_ms: float | None) -> str:
    return "-" if value_ms is None else f"{value_ms:.2f} ms"


def _seconds(value_ms: int) -> str:
    return f"{value_ms / 1000:.1f} s"
