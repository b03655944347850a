"""`kvlease doctor`: asks the registry and the decode engines how they are, and has it judged by `diagnosis.py`.

Asks only; changes nothing. Every question has a time limit; what cannot be asked becomes a finding, not a crash.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvlease.cli.diagnosis import DecodeEngine, Finding, Grade, examine
from kvlease.cli.faults import advice
from kvlease.registry.client import RegistryClient
from kvlease.registry.errors import KvleaseError
from kvlease.registry.release import installed_version
from kvlease.router.routes import base_url

_DIRECTLY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""As routers go to engines: whatever http_proxy says."""
_DECODE: Final = re.compile(r"(?:(?P<id>[^/]+)@)?(?P<url>https?://[^\s@]+)\Z")


def parse_decode(text: str) -> DecodeEngine:
    """[ENGINE_ID@]URL, as routers take it. Raises ValueError."""
    match = _DECODE.match(text)
    if match is None:
        raise ValueError(f"must be [ENGINE_ID@]URL with http:// or https://, not {text!r}")
    return DecodeEngine(url=match["url"], engine_id=match["id"] or "")


async def examine_deployment(
    client: RegistryClient, registry: str, decode: Sequence[DecodeEngine], *, timeout_ms: int
) -> list[Finding]:
    """All findings; if the registry does not answer, only that."""
    started = time.perf_counter()
    try:
        survey = await client.survey(timeout_ms=timeout_ms)
    except KvleaseError as error:
        return [_unreachable(registry, error)]
    took_ms = (time.perf_counter() - started) * 1_000
    findings = [
        Finding(
            grade=Grade.OK,
            about="registry",
            subject=registry,
            text=f"{survey.registry.replica_id or 'one that does not give its name'} answers within {took_ms:.0f} ms",
        ),
        *await _replicas(client),
    ]
    asked = await asyncio.gather(*(asyncio.to_thread(_ask, x, timeout_ms) for x in decode))
    return findings + examine(registry, survey, asked, own_version=installed_version())


def _unreachable(registry: str, error: KvleaseError) -> Finding:
    return Finding(
        grade=Grade.PROBLEM,
        about="registry",
        subject=registry,
        text=f"{error.message} ({error.reason.value})",
        advice=advice(error) or "see its log",
    )


async def _replicas(client: RegistryClient) -> list[Finding]:
    """What load balancers and kubelets are told, by each replica."""
    findings = []
    for address, error in await client.replicas.examine():
        if error is None:
            findings.append(Finding(grade=Grade.OK, about="health", subject=str(address), text="serving"))
            continue
        to_do = "lenders and borrowers use the others meanwhile: start it again, or take it out of the list"
        text = f"is not to be used: {error.message}"
        findings.append(Finding(grade=Grade.PROBLEM, about="health", subject=str(address), text=text, advice=to_do))
    return findings


def _ask(engine: DecodeEngine, timeout_ms: int) -> DecodeEngine:
    """Whether the engine's API is up. Blocks."""
    try:
        with _DIRECTLY.open(f"{base_url(engine.url)}/health", timeout=timeout_ms / 1_000):
            return engine
    except urllib.error.HTTPError as error:
        return replace(engine, fault=f"HTTP {error.code}")
    except http.client.InvalidURL as error:
        return replace(engine, fault=f"no URL that can be asked: {error}")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return replace(engine, fault=str(reason) or type(error).__name__)
    except http.client.HTTPException:
        return replace(engine, fault="what answers there speaks no HTTP/1.1")
