"""Bodies that routers write, as vLLM's own API reads them: what cannot be handed off is known, the rest is accepted.

The engine's request classes decide, which read numbers out of texts and have defaults of their own; no engine is
started.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the API is vLLM's: install the engines (make engines-venv)")

from kvlease.router.body import Endpoint, decode_body, encode, parse_turn, prefill_body
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.serving import BaseServing

pytestmark = pytest.mark.engines

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
HANDOFF: dict[str, Any] = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "p"}


def read(endpoint: Endpoint, fields: dict[str, Any]) -> Any:
    kind = ChatCompletionRequest if endpoint is Endpoint.CHAT else CompletionRequest
    return kind.model_validate(json.loads(encode(fields)))


def sampling(endpoint: Endpoint, fields: dict[str, Any]) -> Any:
    return read(endpoint, fields).to_sampling_params(max_tokens=5, default_sampling_params={})


@pytest.mark.parametrize(
    ("endpoint", "extra"),
    [
        (endpoint, extra)
        for endpoint in Endpoint
        for extra in (
            {},
            {"n": 1},
            {"n": 1.0},
            {"n": True},
            {"n": 2},
            {"n": "2"},
            {"n": 2.0},
            {"use_beam_search": "true"},
            {"use_beam_search": 1},
            {"echo": True},
            {"echo": "yes"},
            {"echo": 1, "logprobs": 0},
            {"echo": True, "logprobs": 1},
            {"echo": True, "logprobs": True, "top_logprobs": 2},
            {"logprobs": True, "top_logprobs": 2},
            {"prompt_logprobs": 0},
            {"prompt_logprobs": 1},
        )
    ],
    ids=str,
)
def test_whatever_an_engine_takes_for_several_sequences_or_prompt_logprobs_is_not_handed_off(
    endpoint: Endpoint, extra: dict[str, Any]
) -> None:
    """Of several sequences that read one prefill the first frees its blocks; a prompt that is read has no log-probs."""
    fields = {**(CHAT if endpoint is Endpoint.CHAT else COMPLETION), **extra}
    request = read(endpoint, fields)
    body = parse_turn(endpoint, json.dumps(fields).encode(), max_messages=9)
    sent = sampling(endpoint, fields)
    needs = request.use_beam_search or sent.n > 1 or sent.prompt_logprobs is not None
    assert (body.alone is not None) == needs


@pytest.mark.parametrize(
    ("endpoint", "extra"),
    [
        (Endpoint.CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
        (Endpoint.CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}, "max_tokens": None}),
        (Endpoint.CHAT, {"max_completion_tokens": 9, "max_tokens": 9, "min_tokens": 3}),
        (Endpoint.CHAT, {"logprobs": True, "top_logprobs": 5, "logprob_token_ids": [1]}),
        (Endpoint.CHAT, {"tools": TOOLS}),
        (Endpoint.CHAT, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
        (Endpoint.CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (Endpoint.CHAT, {"tools": TOOLS, "tool_choice": "none"}),
        (Endpoint.CHAT, {"response_format": SCHEMA}),
        (Endpoint.CHAT, {"structured_outputs": {"regex": "a+"}}),
        (Endpoint.CHAT, {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}),
        (Endpoint.CHAT, {"continue_final_message": True, "add_generation_prompt": False}),
        (Endpoint.CHAT, {"stop": ["x"], "stop_token_ids": [3], "include_stop_str_in_output": True}),
        (Endpoint.CHAT, {"cache_salt": "s", "priority": 0, "request_id": "mine", "user": "u", "metadata": {"a": "b"}}),
        (Endpoint.CHAT, {"return_token_ids": True, "thinking_token_budget": 7, "vllm_xargs": {"a": 1}}),
        (Endpoint.COMPLETION, {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 2}),
        (Endpoint.COMPLETION, {"echo": True, "max_tokens": 0}),
        (Endpoint.COMPLETION, {"suffix": None, "min_tokens": 4, "max_tokens": 4, "stop": "x", "ignore_eos": True}),
        (Endpoint.COMPLETION, {"response_format": SCHEMA, "cache_salt": "s"}),
    ],
    ids=str,
)
def test_what_an_engine_accepts_of_a_client_it_accepts_of_the_router(endpoint: Endpoint, extra: dict[str, Any]) -> None:
    fields = {**(CHAT if endpoint is Endpoint.CHAT else COMPLETION), **extra}
    asked = read(endpoint, fields)
    body = parse_turn(endpoint, json.dumps(fields).encode(), max_messages=9)
    assert body.alone is None
    prefill = read(endpoint, prefill_body(body, None))
    assert (prefill.max_tokens, prefill.stream, prefill.min_tokens) == (1, False, 0)
    for name in (
        "messages",
        "prompt",
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        "reasoning_effort",
        "cache_salt",
    ):
        assert getattr(prefill, name, None) == getattr(asked, name, None), "another prompt"
    assert sampling(endpoint, prefill_body(body, None)).extra_args["kv_transfer_params"]["do_remote_decode"] is True
    decode = read(endpoint, decode_body(body, HANDOFF, None))
    assert decode.kv_transfer_params == HANDOFF
    assert decode.model_dump(exclude={"kv_transfer_params", "request_id"}) == asked.model_dump(
        exclude={"kv_transfer_params", "request_id"}
    )


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize(
    "forged",
    [
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"ec_transfer_params": {"do_remote_prefill": True}},
        {"vllm_xargs": {"kv_transfer_params": "x", "ec_transfer_params": "y"}},
    ],
    ids=str,
)
def test_no_place_in_which_an_engine_looks_for_transfer_parameters_is_left_to_clients(
    endpoint: Endpoint, forged: dict[str, Any]
) -> None:
    fields = {**(CHAT if endpoint is Endpoint.CHAT else COMPLETION), **forged}
    body = parse_turn(endpoint, json.dumps(fields).encode(), max_messages=9)
    assert body.stripped
    sent = sampling(endpoint, decode_body(body, None, None)).extra_args or {}
    assert not {"kv_transfer_params", "ec_transfer_params"} & set(sent)
    handed = sampling(endpoint, decode_body(body, HANDOFF, None)).extra_args
    assert handed["kv_transfer_params"] == HANDOFF
    assert "ec_transfer_params" not in handed


def test_engines_read_no_transfer_parameters_under_another_name() -> None:
    """A field that is taken by an alias, or in another spelling, would get past the router."""
    for kind in (ChatCompletionRequest, CompletionRequest):
        for name, field in kind.model_fields.items():
            if "transfer" in name:
                assert name in ("kv_transfer_params", "ec_transfer_params")
                assert (field.alias, field.validation_alias) == (None, None)
    with pytest.raises(ValidationError):
        read(Endpoint.CHAT, {**CHAT, "kv_transfer_params": "text"})


def test_an_engine_takes_a_requests_id_from_the_header_before_the_body() -> None:
    """So that an id which a client uses twice is the router's business alone."""
    asked = SimpleNamespace(headers={"X-Request-Id": "the router's"})
    assert BaseServing._base_request_id(asked, "the client's") == "the router's"
