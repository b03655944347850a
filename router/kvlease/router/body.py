"""The JSON body of a turn: parsed once, cleaned, and rewritten for the prefill and the decode engine.

Pure: bytes in, values out. Only the fields that the router must understand are looked at; every other one, known or
not, goes to the engines as it came.

Invariant: `kv_transfer_params` that reach an engine were written here, never by a client. A client that could send them
could pin blocks on an engine, or read another conversation's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NoReturn, TypeAlias

from kvlease.registry.values import ConversationId, LeaseId, TenantId, is_id
from kvlease.router.errors import InvalidRequest

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = dict[str, Json]

PARAMS: Final = "kv_transfer_params"
STRIPPED: Final = (PARAMS, "ec_transfer_params")
"""Engine-internal transfer parameters; vLLM also takes them from inside `vllm_xargs`."""
_XARGS: Final = "vllm_xargs"

_UNUSED_BY_PREFILL: Final = (
    "stream_options",
    "min_tokens",
    "best_of",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "stop",
)
"""They shape an answer that is thrown away, and none of them changes the prompt."""


class Endpoint(StrEnum):
    """The paths that are turns; the same on router and engine."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


class AloneReason(StrEnum):
    """Why a turn is prefilled on its decode engine. The first four are properties of the request, the others of the
    moment; each costs time, never the request."""

    SEVERAL_PROMPTS = "several_prompts"
    """The answer of a prefill engine names the blocks of one prompt only."""
    SEVERAL_SEQUENCES = "several_sequences"
    """The first of several sequences to read a prompt's blocks frees them on the prefill engine."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """Only the engine that computes a prompt can tell its log-probs."""
    TRUNCATION = "truncation"
    """The cut depends on max_tokens, which differs between the two engines: positions would not agree."""
    NO_PREFILL_ENGINE = "no_prefill_engine"
    PREFILL_FAILED = "prefill_failed"
    NO_PARAMS = "no_params"
    """The prefill engine answered without `kv_transfer_params`: it has no KV connector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnBody:
    """A turn as its client asked for it, without what is not for engines. `fields` is read only."""

    endpoint: Endpoint
    fields: Mapping[str, Json]
    model: str
    messages: tuple[JsonObject, ...]
    """Empty for a completion."""
    stream: bool
    conversation: ConversationId | None
    """As the body named it."""
    stripped: tuple[str, ...]
    """Names of the parameters taken out."""
    alone: AloneReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """What the connectors on both engines are told about a turn."""

    tenant: TenantId
    conversation: ConversationId
    lease_id: LeaseId | None = None
    recompute_threshold: int | None = None
    """Tokens; overrides the connector's own `kv_recompute_threshold` for this turn."""
    traceparent: str = ""
    """W3C context of the turn: what the connectors do becomes part of its trace. Headers do not reach them."""

    def as_json(self) -> JsonObject:
        terms: JsonObject = {"tenant": self.tenant, "conversation": self.conversation}
        if self.lease_id is not None:
            terms["lease_id"] = self.lease_id
        if self.recompute_threshold is not None:
            terms["recompute_threshold"] = self.recompute_threshold
        if self.traceparent:
            terms["traceparent"] = self.traceparent
        return terms


def parse_turn(endpoint: Endpoint, raw: bytes, *, max_messages: int) -> TurnBody:
    """Reads a request body and takes out what is not for engines.

    Raises InvalidRequest if it is not a JSON object, or if a field the router needs is not what the API says. Whatever
    else is wrong with it, an engine says better.
    """
    fields = _object(raw)
    stripped = [name for name in STRIPPED if fields.pop(name, None) is not None]
    xargs = fields.get(_XARGS)
    if isinstance(xargs, dict) and any(name in xargs for name in STRIPPED):
        stripped += [name for name in STRIPPED if name in xargs]
        fields[_XARGS] = {name: value for name, value in xargs.items() if name not in STRIPPED}
    conversation = _conversation(fields.pop("conversation_id", None))
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("model must be a string", param="model")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequest("stream must be true or false", param="stream")
    messages = _messages(fields, max_messages) if endpoint is Endpoint.CHAT else ()
    return TurnBody(
        endpoint=endpoint,
        fields=fields,
        model=model or "",
        messages=messages,
        stream=bool(stream),
        conversation=conversation,
        stripped=tuple(stripped),
        alone=_alone(endpoint, fields),
    )


def prefill_body(body: TurnBody, terms: LeaseTerms | None) -> JsonObject:
    """The same prompt, one token, no stream: the body for a prefill engine.

    The transfer parameters are the ones vLLM's NIXL connector expects of a router; with `terms`, kvlease's beside them.
    """
    fields = {name: value for name, value in body.fields.items() if name not in _UNUSED_BY_PREFILL}
    fields["max_tokens"] = 1
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    if "n" in fields:
        fields["n"] = 1
    fields["stream"] = False
    params: JsonObject = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    fields[PARAMS] = _with_terms(params, terms)
    return fields


def decode_body(body: TurnBody, handoff: JsonObject | None, terms: LeaseTerms | None) -> JsonObject:
    """The client's own body for a decode engine, with what the prefill engine handed off.

    Without `handoff` the decode engine prefills by itself; without both, the body is exactly the client's.
    """
    fields = dict(body.fields)
    if handoff is not None:
        fields[PARAMS] = _with_terms(handoff, terms)
    elif terms is not None:
        fields[PARAMS] = _with_terms({"do_remote_decode": False, "do_remote_prefill": False}, terms)
    return fields


def release_body(handoff: JsonObject) -> JsonObject:
    """A completion that a decode engine refuses, and so tells the prefill engine to let its blocks go.

    vLLM notifies the prefill side whenever it rejects a request that carries a remote prefill (here: an unknown model).
    Without it the blocks stay pinned for the prefill engine's `kv_lease_duration` (30 s unless configured).
    """
    return {"model": "kvlease.release", "prompt": "-", "max_tokens": 1, PARAMS: handoff}


def handed_off(answer: bytes) -> tuple[JsonObject | None, int | None]:
    """The transfer parameters in a prefill engine's answer, and the prompt's tokens; None for what is not there."""
    try:
        fields = json.loads(answer)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(fields, dict):
        return None, None
    params, usage = fields.get(PARAMS), fields.get("usage")
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return (params if isinstance(params, dict) else None), (tokens if isinstance(tokens, int) else None)


def encode(fields: Mapping[str, Json]) -> bytes:
    """JSON for an engine.

    Raises InvalidRequest for a number that JSON has no form for (a client sent 1e999), and for what is nested too deep.
    """
    try:
        return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise InvalidRequest("a number in the body is out of range") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deep") from error


def _object(raw: bytes) -> JsonObject:
    try:
        fields = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # also: not UTF-8, an integer of thousands of digits
        raise InvalidRequest("the body is not valid JSON") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _conversation(value: Json) -> ConversationId | None:
    if value is None:
        return None
    if not isinstance(value, str) or not is_id(value):
        raise InvalidRequest("conversation_id must be 1-128 of [A-Za-z0-9._:@/+=-]", param="conversation_id")
    return ConversationId(value)


def _messages(fields: JsonObject, max_messages: int) -> tuple[JsonObject, ...]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    if len(messages) > max_messages:
        raise InvalidRequest(f"more than {max_messages} messages (max_messages)", param="messages")
    found = tuple(message for message in messages if isinstance(message, dict))
    if len(found) != len(messages):
        raise InvalidRequest("each message must be an object", param="messages")
    return found


def _alone(endpoint: Endpoint, fields: JsonObject) -> AloneReason | None:
    """Engines read numbers and truth values out of texts, too ("n": "2"): what is in doubt is not handed off."""
    if endpoint is Endpoint.COMPLETION and _prompts(fields.get("prompt")) + _prompts(fields.get("prompt_embeds")) > 1:
        return AloneReason.SEVERAL_PROMPTS
    if any(fields.get(name) not in (None, 1) for name in ("n", "best_of")):
        return AloneReason.SEVERAL_SEQUENCES
    if fields.get("use_beam_search"):
        return AloneReason.SEVERAL_SEQUENCES
    # An engine that is to repeat the prompt tells its log-probs as well: in a chat always, in a completion if there are
    # any (none beside the token itself, 0, is still some).
    echoes = bool(fields.get("echo")) and (endpoint is Endpoint.CHAT or fields.get("logprobs") is not None)
    if echoes or fields.get("prompt_logprobs") is not None:
        return AloneReason.PROMPT_LOGPROBS
    if fields.get("truncate_prompt_tokens") is not None:
        return AloneReason.TRUNCATION
    return None


def _prompts(prompt: Json) -> int:
    """How many prompts a field holds: a text, a list of tokens, or a list of either."""
    if isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt):
        return len(prompt)
    return int(prompt is not None)


def _with_terms(params: JsonObject, terms: LeaseTerms | None) -> JsonObject:
    return params if terms is None else {**params, "kvlease": terms.as_json()}
