"""What an operator can set on a router: flags, then KVLEASE_ROUTER_* environment variables, then the defaults here.

Validation happens here and nowhere else; the rest of the router trusts these values. Durations are milliseconds and
limits say their unit in their name. `--help` is made from the descriptions below.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from kvlease.registry import flags
from kvlease.registry.client_credentials import Credentials, CredentialsInvalid
from kvlease.registry.client_endpoints import parse_endpoints
from kvlease.registry.flags import Shown, split_address
from kvlease.registry.lease_copy import MAX_COPIED_LEASES
from kvlease.registry.values import DEFAULT_TENANT, EngineId, TenantId, is_id
from kvlease.router.routes import Role, Target, base_url
from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

NO_REGISTRY: Final = "none"
"""Switches leases off: the router is then a plain prefill/decode proxy."""
_DAY_MS: Final = 24 * 3600 * 1000
_MIB: Final = 1024 * 1024
_ENGINE: Final = re.compile(r"(?:(?P<id>[^/]+)@)?(?P<url>https?://\S+)\Z")

Ms = Annotated[int, Field(ge=1, le=_DAY_MS), Shown("MS")]
Count = Annotated[int, Field(ge=1, le=1_000_000), Shown("N")]
Bytes = Annotated[int, Field(ge=1_024, le=1_024 * _MIB), Shown("BYTES")]
Address = Annotated[str, Shown("HOST:PORT")]
File = Annotated[str, Shown("FILE")]
LogLevel = Literal["debug", "info", "warning", "error"]
Engines = Annotated[tuple[str, ...], NoDecode, Shown("URL")]


class RouterSettings(BaseSettings):
    """OpenAI-compatible router for prefill/decode engines that lend and borrow KV blocks."""

    model_config = SettingsConfigDict(
        env_prefix="KVLEASE_ROUTER_",
        env_ignore_empty=True,
        frozen=True,
        cli_prog_name="kvlease router",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    listen: Address = Field("127.0.0.1:8000", description="where to serve; port 0 picks a free one")
    prefill: Engines = Field((), description="of a prefill engine; repeat for several (commas in the environment)")
    decode: Annotated[Engines, Shown("[ENGINE_ID@]URL")] = Field(
        (),
        description="of a decode engine; repeat for several. The id is needed only where engines publish another URL "
        "for themselves than the one the router uses",
    )
    registry: Annotated[str, Shown("HOST:PORT,...")] = Field(
        "127.0.0.1:7411",
        description='of the registry; several with commas between, or one name for all of them; "none": no leases',
    )
    tls_ca: File = Field("", description="the CA of the registry's certificate; without it, no TLS")
    tls_cert: File = Field("", description="this router's certificate, with its kvlease:// names")
    tls_key: File = Field("", description="the certificate's private key")
    token_file: File = Field("", description="this router's bearer token, where callers are known by tokens")
    tenant: Annotated[str, Shown("ID")] = Field(DEFAULT_TENANT, description="tenant of all turns")

    connect_timeout_ms: Ms = Field(2_000, description="to connect to an engine")
    prefill_timeout_ms: Ms = Field(600_000, description="for a prefill engine's answer, its queue included")
    first_byte_timeout_ms: Ms = Field(600_000, description="for the first byte of a stream")
    idle_timeout_ms: Ms = Field(300_000, description="between two chunks of a stream")
    answer_timeout_ms: Ms = Field(3_600_000, description="for a whole answer that is not streamed")
    client_timeout_ms: Ms = Field(300_000, description="for a client to send its request, and to take in each chunk")
    locate_timeout_ms: Ms = Field(50, description="for the registry's answer at the start of a turn")
    copy_staleness_ms: Annotated[int, Field(ge=0, le=_DAY_MS), Shown("MS")] = Field(
        10_000,
        description="turns are located in a copy of the registry's leases while it is no staler than this; 0: no copy, "
        "the registry is asked each turn",
    )
    registry_timeout_ms: Ms = Field(1_000, description="for any other call to the registry")
    models_timeout_ms: Ms = Field(10_000, description="for a decode engine's list of models")
    health_interval_ms: Ms = Field(2_000, description="between two health probes of an engine")
    health_timeout_ms: Ms = Field(1_000, description="for the answer to a health probe")
    cooldown_ms: Ms = Field(5_000, description="an engine that failed a turn is avoided for this long")
    drain_timeout_ms: Ms = Field(30_000, description="at shutdown, for turns in flight")

    max_attempts: Annotated[int, Shown("N")] = Field(3, ge=1, le=16, description="engines tried per turn and role")
    max_turns: Count = Field(4_096, description="turns in flight; more are refused with 503")
    max_body_bytes: Bytes = Field(32 * _MIB, description="of a request")
    max_answer_bytes: Bytes = Field(64 * _MIB, description="of an answer that is not streamed")
    max_messages: Count = Field(4_096, description="in a chat request")
    max_copied_leases: Annotated[int, Field(ge=1, le=100_000_000), Shown("N")] = Field(
        MAX_COPIED_LEASES, description="in the copy of the registry's leases; if there are more, there is no copy"
    )

    recompute_threshold: Annotated[int | None, Shown("TOKENS")] = Field(
        None, ge=0, le=1_000_000, description="fewest tokens worth a READ; overrides kv_recompute_threshold of engines"
    )
    renew: bool = Field(False, description="renew the located lease until its turn is prefilled")
    forward_authorization: bool = Field(True, description="pass the client's Authorization header on to engines")
    otlp_endpoint: Annotated[str | None, Shown("HOST:PORT")] = Field(
        None, description="OTLP/gRPC endpoint for traces; OTEL_* variables apply too"
    )
    log_level: LogLevel = Field("info", description="least severe messages to log")

    @field_validator("prefill", "decode", mode="before")
    @classmethod
    def _several(cls, value: object) -> object:
        """From a flag each item, from the environment one text with commas."""
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            return items
        return tuple(part.strip() for item in items for part in str(item).split(",") if part.strip())

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        split_address(value)
        return value

    @field_validator("registry")
    @classmethod
    def _registry(cls, value: str) -> str:
        if value != NO_REGISTRY:
            parse_endpoints(value)
        return value

    @field_validator("tenant")
    @classmethod
    def _tenant(cls, value: str) -> str:
        if not is_id(value):
            raise ValueError("must be 1-128 of [A-Za-z0-9._:@/+=-]")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        try:
            credentials = self.credentials
            if self.leases:
                credentials.check(self.registry)
        except CredentialsInvalid as error:
            raise ValueError(f"tls-ca: {error}") from error
        targets = self.targets()
        for role in Role:
            urls = [target.url for target in targets if target.role is role]
            if not urls:
                raise ValueError(f"{role}: at least one URL is needed (--{role} URL)")
            if len(set(urls)) != len(urls):
                raise ValueError(f"{role}: the same URL is given twice")
        return self

    @property
    def credentials(self) -> Credentials:
        """What the registry knows this router by. Raises CredentialsInvalid."""
        return Credentials(tls_ca=self.tls_ca, tls_cert=self.tls_cert, tls_key=self.tls_key, token_file=self.token_file)

    @property
    def leases(self) -> bool:
        """Whether turns are given leases at all."""
        return self.registry != NO_REGISTRY

    @property
    def tenant_id(self) -> TenantId:
        return TenantId(self.tenant)

    def targets(self) -> tuple[Target, ...]:
        """The engines, prefill first. Raises ValueError naming what is wrong with one."""
        prefill = [_target(Role.PREFILL, text) for text in self.prefill]
        return tuple(prefill + [_target(Role.DECODE, text) for text in self.decode])


def load(argv: list[str] | None = None) -> RouterSettings:
    """Settings from flags and environment; `argv` None means no flags.

    Raises SettingsError, and SystemExit from argparse for an unknown flag or --help.
    """
    return flags.load(RouterSettings, argv)


def _target(role: Role, text: str) -> Target:
    match = _ENGINE.match(text)
    if match is None:
        raise ValueError(f"{role}: {text!r} is not an http:// or https:// URL")
    engine_id, url = match["id"], match["url"]
    parts = urlsplit(url)
    if not parts.hostname or parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"{role}: an engine URL has a host, and no user, query or fragment")
    if engine_id is not None and role is Role.PREFILL:
        raise ValueError(f"{role}: ENGINE_ID@ is for decode engines only")
    if engine_id is not None and not is_id(engine_id):
        raise ValueError(f"{role}: {engine_id!r} is not an engine id")
    return Target(role=role, url=base_url(url), engine_id=EngineId(engine_id) if engine_id is not None else None)
