"""What `kvlease doctor` concludes from what it was told; no registry and no engine here.

Each fault is put into an otherwise sound fleet, and must be found there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from kvlease.cli.diagnosis import DecodeEngine, Finding, Grade, examine
from kvlease.cli.doctor import parse_decode
from kvlease.registry.values import Engine, EngineId, EngineStatus, Fingerprint, Incarnation, RegistryStatus, Survey

REGISTRY = "registry.example:7411"
OWN = "0.3.1"


def engine(
    name: str, *, version: str = f"kvlease {OWN}, vllm 0.32.0, nixl 1.5.1", dtype: str = "bf16", **labels: str
) -> Engine:
    own = {"lease_ttl_ms": "480000", "on_deadline": "lapse", "side_channel": f"{name}.example:5600", **labels}
    return Engine(
        engine_id=EngineId(name),
        incarnation=Incarnation(name.encode().ljust(16)),
        api_url=f"http://{name}.example:8000/v1",
        version=version,
        fingerprint=Fingerprint(hash=dtype.encode().ljust(16), fields=(("kv_dtype", dtype), ("model", "m"))),
        labels=tuple(sorted(own.items())),
    )


def status(of: Engine, *, connected: bool = True, suspect: bool = False) -> EngineStatus:
    return EngineStatus(
        engine=of,
        connected=connected,
        suspect=suspect,
        silent_ms=12_000 if suspect else 300,
        leases=3,
        leased_blocks=30,
        free_blocks=70,
        total_blocks=100,
    )


SOUND = (status(engine("d0")), status(engine("d1")))


def survey(statuses: Sequence[EngineStatus], *, version: str = OWN, shedding: bool = False) -> Survey:
    registry = RegistryStatus(replica_id="registry-0", version=version, shedding=shedding)
    return Survey(registry=registry, engines=tuple(statuses))


def faults(statuses: Sequence[EngineStatus], *decode: DecodeEngine, registry: str = REGISTRY) -> list[Finding]:
    return [x for x in examine(registry, survey(statuses), decode, own_version=OWN) if x.grade is not Grade.OK]


def test_a_sound_fleet_has_no_faults_and_says_what_was_looked_at() -> None:
    decode = (DecodeEngine(url="http://d0.example:8000"), DecodeEngine(url="http://other", engine_id="d1"))
    assert faults(SOUND, *decode) == []
    looked_at = {x.about for x in examine(REGISTRY, survey(SOUND), decode, own_version=OWN)}
    assert looked_at == {"kvlease", "session", "lease_ttl_ms", "on_deadline", "version", "decode"}


@pytest.mark.parametrize(
    ("statuses", "about", "grade", "words"),
    [
        ((), "engines", Grade.PROBLEM, "no engine"),
        ((status(engine("d0"), suspect=True),), "session", Grade.PROBLEM, "silent for 12.0 s"),
        ((status(engine("d0"), connected=False),), "session", Grade.PROBLEM, "away"),
        (
            (*SOUND, status(engine("d2", lease_ttl_ms="60000"))),
            "lease_ttl_ms",
            Grade.PROBLEM,
            "480000 on d0, d1; 60000 on d2",
        ),
        ((*SOUND, status(engine("d2", on_deadline="end"))), "on_deadline", Grade.PROBLEM, "end on d2"),
        (
            tuple(status(engine(x, recompute_threshold=y)) for x, y in (("a", "64"), ("b", "128"))),
            "recompute_threshold",
            Grade.PROBLEM,
            "128 on b; 64 on a",
        ),
        ((*SOUND, status(engine("d2", version="vllm 0.33.0"))), "version", Grade.WARNING, "vllm 0.33.0 on d2"),
        ((*SOUND, status(engine("d2", dtype="fp8"))), "fingerprint", Grade.WARNING, "differ in kv_dtype"),
        ((status(engine("d0", side_channel="localhost:5600")),), "side channel", Grade.PROBLEM, "localhost:5600"),
        ((status(engine("d0", side_channel="127.0.0.1:5600")),), "side channel", Grade.PROBLEM, "127.0.0.1:5600"),
        ((status(replace(engine("d0"), api_url="http://localhost:8000")),), "api_url", Grade.PROBLEM, "localhost"),
        (
            (*SOUND, status(replace(engine("d2"), api_url="http://d0.example:8000/"))),
            "api_url",
            Grade.PROBLEM,
            "several engines",
        ),
        ((status(engine("d0", shutdown_timeout_s="0")),), "shutdown", Grade.WARNING, "leases do not end"),
    ],
)
def test_each_fault_is_found_alone_and_with_advice(
    statuses: Sequence[EngineStatus], about: str, grade: Grade, words: str
) -> None:
    (found,) = faults(statuses)
    assert (found.about, found.grade) == (about, grade)
    assert words in found.text
    assert found.advice


@pytest.mark.parametrize("seconds", ["20", ""])
def test_engines_that_take_their_time_to_stop_or_do_not_say_are_no_finding(seconds: str) -> None:
    assert faults((status(engine("d0", shutdown_timeout_s=seconds)),)) == []


def test_on_one_host_loopback_is_where_engines_are() -> None:
    local = status(replace(engine("d0", side_channel="127.0.0.1:5600"), api_url="http://127.0.0.1:8000"))
    assert faults((local,), registry="127.0.0.1:7411") == []


def test_an_engine_may_give_a_url_that_nobody_can_read() -> None:
    assert faults((status(replace(engine("d0"), api_url="http://[::1")),)) == []


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (DecodeEngine(url="http://d9.example"), "kv_connector_module_path"),
        (DecodeEngine(url="http://d0.example:8000", engine_id="d9"), "kv_connector_module_path"),
        (DecodeEngine(url="http://d9.example", fault="Connection refused"), "start the engine"),
    ],
)
def test_a_decode_engine_without_a_session(decode: DecodeEngine, words: str) -> None:
    (found,) = faults(SOUND, decode)
    assert (found.about, found.subject, found.grade) == ("decode", decode.url, Grade.PROBLEM)
    assert words in found.advice


def test_decode_engines_are_written_as_for_the_router() -> None:
    assert parse_decode("http://d0:8000/v1") == DecodeEngine(url="http://d0:8000/v1")
    assert parse_decode("d0@https://d0") == DecodeEngine(url="https://d0", engine_id="d0")
    for text in ("d0:8000", "ftp://d0", "", "http://user@d0"):
        with pytest.raises(ValueError, match="ENGINE_ID"):
            parse_decode(text)


def of_registry(told: Survey) -> list[Finding]:
    return [x for x in examine(REGISTRY, told, own_version=OWN) if x.about in ("kvlease", "load")]


def test_versions_of_registry_engines_and_command_are_compared() -> None:
    (same,) = of_registry(survey(SOUND))
    assert (same.grade, same.subject, same.text) == (Grade.OK, "registry-0", f"the same everywhere: {OWN}")
    (older,) = of_registry(survey(SOUND, version="0.3.0"))
    assert (older.grade, older.text) == (
        Grade.WARNING,
        f"versions differ: 0.3.0 on registry; {OWN} on this command, d0, d1",
    )
    (silent,) = of_registry(survey(SOUND, version=""))
    assert silent.grade is Grade.WARNING
    assert "older" in silent.text
    strange = [status(engine("d0", version=f"vllm 0.32.0, kvlease {OWN}")), status(engine("d1", version="something"))]
    (told,) = of_registry(survey(strange))
    assert told.grade is Grade.OK, "an engine that does not say its kvlease is not compared"


def test_a_registry_that_refuses_resolves_is_a_problem() -> None:
    (load, _) = of_registry(survey(SOUND, shedding=True))
    assert (load.about, load.grade, load.subject) == ("load", Grade.PROBLEM, REGISTRY)
    assert "resolves" in load.text
