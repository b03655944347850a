"""What an operator can set on a registry: flags, then KVLEASE_REGISTRY_* environment variables, then the defaults here.

Validation happens here and nowhere else; the rest of the registry trusts these values. Durations are milliseconds.
`--help` is made from the descriptions below. How long a lease lasts is the lenders' setting, not the registry's.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from kvlease.registry import flags
from kvlease.registry.client_credentials import is_loopback
from kvlease.registry.flags import Shown, split_address
from kvlease.registry.replica import MAX_STALENESS_MS
from kvlease.registry.table_limits import TableLimits
from kvlease.registry.values import is_id
from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

MEMORY: Final = "memory"
ETCD: Final = "etcd://"
NO_METRICS: Final = "none"
"""Switches the Prometheus endpoint off."""
_DEFAULTS: Final = TableLimits()
_DAY_MS: Final = 24 * 3600 * 1000
_MOST: Final = 100_000_000

Ms = Annotated[int, Field(ge=1, le=_DAY_MS), Shown("MS")]
Count = Annotated[int, Field(ge=1, le=_MOST), Shown("N")]
Address = Annotated[str, Shown("HOST:PORT")]
File = Annotated[str, Shown("FILE")]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class RegistrySettings(BaseSettings):
    """The lease authority: where leased KV blocks are, for lenders, borrowers and routers."""

    model_config = SettingsConfigDict(
        env_prefix="KVLEASE_REGISTRY_",
        env_ignore_empty=True,
        frozen=True,
        cli_prog_name="kvlease registry",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    listen: Address = Field(default="127.0.0.1:7411", description="for gRPC; port 0 picks a free one")
    metrics_listen: Address = Field(default="127.0.0.1:7412", description='for Prometheus, or "none"')
    tls_cert: File = Field(default="", description="this registry's certificate, PEM; read again when it changes")
    tls_key: File = Field(default="", description="its private key, PEM; not readable for others")
    tls_ca: File = Field(
        default="", description="the CA of clients' certificates; their kvlease:// URIs say who a client is"
    )
    token_file: File = Field(
        default="",
        description="instead of tls-ca: hashes of bearer tokens, and whose they are; read again when it changes",
    )
    insecure: bool = Field(
        default=False, description="serve other hosts although callers prove nothing, or tokens are not encrypted"
    )
    connection_age_ms: Ms = Field(
        default=_DAY_MS,
        description="with tls-ca, connections end at this age, and with them the use of an expired certificate",
    )
    store: Annotated[str, Shown("STORE")] = Field(
        default="memory",
        description='where changes are kept: "memory" (one registry; lenders present again), or for several registries '
        "etcd://HOST:PORT,HOST:PORT",
    )
    store_prefix: Annotated[str, Shown("PREFIX")] = Field(
        default="/kvlease/", description="of this fleet's keys in etcd; replicas share it, other fleets have another"
    )
    store_ca: File = Field(default="", description="the CA of etcd's certificates; without it there is no TLS to etcd")
    store_cert: File = Field(default="", description="this registry's certificate for etcd")
    store_key: File = Field(default="", description="its private key")
    store_user: Annotated[str, Shown("NAME")] = Field(default="", description="user at etcd")
    store_password_file: File = Field(
        default="", description="a file with the user's password; read again before each login"
    )
    replica_id: Annotated[str, Shown("ID")] = Field(
        default="", description="name of this registry in logs and to lenders; random if not given"
    )

    max_staleness_ms: Ms = Field(
        default=MAX_STALENESS_MS,
        description="with a shared store, a registry out of contact with it for so long answers nothing",
    )

    heartbeat_interval_ms: Ms = Field(default=1_000, description="how often lenders are told to send a heartbeat")
    suspect_after_ms: Ms = Field(
        default=_DEFAULTS.suspect_after_ms, description="a lender silent for so long is not resolved"
    )
    session_ttl_ms: Ms = Field(default=_DEFAULTS.session_ttl_ms, description="a lender silent for so long is lost")

    max_engines: Count = Field(default=_DEFAULTS.max_engines, description="engines with a session")
    max_tenants: Count = Field(default=_DEFAULTS.max_tenants, description="tenants with leases or aliases")
    max_leases_per_engine: Count = Field(default=_DEFAULTS.max_leases_per_engine, description="leases of one engine")
    max_leases_per_tenant: Count = Field(default=_DEFAULTS.max_leases_per_tenant, description="leases of one tenant")
    max_blocks_per_tenant: Annotated[int, Shown("N")] = Field(
        default=_DEFAULTS.max_blocks_per_tenant,
        ge=0,
        description="blocks pinned for one tenant on all engines; 0: no limit",
    )
    max_branches: Count = Field(default=_DEFAULTS.max_branches, description="leases side by side in one conversation")
    max_aliases_per_tenant: Count = Field(default=_DEFAULTS.max_aliases_per_tenant, description="aliases of one tenant")
    max_watchers: Count = Field(
        default=1_024, description="open watches; where callers have identities, a quarter of them for one tenant's"
    )
    max_resolve_streams: Count = Field(default=4_096, description="open resolve streams; the same")
    shed_above_lag_ms: Ms = Field(
        default=250, description="resolves are refused while the event loop comes round later than this, locates at 4 x"
    )
    keep_events: Count = Field(default=65_536, description="lease events kept: how far a watcher may fall behind")

    otlp_endpoint: Annotated[str | None, Shown("HOST:PORT")] = Field(
        default=None, description="OTLP/gRPC endpoint for traces; OTEL_* variables apply too"
    )
    log_level: LogLevel = Field(default="info", description="least severe messages to log")
    log_format: LogFormat = Field(default="text", description="one line of text or one JSON object per message")

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _address(cls, value: str) -> str:
        if value != NO_METRICS:
            split_address(value)
        return value

    @field_validator("store")
    @classmethod
    def _store(cls, value: str) -> str:
        if value != MEMORY:
            etcd_endpoints(value)
        return value

    @field_validator("store_prefix")
    @classmethod
    def _prefix(cls, value: str) -> str:
        if not (value.startswith("/") and value.endswith("/") and value.isascii() and value.isprintable()):
            raise ValueError(f'must start and end with "/", like /kvlease/, not {value!r}')
        return value

    @field_validator("replica_id")
    @classmethod
    def _replica(cls, value: str) -> str:
        if value and not is_id(value):
            raise ValueError("must be 1-128 of [A-Za-z0-9._:@/+=-]")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.listen == NO_METRICS:
            raise ValueError("listen: must be HOST:PORT")
        if self.suspect_after_ms < 2 * self.heartbeat_interval_ms:
            raise ValueError(
                "suspect-after-ms: must be at least two heartbeat intervals, or one late heartbeat hides leases"
            )
        if self.session_ttl_ms <= self.suspect_after_ms:
            raise ValueError("session-ttl-ms: must be longer than suspect-after-ms")
        self._check_store()
        self._check_identity()
        return self

    def _check_store(self) -> None:
        """Raises ValueError, naming a setting."""
        given = [
            name
            for name in ("store_ca", "store_cert", "store_key", "store_user", "store_password_file")
            if getattr(self, name)
        ]
        if given and self.store == MEMORY:
            raise ValueError(f"{given[0].replace('_', '-')}: goes together with --store etcd://...")
        if bool(self.store_cert) != bool(self.store_key):
            raise ValueError("store-cert: goes together with --store-key: give both or neither")
        if self.store_cert and not self.store_ca:
            raise ValueError("store-cert: needs --store-ca, the CA of etcd's certificates")
        if bool(self.store_user) != bool(self.store_password_file):
            raise ValueError("store-user: goes together with --store-password-file: give both or neither")

    def _check_identity(self) -> None:
        """Raises ValueError, naming a setting."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls-cert: goes together with --tls-key: give both or neither")
        if self.tls_ca and not self.tls_cert:
            raise ValueError("tls-ca: needs --tls-cert and --tls-key, this registry's own certificate")
        if self.tls_ca and self.token_file:
            raise ValueError("token-file: callers have certificates (--tls-ca) or tokens, not both")
        if self.insecure or is_loopback(split_address(self.listen)[0]):
            return
        if not (self.tls_ca or self.token_file):
            raise ValueError(
                f"listen: other hosts could reach {self.listen}, and nobody would have to say who they are. Give "
                "--tls-cert, --tls-key and --tls-ca, or --token-file, or say --insecure"
            )
        if self.token_file and not self.tls_cert:
            raise ValueError(
                "token-file: tokens would travel unencrypted. Give --tls-cert and --tls-key, or say --insecure"
            )

    def table_limits(self) -> TableLimits:
        """What of this the lease table is told."""
        return TableLimits(
            suspect_after_ms=self.suspect_after_ms,
            session_ttl_ms=self.session_ttl_ms,
            max_engines=self.max_engines,
            max_tenants=self.max_tenants,
            max_leases_per_engine=self.max_leases_per_engine,
            max_leases_per_tenant=self.max_leases_per_tenant,
            max_blocks_per_tenant=self.max_blocks_per_tenant,
            max_branches=self.max_branches,
            max_aliases_per_tenant=self.max_aliases_per_tenant,
        )


def etcd_endpoints(store: str) -> tuple[str, ...]:
    """HOST:PORT of each member in etcd://HOST:PORT,HOST:PORT. Raises ValueError, saying what is wrong."""
    if not store.startswith(ETCD):
        raise ValueError(f'must be "memory" or etcd://HOST:PORT,HOST:PORT, not {store!r}')
    endpoints = tuple(x.strip() for x in store.removeprefix(ETCD).split(","))
    for endpoint in endpoints:
        host, port = split_address(endpoint)
        if not host or not port:
            raise ValueError(f"{endpoint!r} in {store!r} is not HOST:PORT of an etcd member")
    return endpoints


def load(argv: list[str] | None = None) -> RegistrySettings:
    """Settings from flags and environment; `argv` None means no flags.

    Raises SettingsError, and SystemExit from argparse for an unknown flag or --help.
    """
    return flags.load(RegistrySettings, argv)
