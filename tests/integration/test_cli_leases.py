"""How the `kvlease` command takes what people give it: the beginning of an id, a URL for an address, nothing at all.

Real processes; what each command does with a whole id is in `test_cli.py`.
"""

from __future__ import annotations

import asyncio
import json

from kvlease.registry.client import RegistryClient
from kvlease.registry.values import LeaseFilter, TenantId

from tests.integration.cli_process import LIMIT_S, ended, registry, run, started
from tests.integration.raw_session import lease
from tests.ports import free_port

HELD = (
    lease("abcdef01", "xyz", conversation="one"),
    lease("abcdef02", "uvw", conversation="two"),
    lease("12345678", "rst", conversation="three"),
    lease("99999999", "opq", conversation="four", tenant="other"),
)
ACME = ("--tenant", "acme")


async def held(endpoint: str) -> set[str]:
    async with RegistryClient(endpoint) as client:
        found = await client.list_leases(LeaseFilter(tenant=TenantId("acme")))
        return {view.lease_id for view in found.leases}


async def test_the_beginning_of_an_id_names_the_only_lease_that_has_it() -> None:
    async with registry(held=HELD) as running:
        hit, short, foreign, listed = await asyncio.gather(
            running.ask("resolve", *ACME, "--lease", "1234", "--json"),
            running.ask("resolve", *ACME, "--lease", "123", "--json"),
            running.ask("resolve", *ACME, "--lease", "9999", "--json"),
            running.ask("leases", *ACME, "--lease", "abcdef", "--json"),
        )
        assert (hit.status, hit.lines[0]["lease_id"]) == (0, "12345678")
        assert (short.status, short.lines[0]["miss"]) == (3, "unknown"), "too short to name a lease by accident"
        assert (foreign.status, foreign.lines[0]["miss"]) == (3, "unknown")
        assert [x["lease_id"] for x in listed.lines] == ["abcdef01", "abcdef02"]

        gone = await running.ask("end", *ACME, "--lease", "1234")
        assert (gone.status, gone.out) == (0, "1 lease ended: 12345678\n")
        assert await held(running.endpoint) == {"abcdef01", "abcdef02"}
        again = await running.ask("end", *ACME, "--lease", "1234")
        assert again.out.startswith("0 leases ended: none matched")


async def test_a_beginning_that_several_leases_share_lists_them_and_ends_none() -> None:
    async with registry(held=HELD) as running:
        end, resolve = await asyncio.gather(
            running.ask("end", *ACME, "--lease", "abcdef"), running.ask("resolve", *ACME, "--lease", "abcdef")
        )
        for outcome in (end, resolve):
            assert (outcome.status, outcome.out) == (2, "")
            first, *candidates = outcome.err.splitlines()
            assert "2 leases begin with abcdef" in first
            assert [line.split()[0] for line in candidates] == ["abcdef01", "abcdef02"]
        assert await held(running.endpoint) == {"abcdef01", "abcdef02", "12345678"}


async def test_a_watch_that_missed_events_lists_what_there_is_and_goes_on() -> None:
    one = ("--from-revision", "1", "--count", "1", "--json")
    async with (
        registry("--keep-events", "1", held=HELD[:2]) as running,
        started("watch", "--registry", running.endpoint, *one) as watching,
    ):
        assert watching.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            listed = [json.loads(await watching.stdout.readline()) for _ in range(2)]
        assert [(x["type"], x["lease_id"]) for x in listed] == [("listed", "abcdef01"), ("listed", "abcdef02")]
        await running.lender.publish(lease("new", "n", conversation="five"))
        outcome = await ended(watching)
        (event,) = outcome.lines
        assert (outcome.status, event["type"], event["lease_id"]) == (0, "published", "new")
        assert event["revision"] > listed[0]["revision"]
        assert "listing what there is now" in outcome.err


async def test_what_cannot_be_meant_is_said_in_one_sentence() -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    nothing, url, variable, away, unnamed = await asyncio.gather(
        run("resolve", "--registry", nowhere),
        run("leases", "--registry", "http://registry.example:7411/"),
        run("engines", KVLEASE_REGISTRY="https://registry.example:7411"),
        run("engines", "--registry", nowhere),
        run("engines", "--registry", "registry.invalid:7411"),
    )
    assert (nothing.status, nothing.err.count("\n")) == (2, 1)
    assert all(flag in nothing.err for flag in ("--lease", "--conversation", "--digests", "kvlease leases"))
    for outcome, scheme in ((url, "http"), (variable, "https")):
        assert outcome.status == 2
        assert f"must be HOST:PORT without {scheme}://: registry.example:7411" in outcome.err
    assert (away.status, away.out, away.err.count("\n")) == (1, "", 1)
    assert f"no registry answers at {nowhere}: Connection refused" in away.err
    assert (unnamed.status, unnamed.out) == (1, "")
    assert "registry.invalid" in unnamed.err


async def test_a_doctor_names_the_replica_and_compares_versions() -> None:
    async with registry("--replica-id", "registry-7") as running:
        outcome, version = await asyncio.gather(running.ask("doctor", "--json"), run("--version"))
        told = {x["about"]: x for x in outcome.lines}
        assert str(told["registry"]["text"]).startswith("registry-7 answers within")
        assert (told["kvlease"]["subject"], told["kvlease"]["grade"]) == ("registry-7", "ok")
        assert version.out.split()[1] in str(told["kvlease"]["text"])
