"""The connector's settings and request parameters: a wrong value is refused by name, a right one is kept.

No engine here: what an engine must look like is checked in tests/engines.
"""

from __future__ import annotations

import json

import pytest
from kvlease.connector.engine_facts import EngineUnsupported, check_side_channel, check_version
from kvlease.connector.request_params import RequestParams, engine_params, parse
from kvlease.connector.settings import ConnectorSettings, Mode, SettingsInvalid
from kvlease.registry.values import ConversationId, LeaseId, OnDeadline, TenantId

DEFAULT = TenantId("default")


def settings(**given: object) -> ConnectorSettings:
    return ConnectorSettings.load({"registry": "127.0.0.1:7411", **given})


def test_the_registry_is_all_that_must_be_said() -> None:
    loaded = settings()
    assert (loaded.lease_ttl_ms, loaded.on_deadline, loaded.resolve_wait_ms) == (480_000, OnDeadline.LAPSE, 50)
    with pytest.raises(SettingsInvalid, match="registry: Field required"):
        ConnectorSettings.load({})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("registry", "no-port"),
        ("registry", "host:0"),
        ("registry", "host:99999"),
        ("lease_ttl_ms", -1),
        ("lease_ttl_ms", "soon"),
        ("max_lifetime_ms", -1),
        ("on_deadline", "never"),
        ("lease_share", 0),
        ("lease_share", 1.5),
        ("mode", "forever"),
        ("tenant_share", 0),
        ("keep_free", 1),
        ("max_leases", 0),
        ("resolve_wait_ms", 0),
        ("read_limit_ms", 10),
        ("default_tenant", "two words"),
        ("metrics", "9090"),
        ("no_such_setting", 1),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(SettingsInvalid, match=rf"\b{name}: "):
        settings(**{name: value})


@pytest.mark.parametrize(
    "url",
    [
        "decode-0:8200",
        "x y",
        "http://",
        "http:///v1",
        "http://:8200",
        "ftp://decode-0:8200",
        "HTTP://decode-0:8200",
        "http://@decode-0:8200",
        "http://user:pw@decode-0:8200",
        "http://user@decode-0",
        "http://decode-0:8200 ",
        "http://decode 0:8200",
        "http://decode-0:8200/\n",
        "http://décode:8200",
        "http://decode-0:port",
        "http://decode-0:99999",
        "http://decode-0:0",
        "http://[::1:8200",
        "http://decode-0:8200/?a=b",
        "http://decode-0:8200/#a",
    ],
)
def test_an_api_url_that_no_router_could_use_is_refused(url: str) -> None:
    with pytest.raises(SettingsInvalid, match=r"api_url: .*must be http://HOST:PORT or https://HOST:PORT") as refused:
        settings(api_url=url)
    assert "pw" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["", "http://decode-0:8200", "https://decode.example/v1/", "http://10.0.0.7:1", "http://[::1]:8200"]
)
def test_an_api_url_is_kept_as_it_is(url: str) -> None:
    assert settings(api_url=url).api_url == url


def test_a_mode_says_what_is_not_said_otherwise() -> None:
    fixed, heartbeat, elastic = settings(), settings(mode="heartbeat"), settings(mode="elastic")
    assert (fixed.mode, fixed.lease_ttl_ms, fixed.max_lifetime_ms, fixed.renewable) == (Mode.FIXED, 480_000, 0, False)
    assert (heartbeat.lease_ttl_ms, heartbeat.max_lifetime_ms, heartbeat.renewable) == (60_000, 0, True)
    assert (elastic.lease_ttl_ms, elastic.max_lifetime_ms, elastic.renewable) == (60_000, 3_600_000, False)
    assert settings(mode="heartbeat", lease_ttl_ms=5_000).lease_ttl_ms == 5_000


def test_a_mode_in_the_environment_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLEASE_CONNECTOR_MODE", "elastic")
    monkeypatch.setenv("KVLEASE_CONNECTOR_TENANT_SHARES", '{"small": 0.1}')
    loaded = settings()
    assert (loaded.mode, loaded.lease_ttl_ms, loaded.tenant_shares) == (Mode.ELASTIC, 60_000, {"small": 0.1})


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"mode": "heartbeat", "renewable": False}, "mode heartbeat needs renewable: true"),
        ({"mode": "heartbeat", "lease_ttl_ms": 1_999}, "mode heartbeat needs a lease_ttl_ms of 2000 at least"),
        ({"mode": "elastic", "max_lifetime_ms": 0}, "mode elastic needs a max_lifetime_ms"),
        ({"mode": "elastic", "max_lifetime_ms": 59_999}, "no less than lease_ttl_ms"),
        ({"tenant_shares": {"two words": 0.1}}, "tenant_shares.two words"),
        ({"tenant_shares": {"a": 1.5}}, "tenant_shares.a"),
    ],
)
def test_a_mode_that_cannot_work_is_refused(given: dict[str, object], advice: str) -> None:
    with pytest.raises(SettingsInvalid, match=advice):
        settings(**given)


def test_a_longest_lifetime_below_the_ttl_is_refused() -> None:
    with pytest.raises(SettingsInvalid, match="max_lifetime_ms must be 0, or no less than lease_ttl_ms, 480000"):
        settings(max_lifetime_ms=479_999)
    assert settings(max_lifetime_ms=480_000).max_lifetime_ms == 480_000


def test_the_environment_fills_what_the_engine_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLEASE_CONNECTOR_REGISTRY", "registry.example:7411")
    monkeypatch.setenv("KVLEASE_CONNECTOR_LEASE_TTL_MS", "60000")
    assert ConnectorSettings.load({}).registry == "registry.example:7411"
    assert ConnectorSettings.load({"lease_ttl_ms": 5_000}).lease_ttl_ms == 5_000
    assert settings().lease_ttl_ms == 60_000


def test_untested_engines_are_refused_unless_told_to_try() -> None:
    check_version("0.32.0", settings())
    check_version("0.32.3+cpu", settings())
    for version in ("0.33.0", "0.3.2", "1.0", "dev"):
        with pytest.raises(EngineUnsupported, match=r"tested with vLLM 0\.32.*allow_untested_engine"):
            check_version(version, settings())
        check_version(version, settings(allow_untested_engine=True))


def test_a_lender_that_others_cannot_reach_is_refused() -> None:
    """D1: the side channel's host is left at localhost, the registry is elsewhere."""
    check_side_channel("localhost", settings())
    check_side_channel("10.0.0.7", settings(registry="10.0.0.1:7411"))
    with pytest.raises(EngineUnsupported, match="VLLM_NIXL_SIDE_CHANNEL_HOST"):
        check_side_channel("localhost", settings(registry="10.0.0.1:7411"))


def test_request_parameters() -> None:
    assert parse(None, DEFAULT) is None
    assert parse({"do_remote_decode": True}, DEFAULT) is None
    assert parse({"kvlease": {}}, DEFAULT) == RequestParams(tenant=DEFAULT)
    told = {"tenant": "t", "conversation": "c", "lease_id": "l", "recompute_threshold": 0, "ttl_ms": 5}
    assert parse({"kvlease": {**told, "on_deadline": "end"}}, DEFAULT) == RequestParams(
        tenant=TenantId("t"),
        conversation=ConversationId("c"),
        lease_id=LeaseId("l"),
        recompute_threshold=0,
        ttl_ms=5,
        on_deadline=OnDeadline.END,
    )


@pytest.mark.parametrize(
    "told",
    [
        [],
        "text",
        {"tenant": "two words"},
        {"conversation": 7},
        {"conversation": "x" * 129},
        {"lease_id": "line\nbreak"},
        {"traceparent": "x" * 56},
        {"recompute_threshold": -1},
        {"recompute_threshold": True},
        {"ttl_ms": 1.5},
        {"on_deadline": "whenever"},
    ],
)
def test_malformed_request_parameters_are_an_error_of_one_kind(told: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse({"kvlease": told}, DEFAULT)


def test_engine_parameters_must_be_whole() -> None:
    whole = {"remote_engine_id": "e", "remote_request_id": "kvl:1", "remote_host": "h", "remote_port": 1, "more": [1]}
    assert engine_params(json.dumps(whole).encode()) == whole
    for raw in (b"", b"[]", b"{", b"\xff", json.dumps({"remote_host": "h"}).encode()):
        with pytest.raises(ValueError, match=r"\w"):
            engine_params(raw)
