"""Who calls a registry, and what each may ask: roles, grants, identities, and the one table of role x rpc.

Pure. How a caller proves who it is: `identity_tls.py` and `identity_tokens.py`. Where a call is held against the table:
`identity_gate.py`; where its tenant and engine are: `guard.py`.
Invariant: `MAY_CALL` has a row for every rpc of the contract; what no grant permits is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from types import MappingProxyType
from typing import Final, Self

from kvlease.registry.values import DEFAULT_TENANT, EngineId, TenantId, is_id

SCHEME: Final = "kvlease://"
EVERY_TENANT: Final = "*"
MAX_GRANTS: Final = 16
"""Grants of one caller: an engine that lends and borrows has two."""
MAX_TENANTS: Final = 1_024
"""Tenants of one grant; who serves more serves all."""


class Role(StrEnum):
    LENDER = "lender"
    BORROWER = "borrower"
    ROUTER = "router"
    OPERATOR = "operator"


class Rpc(StrEnum):
    """The rpcs of registry.proto, by its own names."""

    SESSION = "Session"
    PUBLISH = "Publish"
    RENEW = "Renew"
    END = "End"
    RESOLVE = "Resolve"
    RESOLVE_STREAM = "ResolveStream"
    LOCATE = "Locate"
    NAME_CONVERSATION = "NameConversation"
    WATCH = "Watch"
    LIST_LEASES = "ListLeases"
    LIST_ENGINES = "ListEngines"


_ROLES: Final = frozenset(role.value for role in Role)
_ROUTING: Final = frozenset({Role.ROUTER, Role.OPERATOR})
_READING: Final = frozenset({Role.BORROWER, Role.OPERATOR})
_LENDING: Final = frozenset({Role.LENDER})

MAY_CALL: Final[Mapping[Rpc, frozenset[Role]]] = MappingProxyType(
    {
        Rpc.SESSION: _LENDING,
        Rpc.PUBLISH: _LENDING,
        Rpc.RENEW: _ROUTING,
        Rpc.END: _ROUTING,  # a whole engine or tenant: operators only, see Identity.operates
        Rpc.RESOLVE: _READING,
        Rpc.RESOLVE_STREAM: _READING,
        Rpc.LOCATE: _ROUTING,
        Rpc.NAME_CONVERSATION: _ROUTING,
        Rpc.WATCH: _ROUTING,
        Rpc.LIST_LEASES: _ROUTING,
        Rpc.LIST_ENGINES: _ROUTING,
    }
)
"""Which roles may call what. A lender renews and ends by its session, so it needs neither call."""


class IdentityInvalid(ValueError):
    """What should say who a caller is cannot be understood. The message never repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """A set of tenants, or all there are."""

    named: frozenset[TenantId] = frozenset()
    every: bool = False

    def __contains__(self, tenant: TenantId) -> bool:
        return self.every or tenant in self.named

    def __or__(self, other: Tenants) -> Tenants:
        return Tenants(named=self.named | other.named, every=self.every or other.every)


NO_TENANT: Final = Tenants()
ALL_TENANTS: Final = Tenants(every=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One role, for these tenants. `name` is the engine's id for a lender; for others it is there for the logs."""

    role: Role
    name: str
    tenants: Tenants

    @classmethod
    def parse(cls, text: str) -> Self:
        """A grant as certificates and token files write it:

            kvlease://ROLE/NAME[?tenant=ID[&tenant=ID ...]]

        `tenant=*` means all of them; without any it is the tenant "default". Operators serve all tenants and name none.
        Nothing is percent-encoded: ids have no character that needs it. Raises IdentityInvalid.
        """
        if not text.startswith(SCHEME):
            raise IdentityInvalid(f"an identity starts with {SCHEME}")
        place, question, query = text.removeprefix(SCHEME).partition("?")
        role, slash, name = place.partition("/")
        if role not in _ROLES:
            raise IdentityInvalid(f"an identity's role is one of {', '.join(Role)}")
        if not slash or not is_id(name):
            raise IdentityInvalid("an identity has a name after its role: 1-128 characters of [A-Za-z0-9._:@/+=-]")
        if role == Role.OPERATOR:
            if question:
                raise IdentityInvalid("an operator serves all tenants; its identity names none")
            return cls(role=Role.OPERATOR, name=name, tenants=ALL_TENANTS)
        return cls(role=Role(role), name=name, tenants=_tenants(query) if question else _DEFAULT)


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller and its grants. A call is allowed if one of them allows it."""

    grants: tuple[Grant, ...]
    _reach: Mapping[Rpc, Tenants] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises IdentityInvalid if there are no grants, or more than MAX_GRANTS."""
        if not 0 < len(self.grants) <= MAX_GRANTS:
            raise IdentityInvalid(f"an identity has 1-{MAX_GRANTS} grants")
        reach = {
            rpc: reduce(Tenants.__or__, (x.tenants for x in self.grants if x.role in roles), NO_TENANT)
            for rpc, roles in MAY_CALL.items()
        }
        object.__setattr__(self, "_reach", MappingProxyType(reach))

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Self:
        """Raises IdentityInvalid."""
        return cls(tuple(Grant.parse(text) for text in texts))

    @property
    def name(self) -> str:
        """For logs."""
        return "+".join(f"{x.role}/{x.name}" for x in self.grants)

    @property
    def operates(self) -> bool:
        """Whether it may end what belongs to a whole engine or tenant."""
        return any(x.role is Role.OPERATOR for x in self.grants)

    def may_call(self, rpc: Rpc) -> bool:
        return any(x.role in MAY_CALL[rpc] for x in self.grants)

    def tenants(self, rpc: Rpc) -> Tenants:
        """The tenants that it may call `rpc` for."""
        return self._reach[rpc]

    def lends_as(self, engine_id: EngineId) -> Tenants | None:
        """The tenants that it may lend for as this engine; None if it is not this engine."""
        mine = [x.tenants for x in self.grants if x.role is Role.LENDER and x.name == engine_id]
        return reduce(Tenants.__or__, mine) if mine else None


_DEFAULT: Final = Tenants(named=frozenset({DEFAULT_TENANT}))


def _tenants(query: str) -> Tenants:
    parts = query.split("&", MAX_TENANTS)
    if len(parts) > MAX_TENANTS:
        raise IdentityInvalid(f"an identity names {MAX_TENANTS} tenants at most")
    names: set[TenantId] = set()
    every = False
    for part in parts:
        key, equals, value = part.partition("=")
        if key != "tenant" or not equals or not (value == EVERY_TENANT or is_id(value)):
            raise IdentityInvalid('after "?" an identity has tenant=ID, joined by "&"')
        if value == EVERY_TENANT:
            every = True
        else:
            names.add(TenantId(value))
    return Tenants(named=frozenset(names), every=every)
