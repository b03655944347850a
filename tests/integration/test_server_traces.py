"""The spans that a real registry exports: which there are, what they say, and that they say nothing they must not.

The collector is a real OTLP receiver on a port of its own.
"""

from __future__ import annotations

import asyncio

from kvlease.registry.client import RegistryClient
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, RegistrySettings
from kvlease.registry.values import ConversationId, LeaseId, ResolveQuery, TenantId
from kvlease.v1 import registry_pb2 as pb
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.integration.collector import collecting
from tests.integration.raw_session import LIMIT_S, STRIDE, RawSession, digests, lease, raw_stub

TENANT = TenantId("acme")
CALLER = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def _attributes(span: Span) -> dict[str, str | int]:
    return {x.key: x.value.string_value or x.value.int_value for x in span.attributes}


async def test_the_story_of_a_lease_is_in_the_spans() -> None:
    async with collecting() as (collector, endpoint):
        settings = RegistrySettings(listen="127.0.0.1:0", metrics_listen=NO_METRICS, otlp_endpoint=endpoint)
        async with (
            RegistryServer(settings) as server,
            RegistryClient(server.endpoint) as client,
            raw_stub(server.endpoint) as stub,
        ):
            lender = RawSession(stub)
            await lender.start()
            item = lease("a", "xyz")
            await lender.publish(item)
            request = pb.ResolveRequest(tenant="acme", digests=digests("xyw"), stride_tokens=STRIDE)
            async with asyncio.timeout(LIMIT_S):
                await stub.Resolve(request, metadata=(("traceparent", CALLER),))
            await client.locate(TENANT, ConversationId("chat"))
            await client.end_lease(TENANT, LeaseId("a"))
            await client.resolve(ResolveQuery(tenant=TENANT, lease_id=LeaseId("a")), timeout_ms=5_000)
            lender.cut()

        hit, miss = collector.named("resolve")
        assert hit.trace_id.hex() == "a" * 32, "the caller's trace is joined"
        (link,) = hit.links
        assert (link.trace_id.hex(), link.span_id.hex()) == ("1" * 32, "2" * 16), "linked to the turn that lent"
        said = _attributes(hit)
        assert (said["kvlease.outcome"], said["kvlease.lease_id"]) == ("hit", "a")
        assert said["kvlease.tokens_matched"] == 2 * STRIDE
        said = _attributes(miss)
        assert (said["kvlease.miss_reason"], said["kvlease.end_reason"]) == ("ended", "released")
        assert not miss.links

        (locate,) = collector.named("locate")
        assert [x.trace_id.hex() for x in locate.links] == ["1" * 32]
        (publish,) = collector.named("publish")
        assert _attributes(publish)["kvlease.outcome"] == "published"
        (end,) = collector.named("end")
        assert _attributes(end)["kvlease.end_reason"] == "released"
        (session,) = collector.named("session")
        assert _attributes(session)["kvlease.engine_id"] == "d0"

        everything = b"".join(x.SerializeToString() for x in collector.spans)
        assert item.record.body not in everything
        assert item.record.digests[:16] not in everything
