"""Identity in the settings of registry, connector and router: what fits together, and what is refused with which words.

No sockets. Files are only asked for, never read further than that they are there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kvlease.connector.settings import ConnectorSettings, SettingsInvalid
from kvlease.registry import settings as registry_settings
from kvlease.registry.client_credentials import Credentials, CredentialsInvalid, is_loopback
from kvlease.registry.flags import SettingsError
from kvlease.router import settings as router_settings

OPEN = ["--listen", "0.0.0.0:7411"]
CERTIFICATE = ["--tls-cert", "c", "--tls-key", "k"]
ENGINES = ["--prefill", "http://p", "--decode", "http://d"]
TOKEN = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--listen", "localhost:7411"],
        ["--listen", "127.1.2.3:7411"],
        ["--listen", "[::1]:7411"],
        [*OPEN, "--insecure"],
        [*OPEN, *CERTIFICATE, "--tls-ca", "a"],
        [*OPEN, *CERTIFICATE, "--token-file", "t"],
        [*OPEN, "--token-file", "t", "--insecure"],
        ["--token-file", "t"],
    ],
)
def test_a_registry_that_may_start(argv: list[str]) -> None:
    registry_settings.load(argv)


@pytest.mark.parametrize(
    ("argv", "flag", "words"),
    [
        (OPEN, "--listen", "--insecure"),
        (["--listen", "[::]:7411"], "--listen", "--insecure"),
        (["--listen", "registry.example:7411"], "--listen", "--insecure"),
        ([*OPEN, *CERTIFICATE], "--listen", "nobody would have to say who they are"),
        ([*OPEN, "--token-file", "t"], "--token-file", "unencrypted"),
        (["--tls-cert", "c"], "--tls-cert", "give both or neither"),
        (["--tls-ca", "a"], "--tls-ca", "needs --tls-cert"),
        ([*CERTIFICATE, "--tls-ca", "a", "--token-file", "t"], "--token-file", "not both"),
    ],
)
def test_a_registry_that_may_not_says_what_to_change(argv: list[str], flag: str, words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        registry_settings.load(argv)
    assert str(refused.value).startswith(f"{flag} (")
    assert words in str(refused.value)


def test_what_is_loopback() -> None:
    assert all(is_loopback(x) for x in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"))
    assert not any(is_loopback(x) for x in ("", "0.0.0.0", "::", "10.0.0.1", "localhost.example", "registry"))


@pytest.mark.parametrize("given", [{"tls_cert": "c"}, {"tls_key": "k"}, {"tls_cert": "c", "tls_key": "k"}])
def test_credentials_that_do_not_fit_together(given: dict[str, str]) -> None:
    with pytest.raises(CredentialsInvalid):
        Credentials(**given)


def token_file(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("text", ["", "short", f"{TOKEN} {TOKEN}", f"{TOKEN}\n{TOKEN}", "é" * 40])
def test_what_is_no_token_is_refused_without_being_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(CredentialsInvalid) as refused:
        Credentials(token_file=token_file(tmp_path / "t", text)).check("127.0.0.1:1")
    assert not text or text not in str(refused.value)


def test_an_engine_does_not_start_with_credentials_it_cannot_use(tmp_path: Path) -> None:
    good = token_file(tmp_path / "t", TOKEN)
    settings = ConnectorSettings.load({"registry": "127.0.0.1:1", "token_file": good})
    assert settings.credentials == Credentials(token_file=good)
    assert TOKEN not in repr(settings)
    for given, words in (
        ({"registry": "registry.example:1", "token_file": good}, "unencrypted"),
        ({"registry": "127.0.0.1:1", "tls_ca": str(tmp_path / "none")}, "No such file"),
        ({"registry": "127.0.0.1:1", "tls_cert": "c"}, "give both or neither"),
    ):
        with pytest.raises(SettingsInvalid, match=words):
            ConnectorSettings.load(given)


def test_a_router_does_not_start_with_credentials_it_cannot_use(tmp_path: Path) -> None:
    good = token_file(tmp_path / "t", TOKEN)
    assert router_settings.load([*ENGINES, "--token-file", good]).credentials == Credentials(token_file=good)
    for argv, words in (
        (["--registry", "registry.example:1", "--token-file", good], "unencrypted"),
        (["--tls-ca", str(tmp_path / "none")], "No such file"),
        (["--tls-cert", "c"], "give both or neither"),
    ):
        with pytest.raises(SettingsError, match=words):
            router_settings.load([*ENGINES, *argv])
