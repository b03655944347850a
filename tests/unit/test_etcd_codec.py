"""Values in etcd outlive releases: what the first release wrote is read for ever, and what a newer one adds is skipped.

The bytes below were written by release 0.1.0. They are never changed; a new version gets new ones beside them.
"""

from __future__ import annotations

import pytest
from kvlease.registry.etcd_codec import (
    Keys,
    Notes,
    Unreadable,
    decode_alias_put,
    decode_beats,
    decode_end_owed,
    decode_engine_put,
    decode_lease_put,
    decode_notes,
    encode_alias_put,
    encode_end_owed,
    encode_engine_put,
    encode_lease_put,
    encode_notes,
    transaction_of,
)
from kvlease.registry.table_changes import AliasPut, EndOwed, EngineGone, LeaseGone, RenewalAsked, RenewalRefused
from kvlease.registry.values import (
    MAX_TOKENS,
    Alias,
    ConversationId,
    EndReason,
    EngineId,
    LeaseId,
    RenewStatus,
    TenantId,
)
from kvlease.v1 import store_pb2 as pb

from tests.integration.store_conformance import engine_put, lease_put

ENGINE = bytes.fromhex(
    "0801126d0a086465636f64652d301210000000000000000000000000000000001a14687474703a2f2f6465636f64652d303a383030302201312a"
    "240a106666666666666666666666666666666612100a086b765f647479706512046670313632100a0674746c5f6d731206343830303030188827"
    "22056f6e652e31"
)
LEASE = bytes.fromhex(
    "080112086465636f64652d301a1000000000000000000000000000000000228f010a036f6e651201741a04636861742040280230e80738c8d904"
    "40014a106666666666666666666666666666666652270a2064646464646464646464646464646464646464646464646464646464646464641203"
    "6f6e655a3730302d31313131313131313131313131313131313131313131313131313131313131312d323232323232323232323232323232322d"
    "3031"
)
ALIAS = bytes.fromhex("08011201741a106161616161616161616161616161616122016328e0d403")
END_OWED = bytes.fromhex("080112086465636f64652d301a100000000000000000000000000000000022070a036f6e6510022880dddb01")
"""Added later: replicas that do not know of keys under ends/ leave them alone."""
UNKNOWN_FIELD = b"\xa2\x06\x05later"
"""Field 100, a string."""
ALIAS_PUT = AliasPut(tenant=TenantId("t"), alias=Alias(b"a" * 16), conversation=ConversationId("c"), ttl_ms=60_000)


def test_what_the_first_release_wrote_is_read() -> None:
    assert decode_engine_put(ENGINE) == (engine_put(), "one.1")
    assert decode_lease_put(LEASE) == lease_put("one", engine_put())
    assert decode_alias_put(ALIAS) == ALIAS_PUT


def test_an_end_that_is_owed_is_read_and_written_as_ever() -> None:
    owed = EndOwed(
        lease_id=LeaseId("one"),
        engine_id=EngineId("decode-0"),
        incarnation=engine_put().engine.incarnation,
        reason=EndReason.RELEASED,
        ttl_ms=3_600_000,
    )
    assert encode_end_owed(owed) == END_OWED
    assert decode_end_owed(END_OWED) == owed
    assert decode_end_owed(END_OWED + UNKNOWN_FIELD) == owed
    with pytest.raises(Unreadable, match="incarnation"):
        decode_end_owed(END_OWED.replace(b"\x1a\x10" + bytes(16), b"\x1a\x0f" + bytes(15)))


def test_what_is_written_the_first_release_could_read() -> None:
    assert encode_engine_put(engine_put(), "one.1") == ENGINE
    assert encode_lease_put(lease_put("one", engine_put())) == LEASE
    assert encode_alias_put(ALIAS_PUT) == ALIAS


def test_fields_that_a_newer_release_adds_are_skipped() -> None:
    assert decode_engine_put(ENGINE + UNKNOWN_FIELD) == (engine_put(), "one.1")
    assert decode_lease_put(LEASE + UNKNOWN_FIELD) == lease_put("one", engine_put())


@pytest.mark.parametrize(
    "decode",
    [decode_engine_put, decode_lease_put, decode_alias_put, decode_end_owed, decode_notes, decode_beats],
)
@pytest.mark.parametrize("value", [b"", b"\x08\x02", b"\xff\xff", b"\x08\x00"])
def test_what_cannot_be_used_says_so(decode: object, value: bytes) -> None:
    with pytest.raises(Unreadable):
        decode(value)  # type: ignore[operator]


def test_a_lease_that_breaks_the_contract_is_unreadable() -> None:
    with pytest.raises(Unreadable, match="lease_id"):
        decode_lease_put(LEASE.replace(b"\x0a\x03one\x12\x01t", b"\x0a\x03o\ne\x12\x01t"))


def test_a_lease_of_an_earlier_release_that_no_answer_could_tell_of_is_unreadable() -> None:
    stored = pb.StoredLease.FromString(LEASE)
    stored.lease.stride_tokens = MAX_TOKENS
    with pytest.raises(Unreadable, match="stride_tokens"):
        decode_lease_put(stored.SerializeToString())


def test_notes_come_back_as_they_were_written() -> None:
    notes = Notes(
        leases_gone=(LeaseGone(lease_id=LeaseId("l"), reason=EndReason.PRESSURE),),
        engines_gone=(EngineGone(engine_id=EngineId("d/0"), incarnation=engine_put().engine.incarnation),),
        asked=(RenewalAsked(lease_id=LeaseId("l"), ttl_ms=0),),
        refused=(RenewalRefused(lease_id=LeaseId("l"), status=RenewStatus.PRESSURE, remaining_ms=-1),),
        transaction=7,
    )
    assert decode_notes(encode_notes(notes)) == notes
    assert transaction_of(encode_notes(notes)) == 7
    assert transaction_of(b"\xff\xff") == 0


def test_keys_say_what_they_are_of() -> None:
    keys = Keys("/a/b/")
    engine = engine_put("rack/7:decode@0").engine
    key = keys.engine(engine.engine_id, engine.incarnation)
    assert key.startswith(b"/a/b/engines/")
    assert keys.engine_of(key) == (engine.engine_id, engine.incarnation)
    assert keys.lease_of(keys.lease(LeaseId("x/y"))) == "x/y"
    assert keys.lease_of(keys.end(LeaseId("x/y"))) == "x/y"
    with pytest.raises(Unreadable):
        keys.engine_of(b"/a/b/engines/decode-0/not-hex")
