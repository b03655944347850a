"""What one tenant may use up, on a real registry: its share, and nothing of what others have or may yet have.

The limits themselves are tested on the table; here a lender is answered and others are served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvlease.registry.client import RegistryClient
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.values import ConversationId, Hit, LeaseFilter, LeaseId, PublishStatus, ResolveQuery, TenantId
from kvlease.registry.wire import decode_publish_result

from tests.integration.raw_session import RawSession, engine, lease, raw_stub

GREEDY, OTHER = TenantId("greedy"), TenantId("other")
CONVERSATIONS = 10_000
BATCH = 250


@asynccontextmanager
async def registry(**settings: object) -> AsyncIterator[tuple[RegistryClient, RawSession]]:
    """A registry whose one lender has two leases of tenant other."""
    given: dict[str, object] = {"listen": "127.0.0.1:0", "metrics_listen": NO_METRICS, **settings}
    async with (
        RegistryServer(RegistrySettings.model_validate(given)) as server,
        RegistryClient(server.endpoint) as client,
        raw_stub(server.endpoint) as stub,
    ):
        lender = RawSession(stub)
        await lender.start(engine(), held=[lease(f"o{i}", f"{i}", conversation=f"o{i}", tenant=OTHER) for i in (1, 2)])
        yield client, lender


async def publish(lender: RawSession, tenant: TenantId, first: int, count: int) -> Counter[PublishStatus]:
    """One lease for each of `count` conversations; how they were answered."""
    answers: Counter[PublishStatus] = Counter()
    for start in range(first, first + count, BATCH):
        names = (f"{tenant}-{i}" for i in range(start, min(start + BATCH, first + count)))
        results = await lender.publish(*(lease(x, x[-8:], conversation=x, tenant=tenant) for x in names))
        answers.update(decode_publish_result(x).status for x in results)
    return answers


async def is_resolved(client: RegistryClient, tenant: TenantId, name: str) -> bool:
    answer = await client.resolve(ResolveQuery(tenant=tenant, lease_id=LeaseId(name)), timeout_ms=5_000)
    return isinstance(answer, Hit)


async def test_a_tenant_with_ten_thousand_conversations_has_its_quota_and_others_theirs() -> None:
    quota = 1_000
    async with registry(max_leases_per_tenant=quota) as (client, lender):
        answers = await publish(lender, GREEDY, 0, CONVERSATIONS)
        assert answers == {PublishStatus.PUBLISHED: quota, PublishStatus.QUOTA: CONVERSATIONS - quota}
        assert all([await is_resolved(client, OTHER, name) for name in ("o1", "o2")])
        assert await publish(lender, OTHER, 0, 3) == {PublishStatus.PUBLISHED: 3}
        assert await is_resolved(client, GREEDY, "greedy-0"), "what a tenant has stays, too"

        await client.end_conversation(GREEDY, ConversationId("greedy-0"))
        assert await publish(lender, GREEDY, CONVERSATIONS, 2) == {PublishStatus.PUBLISHED: 1, PublishStatus.QUOTA: 1}
        assert len((await client.list_leases(LeaseFilter(tenant=GREEDY))).leases) == quota


async def test_pinned_blocks_of_a_tenant_are_counted_over_all_its_leases() -> None:
    async with registry(max_blocks_per_tenant=10) as (client, lender):  # two blocks a lease
        assert await publish(lender, GREEDY, 0, 7) == {PublishStatus.PUBLISHED: 5, PublishStatus.QUOTA: 2}
        assert await publish(lender, OTHER, 0, 3) == {PublishStatus.PUBLISHED: 3}
        assert await client.end_lease(GREEDY, LeaseId("greedy-0")) == 1
        assert await publish(lender, GREEDY, 7, 2) == {PublishStatus.PUBLISHED: 1, PublishStatus.QUOTA: 1}
