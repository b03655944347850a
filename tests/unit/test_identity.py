"""Grants, identities, the table of role x rpc, and token files: all without a socket.

The table is judged by sentences written down a second time here, so that a change of it is a change of both.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlease.registry.errors import Unauthenticated
from kvlease.registry.identity import (
    ALL_TENANTS,
    MAX_GRANTS,
    MAY_CALL,
    Grant,
    Identity,
    IdentityInvalid,
    Role,
    Rpc,
    Tenants,
)
from kvlease.registry.identity_gate import Caller, CallFacts
from kvlease.registry.identity_tls import CertifiedCallers
from kvlease.registry.identity_tokens import MAX_TOKENS, TokenFile, parse_tokens
from kvlease.registry.secret_files import FileUnusable, read_public, read_secret
from kvlease.registry.values import EngineId, TenantId
from kvlease.v1 import registry_pb2 as pb

ACME, OTHER = TenantId("acme"), TenantId("other")
IDS = st.text("abcXYZ019._:@/+=-", min_size=1, max_size=128)
TOKEN = "t" * 64

MAY = {
    Role.LENDER: {"Session", "Publish"},
    Role.BORROWER: {"Resolve", "ResolveStream"},
    Role.ROUTER: {"Renew", "End", "Locate", "NameConversation", "Watch", "ListLeases", "ListEngines"},
    Role.OPERATOR: {
        *{"Renew", "End", "Locate", "NameConversation", "Watch", "ListLeases", "ListEngines"},
        *{"Resolve", "ResolveStream"},
    },
}


def identity(*texts: str) -> Identity:
    return Identity.parse(texts)


def test_the_table_has_a_row_for_every_rpc_of_the_contract() -> None:
    contract = {method.name for method in pb.DESCRIPTOR.services_by_name["Registry"].methods}
    assert {rpc.value for rpc in Rpc} == contract
    assert set(MAY_CALL) == set(Rpc)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("rpc", Rpc)
def test_each_role_may_call_what_it_needs_and_nothing_else(role: Role, rpc: Rpc) -> None:
    assert identity(f"kvlease://{role}/name").may_call(rpc) == (rpc.value in MAY[role])


@given(name=IDS, tenants=st.lists(IDS, min_size=1, max_size=5))
def test_every_legal_id_can_be_written_in_a_grant(name: str, tenants: list[str]) -> None:
    query = "&".join(f"tenant={tenant}" for tenant in tenants)
    grant = Grant.parse(f"kvlease://borrower/{name}?{query}")
    assert (grant.role, grant.name) == (Role.BORROWER, name)
    assert grant.tenants == Tenants(named=frozenset(map(TenantId, tenants)))


def test_tenants_of_a_grant() -> None:
    assert Grant.parse("kvlease://router/r").tenants == Tenants(named=frozenset({TenantId("default")}))
    assert Grant.parse("kvlease://router/r?tenant=*").tenants == ALL_TENANTS
    assert Grant.parse("kvlease://operator/ops").tenants == ALL_TENANTS
    assert OTHER not in Grant.parse("kvlease://router/r?tenant=acme").tenants
    assert OTHER in Grant.parse("kvlease://router/r?tenant=acme&tenant=*").tenants


@pytest.mark.parametrize(
    "text",
    [
        *("", "spiffe://router/r", "kvlease:/router/r", "KVLEASE://router/r"),
        *("kvlease://root/r", "kvlease://Router/r", "kvlease://router", "kvlease://router/", "kvlease://router/a b"),
        *("kvlease://router/r?", "kvlease://router/r?tenant", "kvlease://router/r?tenant=", "kvlease://router/r?a=b"),
        *("kvlease://router/r?tenant=a&", "kvlease://router/r?tenant=a%62", "kvlease://router/r?tenant=a#b"),
        *("kvlease://operator/ops?tenant=acme", "kvlease://lender/*", "kvlease://router/" + "r" * 129),
        "kvlease://router/r?" + "&".join(f"tenant=t{i}" for i in range(1_025)),
    ],
)
def test_what_is_not_a_grant_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(IdentityInvalid) as refused:
        Grant.parse(text)
    assert not text or text not in str(refused.value)


def test_grants_add_up_and_do_not_mix() -> None:
    both = identity("kvlease://lender/d0?tenant=acme", "kvlease://borrower/d0?tenant=other")
    assert both.may_call(Rpc.SESSION)
    assert both.may_call(Rpc.RESOLVE)
    assert not both.may_call(Rpc.LOCATE)
    assert ACME not in both.tenants(Rpc.RESOLVE)
    assert OTHER in both.tenants(Rpc.RESOLVE)
    assert both.lends_as(EngineId("d0")) == Tenants(named=frozenset({ACME}))
    assert both.lends_as(EngineId("d1")) is None
    assert not both.operates
    assert identity("kvlease://operator/ops").operates


def test_an_identity_has_grants_and_not_too_many() -> None:
    for count in (0, MAX_GRANTS + 1):
        with pytest.raises(IdentityInvalid):
            identity(*(f"kvlease://router/r{i}" for i in range(count)))


# --- tokens


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def bearer(token: str, scheme: str = "Bearer") -> CallFacts:
    return CallFacts(metadata=(("authorization", f"{scheme} {token}"),))


def token_file(path: Path, text: str) -> TokenFile:
    path.write_text(text)
    path.chmod(0o600)
    return TokenFile(path)


def test_a_token_is_known_by_its_hash(tmp_path: Path) -> None:
    lines = f"# routers\n\nsha256:{digest(TOKEN)} kvlease://router/r?tenant=acme kvlease://borrower/r  # both\n"
    tokens = token_file(tmp_path / "tokens", lines)
    assert tokens.refresh()
    assert not tokens.refresh()
    for scheme in ("Bearer", "bearer"):
        assert tokens.identify(bearer(TOKEN, scheme)).identity.name == "router/r+borrower/r"


@pytest.mark.parametrize(
    "call",
    [
        CallFacts(),
        bearer("wrong"),
        bearer(digest(TOKEN)),
        bearer(""),
        bearer(TOKEN, "Basic"),
        CallFacts(metadata=(("authorization", b"Bearer " + TOKEN.encode()),)),
        CallFacts(metadata=(("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer other"))),
        CallFacts(names=("kvlease://operator/ops",), is_certified=True),
    ],
)
def test_other_calls_are_not_let_in(tmp_path: Path, call: CallFacts) -> None:
    tokens = token_file(tmp_path / "tokens", f"sha256:{digest(TOKEN)} kvlease://router/r\n")
    tokens.refresh()
    with pytest.raises(Unauthenticated):
        tokens.identify(call)


def test_a_token_that_is_taken_out_or_changed_stands_no_more(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens = token_file(path, f"sha256:{digest(TOKEN)} kvlease://router/r\n")
    tokens.refresh()
    caller = tokens.identify(bearer(TOKEN))
    assert tokens.stands(caller)
    path.write_text(f"sha256:{digest(TOKEN)} kvlease://router/r?tenant=acme\n")
    assert tokens.refresh()
    assert not tokens.stands(caller)
    path.write_text(f"sha256:{digest('another')} kvlease://router/r?tenant=acme\n")
    assert tokens.refresh()
    with pytest.raises(Unauthenticated):
        tokens.identify(bearer(TOKEN))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"{TOKEN} kvlease://router/r\n", "line 1: a line starts with sha256:"),
        ("sha256:abcd kvlease://router/r\n", "line 1"),
        (f"sha256:{digest(TOKEN)}\n", "line 1: an identity has 1-16 grants"),
        (f"\nsha256:{digest(TOKEN)} kvlease://root/r\n", "line 2: an identity's role"),
        (f"sha256:{digest(TOKEN)} kvlease://router/r\n" * 2, "line 2: the token has a line already"),
        ("", "no line with a token"),
        (f"# sha256:{digest(TOKEN)} kvlease://router/r\n", "no line with a token"),
        ("".join(f"sha256:{i:064x} kvlease://router/r\n" for i in range(MAX_TOKENS + 1)), "more than"),
    ],
)
def test_a_faulty_line_is_named_and_nothing_of_it_repeated(text: str, fault: str) -> None:
    with pytest.raises(FileUnusable) as refused:
        parse_tokens(text.encode(), "tokens")
    assert fault in str(refused.value)
    assert TOKEN not in str(refused.value)
    assert digest(TOKEN) not in str(refused.value)


def test_a_faulty_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens = token_file(path, f"sha256:{digest(TOKEN)} kvlease://router/r\n")
    tokens.refresh()
    for faulty in ("nonsense\n", ""):
        path.write_text(faulty)
        for _ in range(2):
            with pytest.raises(FileUnusable):
                tokens.refresh()
        assert tokens.identify(bearer(TOKEN)).identity.name == "router/r"


@pytest.mark.parametrize(("mode", "usable"), [(0o600, True), (0o640, True), (0o644, False), (0o660, False)])
def test_a_secret_that_too_many_may_touch_is_not_used(tmp_path: Path, mode: int, usable: bool) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"x")
    path.chmod(mode)
    if usable:
        assert read_secret(path) == b"x"
    else:
        with pytest.raises(FileUnusable, match="chmod 600"):
            read_secret(path)


def test_a_certificate_may_be_read_by_all_and_written_by_few(tmp_path: Path) -> None:
    path = tmp_path / "cert"
    path.write_bytes(b"x")
    path.chmod(0o644)
    assert read_public(path) == b"x"
    path.chmod(0o646)
    with pytest.raises(FileUnusable):
        read_public(path)


# --- certificates


def test_a_certificate_is_known_by_its_uris() -> None:
    names = ("https://example.org/d0", "kvlease://lender/d0?tenant=*")
    caller = CertifiedCallers().identify(CallFacts(names=names, is_certified=True))
    assert caller == Caller(identity=identity("kvlease://lender/d0?tenant=*"))


@pytest.mark.parametrize(
    "call",
    [
        CallFacts(),
        CallFacts(names=("kvlease://operator/ops",)),
        CallFacts(names=("https://example.org",), is_certified=True),
        CallFacts(names=("kvlease://router/r", "kvlease://root/r"), is_certified=True),
        bearer(TOKEN),
    ],
)
def test_a_caller_without_a_name_in_a_certificate_is_not_let_in(call: CallFacts) -> None:
    with pytest.raises(Unauthenticated):
        CertifiedCallers().identify(call)


def test_no_repr_shows_a_token() -> None:
    assert TOKEN not in repr(bearer(TOKEN))
    caller = Caller(identity=identity("kvlease://router/r"), credential=hashlib.sha256(TOKEN.encode()).digest())
    assert "credential" not in repr(caller)
