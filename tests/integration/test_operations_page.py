"""The commands of registry/OPERATIONS.md do what the page says: they are taken from it and run.

What would need another host (addresses, a whole fleet) is not run.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from kvlease.registry.errors import TABLE
from kvlease.registry.identity import Identity
from kvlease.registry.identity_tokens import parse_tokens
from kvlease.registry.pem import check_bundle, check_pair
from kvlease.registry.secret_files import read_public, read_secret
from kvlease.registry.server import RegistryServer
from kvlease.registry.settings import NO_METRICS, RegistrySettings

from tests.integration.raw_session import LIMIT_S, RawSession, lease, raw_stub

PAGE = Path(__file__).resolve().parents[2] / "registry" / "OPERATIONS.md"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the page's commands need openssl")


def block(language: str, word: str) -> str:
    """The one block of the page that has `word` in it."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = [x for x in blocks if word in x]
    return str(found)


def run(script: str, folder: Path) -> None:
    subprocess.run(["bash", "-euc", script], cwd=folder, check=True, capture_output=True, timeout=30)


@needs_openssl
def test_certificates_as_the_page_makes_them(tmp_path: Path) -> None:
    run(block("sh", "issue()"), tmp_path)
    check_bundle(tmp_path / "ca.pem", read_public(tmp_path / "ca.pem"))
    identities = {}
    for cert in sorted(tmp_path.glob("*.pem")):
        if cert.stem != "ca":
            check_pair(cert, cert.with_suffix(".key"))
            read_secret(cert.with_suffix(".key"))
            names = x509.load_pem_x509_certificate(cert.read_bytes()).extensions.get_extension_for_class(
                x509.SubjectAlternativeName
            )
            uris = names.value.get_values_for_type(x509.UniformResourceIdentifier)
            identities[cert.stem] = Identity.parse(uris).name if uris else ""
    assert identities == {
        "alice": "operator/alice",
        "decode-0": "lender/decode-0",
        "prefill-0": "borrower/prefill-0",
        "registry": "",
        "router-0": "router/router-0",
    }


@needs_openssl
def test_tokens_as_the_page_makes_them(tmp_path: Path) -> None:
    commands = [x for x in block("sh", "sha256sum").splitlines() if not x.startswith("kvlease")]
    run("\n".join(commands), tmp_path)
    (identity,) = parse_tokens(read_secret(tmp_path / "tokens"), "tokens").values()
    assert identity.name == "router/router-0"
    read_secret(tmp_path / "router-0.token")


def test_the_page_has_the_table_of_errors() -> None:
    (table,) = re.findall(r"^\| reason \|.*\n(?:\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    _, _, *lines = table.splitlines()
    shown = {cells[1].strip(" `"): (cells[2].strip(" `"), cells[3].strip()) for cells in (x.split("|") for x in lines)}
    assert shown == {
        reason.value: (row.status.value, f"{row.retry_after_ms} ms" if row.retry_after_ms is not None else "")
        for reason, row in TABLE.items()
    }


def test_the_page_has_every_limit_with_its_default() -> None:
    (table,) = re.findall(r"^\| limit \|.*\n(?:\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    counts = re.compile(r"(max|keep)_\w+(?<!_ms)\Z")
    for name, field in RegistrySettings.model_fields.items():
        if not counts.match(name):
            continue
        (line,) = [x for x in table.splitlines() if f"`--{name.replace('_', '-')}`" in x]
        assert ("none" if not field.default else f"{field.default:,}".replace(",", " ")) in line, name


async def test_a_look_inside_with_the_reflection_client() -> None:
    settings = RegistrySettings(listen="127.0.0.1:0", metrics_listen=NO_METRICS)
    async with RegistryServer(settings) as server, raw_stub(server.endpoint) as stub:
        lender = RawSession(stub)
        await lender.start(held=[lease("a", "xyz", tenant="default", conversation="chat-1")])
        shown: list[tuple[Any, ...]] = []
        code = block("python", "ProtoReflection").replace("localhost:7411", server.endpoint)
        names: dict[str, Any] = {"print": lambda *values: shown.append(values)}
        async with asyncio.timeout(LIMIT_S):
            await asyncio.to_thread(exec, code, names)
        names["channel"].close()
        services, hit, ended, events = shown
        assert "kvlease.v1.Registry" in services[0]
        assert hit[:2] == ("a", "d0")
        assert ended == (1,)
        (event,) = events[0]
        assert (event.lease.lease_id, event.lease.end_reason) == ("a", 2)
