"""What callers of one tenant notice of another's, where both share a registry: nothing.

With tokens on plain sockets; what a single lease is answered as is tested with certificates.
"""

from __future__ import annotations

from pathlib import Path

from kvlease.registry.client_channel import open_channel
from kvlease.v1 import registry_pb2 as pb
from kvlease.v1.registry_pb2_grpc import RegistryStub

from tests.integration.raw_session import RawSession, lease
from tests.integration.test_identity_tokens import Tokens, registry


async def test_the_pages_of_a_list_name_no_foreign_lease(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    lending = tokens.give("lender", "kvlease://lender/d0?tenant=acme")
    asking = tokens.give("router", "kvlease://router/r?tenant=other")
    async with (
        registry(tokens) as server,
        open_channel(server.endpoint, lending) as lenders,
        open_channel(server.endpoint, asking) as channel,
    ):
        lender = RawSession(RegistryStub(lenders))
        await lender.start(held=[lease(f"a{x:02}", f"a{x}", conversation=f"c{x}") for x in range(25)])
        for start in ("", "a", "a03"):
            asked = pb.ListLeasesRequest(tenant="other", page_size=1, page_token=start)
            answer = await RegistryStub(channel).ListLeases(asked)
            assert (list(answer.leases), answer.next_page_token) == ([], "")
