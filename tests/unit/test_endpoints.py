"""Lists of endpoints as settings and flags give them: what is taken, and what is refused with which words.

The same words in all three parts. No names are looked up here.
"""

from __future__ import annotations

import pytest
from kvlease.connector.settings import ConnectorSettings, SettingsInvalid
from kvlease.registry.client_credentials import Credentials, CredentialsInvalid
from kvlease.registry.client_endpoints import MAX_ENDPOINTS, Endpoint, EndpointsInvalid, parse_endpoints
from kvlease.registry.flags import SettingsError
from kvlease.router import settings as router_settings

ENGINES = ["--prefill", "http://p", "--decode", "http://d"]


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("registry.example:7411", ["registry.example:7411"]),
        ("10.0.0.1:7411,10.0.0.2:7411", ["10.0.0.1:7411", "10.0.0.2:7411"]),
        (" a:1 , b:2 ", ["a:1", "b:2"]),
        ("[2001:DB8::1]:7411,[::1]:1", ["[2001:db8::1]:7411", "[::1]:1"]),
        ("Registry.Example:7411", ["registry.example:7411"]),
        ("kvlease-registry.serving.svc:7411", ["kvlease-registry.serving.svc:7411"]),
    ],
)
def test_what_is_a_list(text: str, endpoints: list[str]) -> None:
    assert [str(x) for x in parse_endpoints(text)] == endpoints


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not empty"),
        ("a:1,", "a comma too many"),
        ("a:1,,b:2", "a comma too many"),
        ("http://registry.example:7411", "must be HOST:PORT without http://: registry.example:7411"),
        ("a:1,https://b:2/", "must be HOST:PORT without https://: b:2"),
        ("grpc://a:1", "must be HOST:PORT without grpc://: a:1"),
        ("registry.example", "must be HOST:PORT"),
        ("a:0", "the port from 1 to 65535"),
        ("a:65536", "the port from 1 to 65535"),
        ("a:٣", "the port from 1 to 65535"),
        ("a:1/path", "the port from 1 to 65535"),
        ("two words:1", "the host a name or an address"),
        ("::1:7411", r"needs brackets around an IPv6 address, as in '\[::1\]:7411'"),
        ("[a]:1", "must be HOST:PORT"),
        ("a:1,b:1,A:1", "names a:1 twice"),
        (",".join(f"a{number}:1" for number in range(MAX_ENDPOINTS + 1)), f"at most {MAX_ENDPOINTS}"),
    ],
)
def test_what_is_no_list_is_refused_by_all_with_the_same_words(text: str, words: str) -> None:
    with pytest.raises(EndpointsInvalid, match=words):
        parse_endpoints(text)
    with pytest.raises(SettingsInvalid, match=rf"registry: .*{words}"):
        ConnectorSettings.load({"registry": text})
    if text:  # an empty variable is none
        with pytest.raises(SettingsError, match=rf"--registry \(KVLEASE_ROUTER_REGISTRY\): .*{words}"):
            router_settings.load([*ENGINES, "--registry", text])


def test_lists_are_taken_from_settings_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    both = "registry-0.example:7411,registry-1.example:7411"
    monkeypatch.setenv("KVLEASE_CONNECTOR_REGISTRY", both)
    monkeypatch.setenv("KVLEASE_ROUTER_REGISTRY", both)
    assert ConnectorSettings.load({}).registry == both
    assert router_settings.load(ENGINES).registry == both


def test_only_a_list_of_loopback_addresses_is_local() -> None:
    assert ConnectorSettings.load({"registry": "127.0.0.1:1,localhost:2,[::1]:3"}).registry_is_local
    assert not ConnectorSettings.load({"registry": "127.0.0.1:1,10.0.0.1:2"}).registry_is_local


def test_a_token_travels_unencrypted_to_no_host_of_the_list() -> None:
    credentials = Credentials(token_file="t")
    with pytest.raises(CredentialsInvalid, match="unencrypted"):
        credentials.check("127.0.0.1:1,registry.example:1")
    with pytest.raises(CredentialsInvalid, match="No such file"):
        credentials.check("127.0.0.1:1,[::1]:1")


def test_names_are_told_from_addresses() -> None:
    assert [Endpoint(host, 1).is_address for host in ("10.0.0.1", "::1", "registry", "10.0.0")] == [
        True,
        True,
        False,
        False,
    ]
