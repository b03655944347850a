"""Reading the table: the best lease for a prompt, where a conversation's KV is, lists for watchers and operators.

Pure, and changes nothing but the time a branch was last used. A tenant's search never sees another tenant's lease:
the answer is the same as if it did not exist.
Invariant: a lease whose end is due, or whose lender is silent, is never answered, whether or not a tick has seen it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvlease.registry.aliases import Aliases
from kvlease.registry.engines import EngineState
from kvlease.registry.errors import InvalidRequest
from kvlease.registry.table_leases import HeldLease
from kvlease.registry.table_ledger import Ledger
from kvlease.registry.table_limits import SCAN_LIMIT
from kvlease.registry.values import (
    DIGEST_BYTES,
    Alias,
    ConversationId,
    EngineId,
    EngineStatus,
    Hit,
    LeaseFilter,
    LeaseId,
    LeaseState,
    LeaseView,
    Located,
    Miss,
    MissReason,
    ResolveQuery,
    TenantId,
)

_UNKNOWN = Miss(reason=MissReason.UNKNOWN)
_SUSPECT = Miss(reason=MissReason.SUSPECT)
_DIVERGED = Miss(reason=MissReason.DIVERGED)


class Found(NamedTuple):
    """The lease that answers a resolve. Valid until the table changes: encode it, or take `hit`, before that."""

    lease: HeldLease
    matched_strides: int
    remaining_ms: int
    """Until the deadline, by the lender's clock."""

    @property
    def state(self) -> LeaseState:
        """As of now, also between a deadline and the tick that records it."""
        return LeaseState.LAPSED if self.lease.lapsed or self.remaining_ms <= 0 else LeaseState.LIVE

    def hit(self) -> Hit:
        publication, engine = self.lease.publication, self.lease.holder.engine
        return Hit(
            lease_id=publication.lease_id,
            engine_id=engine.engine_id,
            incarnation=engine.incarnation,
            conversation=publication.conversation,
            record=publication.record,
            matched_strides=self.matched_strides,
            state=self.state,
            remaining_ms=self.remaining_ms,
            traceparent=publication.traceparent,
        )


class LeaseSearch:
    """The questions that the table answers."""

    def __init__(self, ledger: Ledger, aliases: Aliases, engines: Mapping[EngineId, EngineState]) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._aliases = aliases
        self._engines = engines
        self._suspect_after_ms = ledger.limits.suspect_after_ms

    def find(self, query: ResolveQuery, now_ms: int) -> Found | Miss:
        """The lease with the longest common prefix, then the longest time left; or why there is none.

        Raises InvalidRequest if the query names nothing, or its digests are no whole number of digests.
        """
        tenant_id, _, _, digests, stride_tokens, fingerprint_hash = query
        if not digests:
            return self._find_named(query, now_ms)
        if len(digests) % DIGEST_BYTES:
            raise InvalidRequest(f"digests must be a multiple of {DIGEST_BYTES} bytes", field="digests")
        miss = _UNKNOWN
        best: HeldLease | None = None
        best_common = 0
        best_remaining = 0
        tenant = self._index.tenants.get(tenant_id)
        if tenant is not None:
            by_id = self._index.by_id
            likely = tenant.prefixes.best(digests)
            if likely is not None:
                lease: HeldLease = by_id[likely[1]]
                if self._refusal(lease, digests, stride_tokens, fingerprint_hash, now_ms) is None:
                    lease.used_ms = now_ms
                    return Found(lease, likely[0], lease.holder.remaining_ms(lease, now_ms))
            scanned = 0
            for common, lease_id in tenant.prefixes.nearest(digests):
                scanned += 1
                if common < best_common or scanned > SCAN_LIMIT:
                    break
                lease = by_id[lease_id]
                refusal = self._refusal(lease, digests, stride_tokens, fingerprint_hash, now_ms)
                if refusal is not None:
                    if miss is _UNKNOWN and refusal.reason is not MissReason.ENDED:
                        miss = refusal
                    continue
                remaining = lease.holder.remaining_ms(lease, now_ms)
                if best is None or remaining > best_remaining:
                    best, best_common, best_remaining = lease, common, remaining
        if best is not None:
            best.used_ms = now_ms
            return Found(best, best_common, best_remaining)
        if miss is _UNKNOWN:
            return self._reason_by_name(query, now_ms)
        return miss

    def locate(
        self, tenant: TenantId, conversation: ConversationId | None, aliases: Sequence[Alias], now_ms: int
    ) -> Located:
        """The longest resolvable lease of the conversation, or of the one that the first known alias names."""
        if conversation is None:
            conversation = self._aliases.find(tenant, aliases, now_ms)
            if conversation is None:
                return Located(conversation=None, lease=None, reason=MissReason.UNKNOWN)
        query = ResolveQuery(tenant=tenant, conversation=conversation)
        found = self._best_of(self._index.branches(tenant, conversation), query, now_ms)
        if isinstance(found, Miss):
            return Located(conversation=conversation, lease=None, reason=found.reason)
        found.used_ms = now_ms
        view = self._ledger.view(found, now_ms)
        return Located(conversation=conversation, lease=view, api_url=found.holder.engine.api_url)

    def list_leases(
        self, wanted: LeaseFilter, *, after: LeaseId | None, limit: int, now_ms: int
    ) -> tuple[list[LeaseView], LeaseId | None]:
        """Leases in order of their ids after `after`, and where to go on (None: that was all).

        Looks at no more than ten times `limit` leases, so a page may be short, or empty, and not the last. Of one
        tenant's it looks at no others: where to go on is an id, and that of a foreign lease must not be told.
        """
        views: list[LeaseView] = []
        if wanted.tenant is not None and wanted.conversation is not None:
            branches = self._index.branches(wanted.tenant, wanted.conversation)
            leases: Iterable[HeldLease] = sorted(branches, key=lambda x: x.publication.lease_id)
            return [self._ledger.view(x, now_ms) for x in leases if self._listed(x, wanted, now_ms)], None
        by_id = self._index.by_id
        for scanned, lease_id in enumerate(self._index.ids(wanted.tenant, after=after), start=1):
            lease = by_id[lease_id]
            if self._listed(lease, wanted, now_ms):
                views.append(self._ledger.view(lease, now_ms))
            if len(views) >= limit or scanned >= 10 * limit:
                return views, lease_id
        return views, None

    def list_engines(self, now_ms: int) -> list[EngineStatus]:
        """Every engine that has not departed, by id."""
        return [self._engines[x].status(now_ms, self._ledger.limits) for x in sorted(self._engines)]

    def _listed(self, lease: HeldLease, wanted: LeaseFilter, now_ms: int) -> bool:
        publication = lease.publication
        return (
            (wanted.tenant is None or publication.tenant == wanted.tenant)
            and (wanted.engine_id is None or lease.holder.engine.engine_id == wanted.engine_id)
            and (wanted.conversation is None or publication.conversation == wanted.conversation)
            and self._ledger.end_due(lease, now_ms) is None
        )

    def _refusal(
        self, lease: HeldLease, digests: bytes, stride_tokens: int, fingerprint_hash: bytes, now_ms: int
    ) -> Miss | None:
        """Why this lease may not be answered to such a query, prefixes aside."""
        holder, publication = lease.holder, lease.publication
        if lease.ends_at_deadline or lease.generation < holder.valid_from:  # or no end can be due
            reason = self._ledger.end_due(lease, now_ms)
            if reason is not None:
                return Miss(reason=MissReason.ENDED, end_reason=reason)
        if holder.is_suspect(now_ms, self._suspect_after_ms):
            return _SUSPECT
        if fingerprint_hash and fingerprint_hash != publication.fingerprint_hash:
            return Miss(reason=MissReason.FINGERPRINT, lender_fingerprint=holder.engine.fingerprint)
        if digests and stride_tokens and stride_tokens != publication.stride_tokens:
            return _DIVERGED
        return None

    def _find_named(self, query: ResolveQuery, now_ms: int) -> Found | Miss:
        if query.lease_id is None and query.conversation is None:
            raise InvalidRequest("one of lease_id, conversation and digests must be given", field="digests")
        found: HeldLease | Miss = _UNKNOWN
        if query.lease_id is not None:
            found = self._by_lease_id(query, now_ms)
        if query.conversation is not None and isinstance(found, Miss):
            best = self._best_of(self._index.branches(query.tenant, query.conversation), query, now_ms)
            if not isinstance(best, Miss) or found is _UNKNOWN:
                found = best
        if isinstance(found, Miss):
            return found
        found.used_ms = now_ms
        return Found(found, found.publication.strides, found.holder.remaining_ms(found, now_ms))

    def _by_lease_id(self, query: ResolveQuery, now_ms: int) -> HeldLease | Miss:
        assert query.lease_id is not None
        lease = self._index.of(query.tenant, query.lease_id)
        if lease is not None:
            return self._refusal(lease, query.digests, query.stride_tokens, query.fingerprint_hash, now_ms) or lease
        reason = self._ledger.ended.reason_for(query.lease_id, query.tenant)
        return _UNKNOWN if reason is None else Miss(reason=MissReason.ENDED, end_reason=reason)

    def _best_of(self, leases: Iterable[HeldLease], query: ResolveQuery, now_ms: int) -> HeldLease | Miss:
        """The longest of the leases that may be answered, then the one with the longest time left."""
        miss = _UNKNOWN
        best: HeldLease | None = None
        best_key = (0, 0)
        for lease in leases:
            refusal = self._refusal(lease, query.digests, query.stride_tokens, query.fingerprint_hash, now_ms)
            if refusal is not None:
                miss = refusal if miss is _UNKNOWN or miss.reason is MissReason.ENDED else miss
                continue
            key = (lease.publication.tokens, lease.holder.remaining_ms(lease, now_ms))
            if best is None or key > best_key:
                best, best_key = lease, key
        return best if best is not None else miss

    def _reason_by_name(self, query: ResolveQuery, now_ms: int) -> Miss:
        """No lease shares a stride with the digests: what the lease or conversation named has to say to that."""
        found: HeldLease | Miss = _UNKNOWN
        if query.lease_id is not None:
            found = self._by_lease_id(query, now_ms)
        if found is _UNKNOWN and query.conversation is not None:
            found = self._best_of(self._index.branches(query.tenant, query.conversation), query, now_ms)
        return found if isinstance(found, Miss) else _DIVERGED
