"""The connector's settings: `kv_connector_extra_config["kvlease"]` of the engine, or KVLEASE_CONNECTOR_* variables.

Typed, with limits; no vLLM here. What the engine itself must look like is checked in `engine_facts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from kvlease.registry.client_credentials import Credentials
from kvlease.registry.client_endpoints import parse_endpoints
from kvlease.registry.values import DEFAULT_TENANT, OnDeadline, TenantId, is_id
from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})


class SettingsInvalid(ValueError):
    """The engine must not start with these settings; the message says which to change and how."""


def _endpoint(text: str) -> str:
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ValueError(f"must be HOST:PORT, not {text!r}")
    return text


def _endpoints(text: str) -> str:
    parse_endpoints(text)
    return text


def _optional_endpoint(text: str) -> str:
    return text and _endpoint(text)


def _tenant(text: TenantId) -> TenantId:
    if not is_id(text):
        raise ValueError(f"must be 1-128 characters of A-Z a-z 0-9 . _ : @ / + = -, not {text!r}")
    return text


def _api_url(text: str) -> str:
    """What a router could be told of a decode engine by hand. The URL is not repeated: it may hold a password."""
    try:
        parts = urlsplit(text)
        usable = bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        usable = False
    plain = all("!" <= character <= "~" and character not in "?#" for character in text)
    if text and not (text.startswith(("http://", "https://")) and usable and plain):
        raise ValueError(
            "must be http://HOST:PORT or https://HOST:PORT, perhaps with a path, in ASCII without spaces, user, query "
            "or fragment"
        )
    return text


Endpoints = Annotated[str, AfterValidator(_endpoints)]
OptionalEndpoint = Annotated[str, AfterValidator(_optional_endpoint)]
ApiUrl = Annotated[str, AfterValidator(_api_url)]
Tenant = Annotated[TenantId, AfterValidator(_tenant)]


class Mode(StrEnum):
    """How long leases live."""

    FIXED = "fixed"
    """For their ttl."""
    HEARTBEAT = "heartbeat"
    """Briefly, unless somebody renews them while the conversation is alive."""
    ELASTIC = "elastic"
    """While the engine has memory to spare: the lender renews them itself."""


_TERMS_OF_MODES: Final = {
    Mode.FIXED: {"lease_ttl_ms": 480_000, "max_lifetime_ms": 0, "renewable": False},
    Mode.HEARTBEAT: {"lease_ttl_ms": 60_000, "max_lifetime_ms": 0, "renewable": True},
    Mode.ELASTIC: {"lease_ttl_ms": 60_000, "max_lifetime_ms": 3_600_000, "renewable": False},
}
"""What a mode means where the settings say nothing else."""
HEARTBEAT_TTL_MS: Final = 2_000
"""Whoever renews does so once a second at most."""


class ConnectorSettings(BaseSettings):
    """All of the connector's own settings; what the engine's configuration says wins over the environment."""

    model_config = SettingsConfigDict(env_prefix="KVLEASE_CONNECTOR_", extra="forbid", frozen=True)

    registry: Endpoints = Field(
        description="HOST:PORT of the registry, several with commas between; a name stands for all its addresses"
    )
    tls_ca: str = Field("", description="file: the CA of the registry's certificate; empty: no TLS")
    tls_cert: str = Field("", description="file: this engine's certificate, with its kvlease:// names")
    tls_key: str = Field("", description="file: the certificate's private key")
    token_file: str = Field("", description="file: this engine's bearer token, where callers are known by tokens")
    lend: bool | None = Field(None, description="keep the KV of finished turns; default: if the engine decodes")
    borrow: bool | None = Field(None, description="read leases instead of computing; default: if the engine prefills")
    mode: Mode = Field(Mode.FIXED, description="fixed ttl; heartbeat: short unless renewed; elastic: renews itself")
    lease_ttl_ms: int = Field(
        480_000, ge=0, le=86_400_000, description="how far ahead a publish puts the deadline; 60 000 in other modes"
    )
    max_lifetime_ms: int = Field(
        0, ge=0, le=86_400_000, description="no renewal keeps a lease longer; 0: no limit; elastic: 3 600 000"
    )
    on_deadline: OnDeadline = Field(OnDeadline.LAPSE, description="lapse: readable until reused; end: plain fixed ttl")
    renewable: bool = Field(False, description="whether others may ask to move deadlines ahead; heartbeat: true")
    max_leases: int = Field(4_096, ge=1, le=65_536, description="slots of the seal table")
    lease_share: float = Field(0.8, gt=0, le=1, description="share of the KV blocks that live leases may hold")
    tenant_share: float = Field(1, gt=0, le=1, description="share of those blocks that one tenant's leases may hold")
    tenant_shares: dict[Tenant, Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=dict, max_length=4_096, description="the same for tenants with a share of their own"
    )
    keep_free: float = Field(
        0.05, ge=0, lt=1, description="share of the KV blocks below which leases give theirs back, cheapest loss first"
    )
    stride_tokens: int = Field(64, ge=1, le=4_096, description="tokens per digest, rounded up to whole blocks")
    resolve_wait_ms: int = Field(50, ge=1, le=5_000, description="how long a request may be held back for a resolve")
    probe_ms: int = Field(250, ge=1, le=5_000, description="limit of asking a lender's side channel whether it lives")
    read_limit_ms: int = Field(5_000, ge=50, le=60_000, description="limit of a READ and of its proof")
    proof_poll_us: int = Field(300, ge=0, le=2_000, description="how long a step may wait for a seal READ")
    default_tenant: Tenant = Field(DEFAULT_TENANT, description="tenant of requests that name none")
    api_url: ApiUrl = Field("", max_length=512, description="base URL of this engine's OpenAI API, for routers")
    model_id: str = Field("", max_length=256, description="name of the model if its path differs between engines")
    weights_version: str = Field("0", max_length=64, description="change it whenever the weights change in place")
    harmless_calls: tuple[str, ...] = Field(
        (), max_length=64, description="worker methods and functions of your own that write to no weights"
    )
    metrics: OptionalEndpoint = Field("", description="HOST:PORT of a Prometheus endpoint; empty: none")
    otlp_endpoint: str = Field("", description="OTLP gRPC endpoint for traces; empty: as OTEL_* variables say")
    allow_untested_engine: bool = Field(False, description="try vLLM versions that this release was not tested with")

    @model_validator(mode="before")
    @classmethod
    def _terms_of_the_mode(cls, given: object) -> object:
        """What is not said follows from the mode."""
        if not isinstance(given, dict):
            return given
        terms = _TERMS_OF_MODES.get(given.get("mode", Mode.FIXED))
        return given if terms is None else {**terms, **given}

    @model_validator(mode="after")
    def _mode_that_works(self) -> Self:
        if self.mode is Mode.HEARTBEAT and not self.renewable:
            raise ValueError("mode heartbeat needs renewable: true, since its leases live by being renewed")
        if self.mode is Mode.HEARTBEAT and self.lease_ttl_ms < HEARTBEAT_TTL_MS:
            raise ValueError(f"mode heartbeat needs a lease_ttl_ms of {HEARTBEAT_TTL_MS} at least")
        if self.mode is Mode.ELASTIC and not self.max_lifetime_ms:
            raise ValueError("mode elastic needs a max_lifetime_ms, since nobody else ends its leases")
        return self

    @model_validator(mode="after")
    def _ttl_within_lifetime(self) -> Self:
        """A ttl that is silently cut would make `lease_ttl_ms`, which others go by, a lie."""
        if 0 < self.max_lifetime_ms < self.lease_ttl_ms:
            raise ValueError(f"max_lifetime_ms must be 0, or no less than lease_ttl_ms, {self.lease_ttl_ms}")
        return self

    @model_validator(mode="after")
    def _usable_credentials(self) -> Self:
        """Reads the files once, so that an engine does not start only to be refused by the registry."""
        self.credentials.check(self.registry)
        return self

    @classmethod
    def load(cls, given: Mapping[str, object]) -> Self:
        """Settings from the engine's configuration and the environment; raises SettingsInvalid with one line each."""
        try:
            return cls(**given)  # type: ignore[arg-type]  # pydantic checks each value
        except ValidationError as error:
            lines = [
                f"  {'.'.join(str(part) for part in problem['loc']) or 'kvlease'}: {problem['msg']}"
                for problem in error.errors()
            ]
            raise SettingsInvalid(
                'kv_connector_extra_config["kvlease"] of the engine is not usable:\n' + "\n".join(lines)
            ) from None

    @property
    def credentials(self) -> Credentials:
        """What the registry knows this engine by. Raises CredentialsInvalid."""
        return Credentials(tls_ca=self.tls_ca, tls_cert=self.tls_cert, tls_key=self.tls_key, token_file=self.token_file)

    @property
    def registry_is_local(self) -> bool:
        return all(x.host in LOOPBACK for x in parse_endpoints(self.registry))
