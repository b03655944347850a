"""Bodies: what is taken out, what stays, and what each engine gets.

Pure: no sockets. The first test is the security contract of the edge.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from kvlease.registry.values import DEFAULT_TENANT, ConversationId, LeaseId
from kvlease.router.body import (
    AloneReason,
    Endpoint,
    LeaseTerms,
    TurnBody,
    decode_body,
    encode,
    handed_off,
    parse_turn,
    prefill_body,
)
from kvlease.router.errors import InvalidRequest

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TERMS = LeaseTerms(tenant=DEFAULT_TENANT, conversation=ConversationId("c"), lease_id=LeaseId("l"))


def parse(fields: dict[str, Any], endpoint: Endpoint = Endpoint.CHAT, *, max_messages: int = 100) -> TurnBody:
    return parse_turn(endpoint, json.dumps(fields).encode(), max_messages=max_messages)


def test_transfer_parameters_of_clients_never_reach_an_engine() -> None:
    sent = {
        **CHAT,
        "kv_transfer_params": {"do_remote_decode": True},
        "ec_transfer_params": {"x": 1},
        "vllm_xargs": {"kv_transfer_params": "x", "ec_transfer_params": "y", "mine": 3},
    }
    body = parse(sent)
    assert set(body.stripped) == {"kv_transfer_params", "ec_transfer_params"}
    assert decode_body(body, None, None) == {**CHAT, "vllm_xargs": {"mine": 3}}
    assert "x" not in json.dumps(prefill_body(body, None)["vllm_xargs"])


def test_other_fields_pass_through_untouched() -> None:
    extras = {
        "temperature": 0.1,
        "unknown": {"deep": [1, None, "é\ud800"]},
        "stop": ["x"],
        "stream": True,
        "seed": 2**70,
    }
    body = parse({**CHAT, **extras, "conversation_id": "c-1"})
    assert body.conversation == "c-1"
    assert json.loads(encode(decode_body(body, None, None))) == {**CHAT, **extras}


def test_prefill_is_one_token_without_stream() -> None:
    shape = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 4, "max_completion_tokens": 9}
    body = parse({**CHAT, **shape, "n": 1, "logprobs": True, "top_logprobs": 3, "stop": "x", "tools": [1]})
    sent = prefill_body(body, TERMS)
    params = sent.pop("kv_transfer_params")
    assert sent == {**CHAT, "max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False, "tools": [1]}
    assert params == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "kvlease": {"tenant": "default", "conversation": "c", "lease_id": "l"},
    }


def test_decode_gets_the_handoff_as_it_came() -> None:
    handoff = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "newer": None}
    answer = json.dumps({"kv_transfer_params": handoff, "usage": {"prompt_tokens": 12}}).encode()
    params, tokens = handed_off(answer)
    assert tokens == 12
    body = parse({**CHAT, "max_tokens": 50, "stream": True})
    sent = decode_body(body, params, TERMS)
    assert sent == {
        **CHAT,
        "max_tokens": 50,
        "stream": True,
        "kv_transfer_params": {**handoff, "kvlease": TERMS.as_json()},
    }


def test_without_registry_no_terms_are_sent() -> None:
    body = parse(CHAT)
    assert "kvlease" not in json.dumps(prefill_body(body, None))
    assert decode_body(body, None, None) == CHAT
    assert decode_body(body, {"a": 1}, None)["kv_transfer_params"] == {"a": 1}


def test_alone_with_leases_still_lends() -> None:
    params = decode_body(parse(CHAT), None, TERMS)["kv_transfer_params"]
    assert params == {"do_remote_decode": False, "do_remote_prefill": False, "kvlease": TERMS.as_json()}


def test_threshold_is_only_passed_when_set() -> None:
    assert "recompute_threshold" not in TERMS.as_json()
    set_ = LeaseTerms(tenant=DEFAULT_TENANT, conversation=ConversationId("c"), recompute_threshold=0)
    assert set_.as_json() == {"tenant": "default", "conversation": "c", "recompute_threshold": 0}


@pytest.mark.parametrize("answer", [b"", b"[]", b"{", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":[]}'])
def test_an_answer_without_parameters_hands_nothing_off(answer: bytes) -> None:
    assert handed_off(answer) == (None, None)


@pytest.mark.parametrize(
    ("endpoint", "fields", "reason"),
    [
        (Endpoint.COMPLETION, {"prompt": "a"}, None),
        (Endpoint.COMPLETION, {"prompt": [1, 2, 3]}, None),
        (Endpoint.COMPLETION, {"prompt": ["a"]}, None),
        (Endpoint.COMPLETION, {"prompt": [[1, 2]]}, None),
        (Endpoint.COMPLETION, {"prompt": ["a", "b"]}, AloneReason.SEVERAL_PROMPTS),
        (Endpoint.COMPLETION, {"prompt": [[1], [2]]}, AloneReason.SEVERAL_PROMPTS),
        (Endpoint.COMPLETION, {"prompt": "a", "prompt_embeds": "e"}, AloneReason.SEVERAL_PROMPTS),
        (Endpoint.COMPLETION, {"prompt": "a", "best_of": 2}, AloneReason.SEVERAL_SEQUENCES),
        (Endpoint.COMPLETION, {"prompt": "a", "n": None, "best_of": 1.0}, None),
        (Endpoint.COMPLETION, {"prompt": "a", "echo": True}, None),
        (Endpoint.COMPLETION, {"prompt": "a", "echo": True, "logprobs": 1}, AloneReason.PROMPT_LOGPROBS),
        (Endpoint.COMPLETION, {"prompt": "a", "echo": True, "logprobs": 0}, AloneReason.PROMPT_LOGPROBS),
        (Endpoint.COMPLETION, {"prompt": "a", "echo": False, "logprobs": 1}, None),
        (Endpoint.CHAT, {**CHAT, "n": 1}, None),
        (Endpoint.CHAT, {**CHAT, "n": 4}, AloneReason.SEVERAL_SEQUENCES),
        (Endpoint.CHAT, {**CHAT, "n": "4"}, AloneReason.SEVERAL_SEQUENCES),
        (Endpoint.CHAT, {**CHAT, "n": 4.0}, AloneReason.SEVERAL_SEQUENCES),
        (Endpoint.CHAT, {**CHAT, "n": [4]}, AloneReason.SEVERAL_SEQUENCES),
        (Endpoint.CHAT, {**CHAT, "logprobs": True, "top_logprobs": 3}, None),
        (Endpoint.CHAT, {**CHAT, "echo": True}, AloneReason.PROMPT_LOGPROBS),
        (Endpoint.CHAT, {**CHAT, "use_beam_search": True}, AloneReason.SEVERAL_SEQUENCES),
        (Endpoint.CHAT, {**CHAT, "prompt_logprobs": 0}, AloneReason.PROMPT_LOGPROBS),
        (Endpoint.CHAT, {**CHAT, "truncate_prompt_tokens": -1}, AloneReason.TRUNCATION),
    ],
)
def test_turns_that_cannot_be_handed_off_are_known(
    endpoint: Endpoint, fields: dict[str, Any], reason: AloneReason | None
) -> None:
    assert parse(fields, endpoint).alone is reason


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[1]", None),
        (b'"x"', None),
        (b"\xff\xfe", None),
        (b'{"a":NaN}', None),
        (b'{"a":' + b"9" * 5000 + b"}", None),
        (b"[" * 100_000, None),
        (b"{}", "messages"),
        (b'{"messages":[]}', "messages"),
        (b'{"messages":"hi"}', "messages"),
        (b'{"messages":["hi"]}', "messages"),
        (b'{"messages":[{},{},{}]}', "messages"),
        (b'{"messages":[{}],"model":7}', "model"),
        (b'{"messages":[{}],"stream":"yes"}', "stream"),
        (b'{"messages":[{}],"conversation_id":"a b"}', "conversation_id"),
        ('{"messages":[{}],"conversation_id":"gespr\u00e4ch"}'.encode(), "conversation_id"),
        (b'{"messages":[{}],"conversation_id":"c\\n"}', "conversation_id"),
        (b'{"messages":[{}],"conversation_id":7}', "conversation_id"),
        (b'{"messages":[{}],"conversation_id":"' + b"x" * 129 + b'"}', "conversation_id"),
    ],
)
def test_what_the_router_cannot_use_is_refused(raw: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_turn(Endpoint.CHAT, raw, max_messages=2)
    assert caught.value.param == param


def test_a_number_out_of_range_is_refused_when_written() -> None:
    body = parse_turn(Endpoint.CHAT, b'{"messages":[{}],"temperature":1e999}', max_messages=2)
    with pytest.raises(InvalidRequest):
        encode(decode_body(body, None, None))


def test_what_could_just_be_read_and_not_be_written_again_is_refused() -> None:
    """Reading and writing JSON end at the same depth, and a turn is written from deeper down than it is read."""
    deep: Any = []
    for _ in range(20_000):
        deep = [deep]
    body = dataclasses.replace(parse(CHAT), fields={**CHAT, "deep": deep})
    with pytest.raises(InvalidRequest):
        encode(decode_body(body, None, None))
