"""The `kvlease` command as operators run it: processes, exit statuses, what is on stdout, what is on stderr.

The registry in here is a process of its own, `kvlease registry`; the lender is a raw session with it.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest
from kvlease.registry.client import RegistryClient
from kvlease.v1 import registry_pb2 as pb

from tests.integration.certificates import Authority
from tests.integration.cli_process import ended, registry, run, started
from tests.integration.raw_session import digests
from tests.integration.registry_peer import eventually
from tests.ports import free_port

COMMANDS = ("registry", "router", "leases", "engines", "end", "drain", "resolve", "watch", "health", "doctor", "bench")


async def test_help_version_and_wrong_usage() -> None:
    shown, version, wrong = await asyncio.gather(run("--help"), run("--version"), run("nonsense"))
    assert shown.status == 0
    assert all(command in shown.out for command in (*COMMANDS, "exit status"))
    assert (version.status, version.out.split()[0]) == (0, "kvlease")
    assert wrong.status == 2


@pytest.mark.parametrize("command", ["registry", "leases", "resolve", "watch", "drain", "health", "doctor", "bench"])
async def test_each_command_has_help(command: str) -> None:
    shown = await run(command, "--help")
    assert shown.status == 0
    assert f"usage: kvlease {command}" in shown.out


async def test_a_wrong_setting_is_said_with_its_flag_and_variable() -> None:
    outcome = await run("registry", "--store", "etcd://somewhere", KVLEASE_REGISTRY_LISTEN="nowhere")
    assert outcome.status == 2
    assert "--listen (KVLEASE_REGISTRY_LISTEN): must be HOST:PORT" in outcome.err
    assert "--store (KVLEASE_REGISTRY_STORE): must be HOST:PORT" in outcome.err


async def test_no_registry_is_a_failure_with_its_address() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    outcome, wrong = await asyncio.gather(
        run("leases", "--registry", f"{endpoint},127.0.0.1:1"), run("leases", "--registry", f"{endpoint},")
    )
    assert outcome.status == 1
    assert f"{endpoint}: Connection refused" in outcome.err
    assert "127.0.0.1:1: Connection refused" in outcome.err
    assert outcome.out == ""
    assert wrong.status == 2
    assert "has a comma too many" in wrong.err


async def test_one_replica_that_works_is_enough_and_a_doctor_tells_of_the_others() -> None:
    gone = f"127.0.0.1:{free_port()}"
    async with registry() as running:
        both = f"{gone},{running.endpoint}"
        leases, doctor = await asyncio.gather(
            run("leases", "--json", "--registry", both), run("doctor", "--json", "--registry", both)
        )
        assert [x["lease_id"] for x in leases.lines] == ["a"]
        assert doctor.status == 4
        told = {x["subject"]: x for x in doctor.lines if x["about"] == "health"}
        assert told[running.endpoint]["text"] == "serving"
        assert "Connection refused" in str(told[gone]["text"])


async def test_what_operators_ask() -> None:
    async with registry() as running:
        leases, engines, hit, miss = await asyncio.gather(
            running.ask("leases", "--json"),
            running.ask("engines", "--json"),
            running.ask("resolve", "--tenant", "acme", "--digests", digests("xyw").hex(), "--json"),
            running.ask("resolve", "--tenant", "other", "--lease", "a", "--json"),
        )
        assert [(x["lease_id"], x["tenant"], x["state"]) for x in leases.lines] == [("a", "acme", "live")]
        assert [(x["engine_id"], x["connected"], x["leases"]) for x in engines.lines] == [("d0", True, 1)]
        assert (hit.status, hit.lines[0]["lease_id"], hit.lines[0]["matched_strides"]) == (0, "a", 2)
        assert (miss.status, miss.lines[0]["miss"]) == (3, "unknown")

        table, bad = await asyncio.gather(running.ask("leases"), running.ask("resolve", "--digests", "not hex"))
        head, row, _ = table.out.splitlines()
        assert head.split()[:4] == ["LEASE", "TENANT", "CONVERSATION", "ENGINE"]
        assert row.split()[:4] == ["a", "acme", "chat", "d0"]
        assert bad.status == 2


async def test_an_end_is_seen_by_a_watch() -> None:
    async with registry() as running:
        async with RegistryClient(running.endpoint) as client:
            revision = (await client.list_leases()).revision
        done = await running.ask("end", "--tenant", "acme", "--conversation", "chat", "--json")
        assert done.lines == [{"ended": 1}]
        watched, again = await asyncio.gather(
            running.ask("watch", "--from-revision", str(revision), "--count", "1", "--json"),
            running.ask("end", "--tenant", "acme", "--conversation", "chat"),
        )
        (event,) = watched.lines
        assert (event["revision"], event["type"], event["lease_id"]) == (revision + 1, "ended", "a")
        assert event["end_reason"] == "released"
        assert again.status == 0
        assert again.out.startswith("0 leases ended: none matched")


async def test_a_drain_ends_what_an_engine_lends() -> None:
    async with registry() as running:
        drained, unknown = await asyncio.gather(
            running.ask("drain", "d0", "--json"), running.ask("drain", "nothing-like-it")
        )
        assert (drained.status, drained.lines) == (0, [{"ended": 1}])
        pushed = await running.lender.hear()
        assert [(x.lease_id, x.reason) for x in pushed.end.leases] == [("a", pb.END_REASON_DRAINED)]
        assert (unknown.status, unknown.out) == (1, "")
        assert "nothing-like-it" in unknown.err


async def _serve_health(port: int) -> asyncio.Server:
    """An engine's API, as far as a doctor asks."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", port)


async def test_a_doctor_tells_an_engine_that_does_not_lend_from_one_that_is_down() -> None:
    up, down = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    async with registry() as running, await _serve_health(int(up.rpartition(":")[2])):
        well, ill, away = await asyncio.gather(
            running.ask("doctor", "--decode", "http://d0/v1", "--decode", f"d0@{down}", "--json"),
            running.ask("doctor", "--decode", up, "--decode", down, "--json"),
            run("doctor", "--registry", f"127.0.0.1:{free_port()}"),
        )
        assert well.status == 0, well.out
        assert {x["about"] for x in well.lines} >= {"registry", "health", "session", "decode"}
        assert ill.status == 4
        advice = {x["subject"]: str(x["advice"]) for x in ill.lines if x["about"] == "decode"}
        assert "kv_connector_module_path" in advice[up]
        assert advice[down] == "start the engine"
        assert away.status == 1
        assert "to do: see that `kvlease registry` runs there" in away.out


async def test_a_doctor_says_of_an_engine_that_cannot_be_asked_why() -> None:
    odd = {
        "http://{registry}": "what answers there speaks no HTTP/1.1",
        "http://127.0.0.1:abc": "no URL that can be asked: nonnumeric port",
        "http://h%00st": "no URL that can be asked",
        "http://[::1": "Invalid IPv6 URL",
    }
    async with registry() as running:
        urls = {url.format(registry=running.endpoint): fault for url, fault in odd.items()}
        outcome = await running.ask("doctor", "--json", *(x for url in urls for x in ("--decode", url)))
        assert (outcome.status, outcome.err) == (4, "")
        told = {x["subject"]: str(x["text"]) for x in outcome.lines if x["about"] == "decode"}
        assert told.keys() == urls.keys()
        assert all(fault in told[url] for url, fault in urls.items()), told


async def test_commands_prove_who_they_are(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.server()
    engine = authority.client("engine", "kvlease://lender/d0?tenant=*")
    own = authority.client("me", "kvlease://operator/me")
    files = ("--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-ca", str(server.ca))
    async with registry(*files, credentials=engine.credentials) as running:
        mine = {"KVLEASE_TLS_CA": str(own.ca), "KVLEASE_TLS_CERT": str(own.cert), "KVLEASE_TLS_KEY": str(own.key)}
        flags = ("--tls-ca", str(engine.ca), "--tls-cert", str(engine.cert), "--tls-key", str(engine.key))
        known, wrong_role, nobody, unusable = await asyncio.gather(
            run("leases", "--json", KVLEASE_REGISTRY=running.endpoint, **mine),
            running.ask("leases", *flags),
            running.ask("doctor"),
            running.ask("leases", "--tls-ca", str(tmp_path / "missing")),
        )
        assert [x["lease_id"] for x in known.lines] == ["a"]
        assert (wrong_role.status, wrong_role.out) == (1, "")
        assert "PERMISSION_DENIED" in wrong_role.err
        assert nobody.status == 1
        assert (unusable.status, "No such file" in unusable.err) == (2, True)


async def test_whose_certificate_is_not_believed_is_said(tmp_path: Path) -> None:
    authority, foreign = Authority(tmp_path / "own"), Authority(tmp_path / "foreign", "foreign")
    server, engine = authority.server(), authority.client("engine", "kvlease://lender/d0?tenant=*")
    stranger = foreign.client("me", "kvlease://operator/me")
    files = ("--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-ca", str(server.ca))
    own_pair = ("--tls-cert", str(stranger.cert), "--tls-key", str(stranger.key))
    async with registry(*files, credentials=engine.credentials) as running:
        server_not, client_not, doctor = await asyncio.gather(
            running.ask("leases", "--tls-ca", str(foreign.ca)),
            running.ask("leases", "--tls-ca", str(authority.ca), *own_pair),
            running.ask("doctor", "--tls-ca", str(foreign.ca)),
        )
    assert [x.status for x in (server_not, client_not, doctor)] == [1, 1, 1]
    assert "--tls-cert" in client_not.err.splitlines()[-1]
    for told in (server_not.err, doctor.out):
        assert f"{running.endpoint}: CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate" in told
        assert "see that --tls-ca is the CA of its certificate" in told
        assert ": OK" not in told.splitlines()[-1]


async def test_health_is_for_probes() -> None:
    async with registry() as running:
        serving, live = await asyncio.gather(running.ask("health", "--json"), running.ask("health", "--live"))
        assert (serving.status, serving.lines) == (0, [{"registry": running.endpoint, "health": "SERVING"}])
        assert (live.status, live.out) == (0, "SERVING\n")
    gone = await run("health", "--live", "--registry", running.endpoint, "--timeout-ms", "500")
    assert (gone.status, gone.out) == (1, "")
    assert running.endpoint in gone.err


async def test_health_of_several_replicas_is_that_of_one_that_serves() -> None:
    gone, nowhere = f"127.0.0.1:{free_port()}", "127.0.0.1:1"
    async with registry() as running:
        serving, live = await asyncio.gather(
            run("health", "--json", "--registry", f"{gone},{running.endpoint}"),
            run("health", "--live", KVLEASE_REGISTRY=f"{gone}, {running.endpoint}"),
        )
        assert (serving.status, serving.lines) == (0, [{"registry": running.endpoint, "health": "SERVING"}])
        assert (live.status, live.out) == (0, "SERVING\n")
    none = await run("health", "--registry", f"{gone},{nowhere}", "--timeout-ms", "1000")
    assert (none.status, none.out) == (1, "")
    assert f"no answer from {gone}: " in none.err
    assert f"no answer from {nowhere}: " in none.err


async def test_health_tells_a_registry_without_its_store_from_one_that_hangs() -> None:
    here, nobody = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    given = ("--listen", here, "--metrics-listen", "none", "--store", f"etcd://{nobody}")
    async with started("registry", *given) as process:

        async def answers() -> bool:
            return (await run("health", "--live", "--registry", here)).status == 0

        await eventually(answers, "it answers")
        assert process.returncode is None
        ready = await run("health", "--registry", here)
        assert (ready.status, ready.out) == (1, "NOT_YET\n")
        process.send_signal(signal.SIGSTOP)
        try:
            hung = await run("health", "--live", "--registry", here, "--timeout-ms", "1000")
        finally:
            process.send_signal(signal.SIGCONT)
        assert (hung.status, hung.out) == (1, "")


async def test_sigterm_stops_the_registry_in_good_order() -> None:
    async with registry() as running:
        running.process.send_signal(signal.SIGTERM)
        while (pushed := await running.lender.hear()).WhichOneof("message") != "reconnect":
            pass
        assert pushed.WhichOneof("message") == "reconnect"
        await running.lender.close()
        outcome = await ended(running.process)
        assert outcome.status == 0
        messages = [json.loads(line)["message"] for line in outcome.err.splitlines()]
        assert any("serves on" in x for x in messages)
        assert any("stopped" in x for x in messages)
