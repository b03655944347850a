"""How a turn is recognised as part of a conversation: ids that clients give, and aliases for those that give none.

Pure. An alias is a hash of a chat's message prefix. When a turn ends, the router names the prefix that now includes the
answer; the next turn carries that prefix, so any router finds the conversation in the registry.

Invariant: an alias only ever decides where to look. Two chats that share one, or a client that changes its history,
cost reuse and never correctness: the token digests decide what is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from kvlease.registry.values import ALIAS_BYTES, MAX_ALIASES, Alias, ConversationId, TenantId, is_id
from kvlease.router.body import Json, JsonObject
from kvlease.router.errors import InvalidRequest

HEADER: Final = "x-kvlease-conversation"
"""Names the conversation of a request, and is on each answer."""
FOREIGN_HEADER: Final = "x-conversation-id"
"""Set by other gateways; used if it happens to be a legal id."""

_THOUGHT_END: Final = "</think>"
_ALIKE: Final = 256
"""Conversations that are alike so far and wait for their next turn, remembered for one alias."""
_BRANCHES: Final = 8
"""Leases of one conversation that live side by side, a registry's default: more would end the earlier ones."""


def from_headers(headers: Mapping[str, str]) -> ConversationId | None:
    """The conversation that a request's headers name, None if they name none.

    Raises InvalidRequest if our own header is there with an illegal id.
    """
    own = headers.get(HEADER)
    if own is not None:
        if not is_id(own):
            raise InvalidRequest(f"{HEADER} must be 1-128 of [A-Za-z0-9._:@/+=-]", param=HEADER)
        return ConversationId(own)
    foreign = headers.get(FOREIGN_HEADER)
    return ConversationId(foreign) if foreign is not None and is_id(foreign) else None


class AliasChain:
    """The aliases of a chat: one running hash over tenant, model and messages, so all prefixes cost one pass.

    Raises InvalidRequest for a message that is nested too deep.
    """

    __slots__ = ("_head", "_known")

    def __init__(self, tenant: TenantId, model: str, messages: Sequence[JsonObject]) -> None:
        self._known: list[Alias] = []
        self._head = _step(b"", [tenant, model])
        for index, message in enumerate(messages):
            self._head = _step(self._head, _canonical(message))
            follower = messages[index + 1] if index + 1 < len(messages) else None
            if message.get("role") == "assistant" and follower is not None and follower.get("role") != "assistant":
                self._known.append(Alias(self._head))

    def known(self) -> tuple[Alias, ...]:
        """Aliases under which an earlier turn may have named this chat: longest prefix first, at most 64."""
        return tuple(reversed(self._known[-MAX_ALIASES:]))

    def continued(self, answer: JsonObject) -> Alias:
        """The alias of this chat with `answer`, an assistant message, at its end."""
        return Alias(_step(self._head, _canonical(answer)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What an alias gave a turn. Unless it `continues` the conversation, it only finds leases of its history there."""

    conversation: ConversationId
    continues: bool


@dataclass(slots=True)
class _Named:
    newest: ConversationId
    free: list[ConversationId]
    """Those that no turn has gone on with."""
    branches: int = 0
    """Turns that went on with the newest although another one had."""


class RecentNames:
    """The aliases that this router named lately, at most `limit`; the one not used for longest goes first.

    Chats that are alike so far share an alias and have a conversation each. An alias gives each conversation to one
    turn, whichever, their contents being the same: else all agents of one template would become one conversation, whose
    limit of branches ends leases. What is left is a retry or a branch: it goes on with the newest, and where that has
    as many branches as a registry lets live side by side, begins a conversation of its own.

    Only the longest prefix of a chat is worth looking up here: another router may have named a longer one since.
    """

    __slots__ = ("_limit", "_named")

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._named: dict[Alias, _Named] = {}

    def __len__(self) -> int:
        return len(self._named)

    def name(self, conversation: ConversationId, aliases: Sequence[Alias]) -> None:
        for alias in aliases:
            self._offer(alias, conversation)

    def take(self, alias: Alias) -> Taken | None:
        """None: this router does not know the alias."""
        named = self._named.pop(alias, None)
        if named is None:
            return None
        self._named[alias] = named
        if named.free:
            return Taken(conversation=named.free.pop(), continues=True)
        named.branches += 1
        return Taken(conversation=named.newest, continues=named.branches < _BRANCHES)

    def taken(self, alias: Alias, conversation: ConversationId) -> None:
        """A turn goes on with a conversation that another router named."""
        if alias not in self._named:
            self._named[alias] = _Named(newest=conversation, free=[])
            self._forget()

    def give_back(self, alias: Alias, conversation: ConversationId) -> None:
        """The turn that went on with it came to nothing."""
        self._offer(alias, conversation)

    def _offer(self, alias: Alias, conversation: ConversationId) -> None:
        named = self._named.pop(alias, None) or _Named(newest=conversation, free=[])
        if conversation != named.newest:
            named.newest, named.branches = conversation, 0
        if conversation not in named.free:
            named.free.append(conversation)
            del named.free[:-_ALIKE]
        self._named[alias] = named
        self._forget()

    def _forget(self) -> None:
        while len(self._named) > self._limit:
            del self._named[next(iter(self._named))]


def _step(head: bytes, part: Json) -> bytes:
    # ASCII escapes keep lone surrogates, which JSON allows and UTF-8 does not.
    try:
        text = json.dumps(part, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:  # it could just be read
        raise InvalidRequest("the messages are nested too deep", param="messages") from error
    return blake2b(head + text.encode("ascii"), digest_size=ALIAS_BYTES, person=b"kvlease-alias").digest()


def _canonical(message: JsonObject) -> Json:
    """What stays the same when a client sends an answer back: role, name, text, tool calls; not ids or reasoning."""
    role = message.get("role")
    text = _text(message.get("content"))
    if isinstance(text, str) and role == "assistant":
        text = text.rpartition(_THOUGHT_END)[2].strip()
    return [role, message.get("name"), text, _tool_calls(message.get("tool_calls"))]


def _text(content: Json) -> Json:
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
        return "".join(text for text in texts if isinstance(text, str))
    return content


def _tool_calls(calls: Json) -> Json:
    if not isinstance(calls, list):
        return []
    found: list[Json] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            found.append([function.get("name"), _arguments(function.get("arguments"))])
    return found


def _arguments(arguments: Json) -> Json:
    """Arguments are JSON in a string, and some clients format it anew. What cannot be read or written stays a text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
