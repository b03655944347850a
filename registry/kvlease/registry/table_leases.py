"""The leases in the table and the ways to find one: by id, by tenant and conversation, by digest chain.

Pure bookkeeping: add, remove, count, compare. Which lease may be answered, superseded or ended is decided elsewhere.
Invariant: every lease is in each index exactly once, and `check` can rebuild all of them from the leases alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlease.registry.errors import InvalidRequest
from kvlease.registry.prefix_index import PrefixIndex
from kvlease.registry.values import (
    DIGEST_BYTES,
    FINGERPRINT_BYTES,
    MAX_BLOCKS,
    MAX_DIGESTS,
    MAX_RECORD_BYTES,
    MAX_SIZE_BYTES,
    MAX_TOKENS,
    MAX_TRACEPARENT_CHARS,
    ConversationId,
    LeaseId,
    LeaseState,
    OnDeadline,
    Publication,
    TenantId,
    is_id,
)
from sortedcontainers import SortedDict, SortedList

if TYPE_CHECKING:
    from kvlease.registry.engines import EngineState


class HeldLease:
    """A lease in the table. `publication` never changes; the fields here do, and only `LeaseTable` changes them."""

    __slots__ = ("deadline_ms", "ends_at_deadline", "generation", "head", "holder", "lapsed", "publication", "used_ms")

    def __init__(self, publication: Publication, holder: EngineState, used_ms: int) -> None:
        self.publication = publication
        self.holder = holder
        self.deadline_ms = publication.deadline_ms
        self.ends_at_deadline = publication.on_deadline is OnDeadline.END
        self.lapsed = has_lapsed(publication)
        self.generation = 0
        self.used_ms = used_ms
        """Last published or resolved, on our clock: the least recent branch of a conversation goes first."""
        self.head: tuple[bytes, bytes, int] | None = None
        """What an edge makes, once, of that which never changes, to answer with. Not looked at here."""

    @property
    def state(self) -> LeaseState:
        return LeaseState.LAPSED if self.lapsed else LeaseState.LIVE


@dataclass(slots=True, kw_only=True)
class Tally:
    """How much is leased: leases, their blocks (of one rank), and KV bytes (of all ranks)."""

    live: int = 0
    live_blocks: int = 0
    live_bytes: int = 0
    lapsed: int = 0
    lapsed_blocks: int = 0
    lapsed_bytes: int = 0

    @property
    def leases(self) -> int:
        return self.live + self.lapsed

    def add(self, lease: HeldLease, sign: int = 1) -> None:
        publication = lease.publication
        if lease.lapsed:
            self.lapsed += sign
            self.lapsed_blocks += sign * publication.block_count
            self.lapsed_bytes += sign * publication.size_bytes
        else:
            self.live += sign
            self.live_blocks += sign * publication.block_count
            self.live_bytes += sign * publication.size_bytes

    def remove(self, lease: HeldLease) -> None:
        self.add(lease, -1)


class TenantLeases:
    """One tenant's leases. No search ever crosses from one tenant to another."""

    __slots__ = ("conversations", "ids", "pinned_blocks", "prefixes")

    def __init__(self) -> None:
        self.ids: SortedList[LeaseId] = SortedList()
        """So that a listing goes from one of the tenant's own leases to the next and never meets another's."""
        self.pinned_blocks = 0
        """Blocks of live leases."""
        self.prefixes = PrefixIndex()
        self.conversations: dict[ConversationId, tuple[HeldLease, ...]] = {}
        """Few leases each (`max_branches`), so a tuple: half the memory of a set."""


class LeaseIndex:
    """All leases by id, and each tenant's by conversation and prefix."""

    def __init__(self) -> None:
        self.by_id: SortedDict[LeaseId, HeldLease] = SortedDict()
        """Sorted, so that a listing can go on after the last id it gave, whatever came and went meanwhile."""
        self.tenants: dict[TenantId, TenantLeases] = {}

    def __len__(self) -> int:
        return len(self.by_id)

    def of(self, tenant: TenantId, lease_id: LeaseId) -> HeldLease | None:
        """The tenant's lease; another tenant's looks like none."""
        lease: HeldLease | None = self.by_id.get(lease_id)
        return lease if lease is not None and lease.publication.tenant == tenant else None

    def branches(self, tenant: TenantId, conversation: ConversationId | None) -> tuple[HeldLease, ...]:
        leases = self.tenants.get(tenant)
        return leases.conversations.get(conversation, ()) if leases is not None and conversation is not None else ()

    def add(self, lease: HeldLease) -> None:
        """Index the lease, here and at its holder. Its id must be new."""
        publication = lease.publication
        self.by_id[publication.lease_id] = lease
        tenant = self.tenants.get(publication.tenant)
        if tenant is None:
            tenant = self.tenants[publication.tenant] = TenantLeases()
        tenant.ids.add(publication.lease_id)
        if not lease.lapsed:
            tenant.pinned_blocks += publication.block_count
        tenant.prefixes.add(publication.record.digests, publication.lease_id)
        if publication.conversation is not None:
            others = tenant.conversations.get(publication.conversation, ())
            tenant.conversations[publication.conversation] = (*others, lease)
        lease.holder.hold(lease)

    def remove(self, lease: HeldLease) -> None:
        """Take the lease out of every index, here and at its holder."""
        publication = lease.publication
        del self.by_id[publication.lease_id]
        tenant = self.tenants[publication.tenant]
        tenant.ids.remove(publication.lease_id)
        if not lease.lapsed:
            tenant.pinned_blocks -= publication.block_count
        tenant.prefixes.remove(publication.record.digests, publication.lease_id)
        if publication.conversation is not None:
            others = tuple(x for x in tenant.conversations[publication.conversation] if x is not lease)
            if others:
                tenant.conversations[publication.conversation] = others
            else:
                del tenant.conversations[publication.conversation]
        if not tenant.ids:
            del self.tenants[publication.tenant]
        lease.holder.let_go(lease)

    def retime(self, lease: HeldLease, *, deadline_ms: int, lapsed: bool) -> None:
        """Another deadline or state."""
        tenant = self.tenants[lease.publication.tenant]
        tenant.pinned_blocks += lease.publication.block_count * (int(lease.lapsed) - int(lapsed))
        lease.holder.retime(lease, deadline_ms=deadline_ms, lapsed=lapsed)

    def ids(self, tenant: TenantId | None, *, after: LeaseId | None) -> Iterator[LeaseId]:
        """Ids of the tenant's leases (None: of all) behind `after`, in order."""
        ids: SortedDict[LeaseId, HeldLease] | SortedList[LeaseId] = self.by_id
        if tenant is not None:
            leases = self.tenants.get(tenant)
            if leases is None:
                return iter(())
            ids = leases.ids
        found: Iterator[LeaseId] = (
            ids.irange(minimum=after, inclusive=(False, True)) if after is not None else iter(ids)
        )
        return found

    def of_tenant(self, tenant: TenantId) -> Iterator[HeldLease]:
        leases = self.tenants.get(tenant)
        if leases is not None:
            yield from (self.by_id[lease_id] for _, lease_id in leases.prefixes)

    def check(self) -> None:
        """Raises AssertionError if an index disagrees with the leases."""
        expected: dict[TenantId, list[HeldLease]] = {}
        for lease_id, lease in self.by_id.items():
            assert lease.publication.lease_id == lease_id, f"id of {lease_id}"
            assert lease.holder.leases.get(lease_id) is lease, f"holder of {lease_id}"
            expected.setdefault(lease.publication.tenant, []).append(lease)
        assert self.tenants.keys() == expected.keys(), "tenants"
        for name, leases in expected.items():
            tenant = self.tenants[name]
            assert list(tenant.ids) == sorted(x.publication.lease_id for x in leases), f"ids of {name}"
            pinned = sum(x.publication.block_count for x in leases if not x.lapsed)
            assert tenant.pinned_blocks == pinned, f"pinned blocks of {name}"
            chains = sorted((x.publication.record.digests, x.publication.lease_id) for x in leases)
            tenant.prefixes.check()
            assert list(tenant.prefixes) == chains, f"prefixes of {name}"
            conversations: dict[ConversationId, set[LeaseId]] = {}
            for lease in leases:
                if lease.publication.conversation is not None:
                    conversations.setdefault(lease.publication.conversation, set()).add(lease.publication.lease_id)
            have = {c: {x.publication.lease_id for x in xs} for c, xs in tenant.conversations.items()}
            assert have == conversations, f"conversations of {name}"


def has_lapsed(publication: Publication) -> bool:
    """Whether the lender presents the lease as lapsed; one that ends at its deadline never lapses."""
    return publication.lapsed and publication.on_deadline is OnDeadline.LAPSE


def same_content(a: Publication, b: Publication) -> bool:
    """Whether two publications are of the same lease: all that the lender may not change under one id."""
    return (
        a.record == b.record
        and a.tenant == b.tenant
        and a.conversation == b.conversation
        and a.stride_tokens == b.stride_tokens
        and a.block_count == b.block_count
        and a.size_bytes == b.size_bytes
        and a.on_deadline == b.on_deadline
        and a.fingerprint_hash == b.fingerprint_hash
    )


def covers(longer: Publication, shorter: Publication) -> bool:
    """Whether every token that `shorter` covers is covered by `longer` too, with the same meaning."""
    return (
        longer.stride_tokens == shorter.stride_tokens
        and longer.fingerprint_hash == shorter.fingerprint_hash
        and longer.record.digests.startswith(shorter.record.digests)
    )


def validate_publication(publication: Publication) -> None:
    """Raises InvalidRequest, naming the field, if the publication breaks the contract."""
    record = publication.record
    conversation = publication.conversation
    digests = len(record.digests)
    checks = (
        ("lease_id", is_id(publication.lease_id)),
        ("tenant", is_id(publication.tenant)),
        ("conversation", conversation is None or is_id(conversation)),
        ("stride_tokens", publication.stride_tokens > 0 and publication.tokens <= MAX_TOKENS),
        ("block_count", 0 <= publication.block_count <= MAX_BLOCKS),
        ("size_bytes", 0 <= publication.size_bytes <= MAX_SIZE_BYTES),
        ("fingerprint_hash", len(publication.fingerprint_hash) == FINGERPRINT_BYTES),
        ("record.digests", 0 < digests <= MAX_DIGESTS * DIGEST_BYTES and digests % DIGEST_BYTES == 0),
        ("record", digests + len(record.body) <= MAX_RECORD_BYTES),
        ("traceparent", len(publication.traceparent) <= MAX_TRACEPARENT_CHARS),
    )
    for field, good in checks:
        if not good:
            raise InvalidRequest(f"{field} breaks the contract", field=field)
