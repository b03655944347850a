"""What is wrong with a deployment, judged from what the registry and the engines say: findings, each with its advice.

Pure: asking is `doctor.py`'s. Every finding is a sentence about one thing, and every problem says what to do.
Invariant: what is in order is said too, so that an empty list can only mean that nothing was looked at.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

from kvlease.registry.client_credentials import is_loopback
from kvlease.registry.values import Engine, EngineStatus, RegistryStatus, Survey
from kvlease.router.routes import base_url

SAME_EVERYWHERE: Final = ("lease_ttl_ms", "on_deadline", "stride_tokens", "recompute_threshold")
"""Labels of engines that should not differ within a fleet. Engines that do not have one are left out."""
_MODEL: Final = "model"
_KVLEASE: Final = re.compile(r"(?:^|, )kvlease ([^,\s]+)")
"""In what an engine says of its versions."""


class Grade(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """Works, and may not be what was meant."""
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`about`: what was checked; `subject`: on what; `advice`: what to do, "" if nothing."""

    grade: Grade
    about: str
    subject: str
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeEngine:
    """A decode engine that somebody said should lend. `fault` is why its API does not answer, "" if it does."""

    url: str
    engine_id: str = ""
    fault: str = ""


def examine(
    registry: str, survey: Survey, decode: Sequence[DecodeEngine] = (), *, own_version: str = ""
) -> list[Finding]:
    """All findings about the registry and its engines.

    `registry`: the HOST:PORT that was asked; `own_version`: of the kvlease that asks.
    """
    statuses = survey.engines
    engines = [status.engine for status in statuses]
    return [
        *_load(registry, survey.registry),
        *_releases(own_version, survey.registry, engines),
        *_sessions(statuses),
        *_labels(engines),
        *_versions(engines),
        *_fingerprints(engines),
        *_addresses(registry, engines),
        *_stops(engines),
        *(_lends(x, statuses) for x in decode),
    ]


def _load(registry: str, status: RegistryStatus) -> Iterable[Finding]:
    if status.shedding:
        yield Finding(
            grade=Grade.PROBLEM,
            about="load",
            subject=registry,
            text="refuses resolves: it has more to do than it can",
            advice="see in its metrics who asks so much, and what else runs on its host; give it a core of its own",
        )


def _releases(own_version: str, registry: RegistryStatus, engines: Sequence[Engine]) -> Iterable[Finding]:
    """Versions of kvlease itself: of the registry, of the engines that say theirs, and of this command."""
    pairs = [("registry", registry.version or None), ("this command", own_version or None)]
    pairs += [(engine.engine_id, found[1]) for engine in engines if (found := _KVLEASE.search(engine.version))]
    values = _by_value(pairs)
    subject = registry.replica_id or "registry"
    if not registry.version:
        yield Finding(
            grade=Grade.WARNING,
            about="kvlease",
            subject=subject,
            text="does not say its version: it is older than this command",
            advice="update the registry; registries go before engines and routers",
        )
    elif len(values) > 1:
        yield Finding(
            grade=Grade.WARNING,
            about="kvlease",
            subject=subject,
            text=f"versions differ: {_listed(values)}",
            advice="expected during an upgrade; bring all to one version, registries first",
        )
    else:
        yield Finding(grade=Grade.OK, about="kvlease", subject=subject, text=f"the same everywhere: {registry.version}")


def _sessions(statuses: Sequence[EngineStatus]) -> Iterable[Finding]:
    if not statuses:
        yield Finding(
            grade=Grade.PROBLEM,
            about="engines",
            subject="registry",
            text="no engine has a session",
            advice="start a decode engine with kv_connector_module_path kvlease.connector and this registry's address; "
            "its log says whether it lends, and if not, why",
        )
    for status in statuses:
        name = status.engine.engine_id
        if status.connected and not status.suspect:
            yield Finding(grade=Grade.OK, about="session", subject=name, text=f"connected, {status.leases} leases held")
            continue
        yield Finding(
            grade=Grade.PROBLEM,
            about="session",
            subject=name,
            text=f"{'silent' if status.connected else 'away'} for {status.silent_ms / 1000:.1f} s",
            advice="see whether the engine runs and can reach the registry; its leases are not resolved meanwhile",
        )


def _labels(engines: Sequence[Engine]) -> Iterable[Finding]:
    for label in SAME_EVERYWHERE:
        values = _by_value((engine.engine_id, dict(engine.labels).get(label)) for engine in engines)
        if len(values) > 1:
            yield Finding(
                grade=Grade.PROBLEM,
                about=label,
                subject=_names(values),
                text=f"engines disagree: {_listed(values)}",
                advice=f"give {label} the same value in the settings of all engines, and restart those it changes",
            )
        elif values:
            yield Finding(
                grade=Grade.OK, about=label, subject=_names(values), text=f"the same everywhere: {next(iter(values))}"
            )


def _versions(engines: Sequence[Engine]) -> Iterable[Finding]:
    values = _by_value((engine.engine_id, engine.version or None) for engine in engines)
    if len(values) > 1:
        yield Finding(
            grade=Grade.WARNING,
            about="version",
            subject=_names(values),
            text=f"engines disagree: {_listed(values)}",
            advice="expected during an upgrade; engines of different minor versions borrow nothing from each other",
        )
    elif values:
        yield Finding(
            grade=Grade.OK, about="version", subject=_names(values), text=f"the same everywhere: {next(iter(values))}"
        )


def _fingerprints(engines: Sequence[Engine]) -> Iterable[Finding]:
    """Engines of one model that cannot lend to each other."""
    of_model: dict[str, list[Engine]] = defaultdict(list)
    for engine in engines:
        model = dict(engine.fingerprint.fields).get(_MODEL)
        if model is not None:
            of_model[model].append(engine)
    for model, same in of_model.items():
        first, *others = same
        fields = sorted({x for other in others for x in first.fingerprint.differences(other.fingerprint)})
        if fields:
            yield Finding(
                grade=Grade.WARNING,
                about="fingerprint",
                subject=_names_of(same),
                text=f"engines of {model} differ in {', '.join(fields)}, so some cannot borrow from others",
                advice="start them with the same model, dtype and cache settings, unless that is what you want",
            )


def _addresses(registry: str, engines: Sequence[Engine]) -> Iterable[Finding]:
    far = not is_loopback(registry.rpartition(":")[0])
    for engine in engines:
        side_channel = dict(engine.labels).get("side_channel", "")
        if far and is_loopback(side_channel.rpartition(":")[0]):
            yield Finding(
                grade=Grade.PROBLEM,
                about="side channel",
                subject=engine.engine_id,
                text=f"lends under {side_channel}, which other hosts cannot reach",
                advice="set VLLM_NIXL_SIDE_CHANNEL_HOST to an address of its host that prefill engines can reach",
            )
        if far and engine.api_url and is_loopback(_host(engine.api_url)):
            yield Finding(
                grade=Grade.PROBLEM,
                about="api_url",
                subject=engine.engine_id,
                text=f"tells routers to send turns to {engine.api_url}, which other hosts cannot reach",
                advice="set api_url in its kvlease settings to the URL that routers use",
            )
    by_url: dict[str, list[Engine]] = defaultdict(list)
    for engine in engines:
        if engine.api_url:
            by_url[base_url(engine.api_url)].append(engine)
    for url, same in by_url.items():
        if len(same) > 1:
            yield Finding(
                grade=Grade.PROBLEM,
                about="api_url",
                subject=_names_of(same),
                text=f"several engines say that they are {url}",
                advice="give each engine its own api_url, or routers send turns to the wrong one",
            )


def _stops(engines: Sequence[Engine]) -> Iterable[Finding]:
    for engine in engines:
        if dict(engine.labels).get("shutdown_timeout_s") == "0":
            yield Finding(
                grade=Grade.WARNING,
                about="shutdown",
                subject=engine.engine_id,
                text="vLLM kills its core as soon as it is told to stop: its leases do not end, and its streams hang",
                advice="start it with --shutdown-timeout, some seconds less than it is given to stop (Kubernetes: 30)",
            )


def _lends(decode: DecodeEngine, statuses: Sequence[EngineStatus]) -> Finding:
    url = base_url(decode.url)
    for status in statuses:
        engine = status.engine
        if engine.engine_id == decode.engine_id or (not decode.engine_id and base_url(engine.api_url) == url):
            return Finding(grade=Grade.OK, about="decode", subject=decode.url, text=f"lends as {engine.engine_id}")
    if decode.fault:
        return Finding(
            grade=Grade.PROBLEM,
            about="decode",
            subject=decode.url,
            text=f"has no session here, and its API does not answer: {decode.fault}",
            advice="start the engine",
        )
    wanted = f"the engine id {decode.engine_id}" if decode.engine_id else f"the api_url {url}"
    return Finding(
        grade=Grade.PROBLEM,
        about="decode",
        subject=decode.url,
        text=f"answers, but no engine with {wanted} has a session here",
        advice="see that its --kv-transfer-config has kv_connector_module_path kvlease.connector (without it vLLM runs "
        "its own connector and says nothing), this registry's address, and the api_url or engine id used here",
    )


def _host(url: str) -> str:
    """Of the URL; "" if it has none: engines may say what they like."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _by_value(pairs: Iterable[tuple[str, str | None]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, value in pairs:
        if value is not None:
            found[value].append(name)
    return dict(found)


def _listed(values: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in sorted(values.items()))


def _names(values: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(sorted(name for names in values.values() for name in names))


def _names_of(engines: Iterable[Engine]) -> str:
    return ", ".join(sorted(engine.engine_id for engine in engines))
