"""Callers known by bearer tokens: the file that says whose each token is, and the token of a call.

The file holds hashes, so that reading it makes nobody a caller. One line a token, `#` starts a comment:

    sha256:HEX kvlease://ROLE/NAME?tenant=ID [kvlease://...]

Invariant: a token is held as its hash only, and neither is ever in a message, a log or a repr.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvlease.registry.errors import Unauthenticated
from kvlease.registry.identity import Identity, IdentityInvalid
from kvlease.registry.identity_gate import Caller, CallFacts
from kvlease.registry.secret_files import FileUnusable, Signature, read_secret, signature

MAX_TOKENS: Final = 1_024
"""A call is compared with all of them: about a tenth of a millisecond."""
_PREFIX: Final = "sha256:"
_HEX_DIGITS: Final = 64
_SCHEME: Final = "bearer "


class TokenFile:
    """A `CallerSource` over one file. `refresh` reads it, again whenever it changed; nothing else does I/O."""

    def __init__(self, path: Path) -> None:
        self._path: Final = path
        self._signature: Signature = ()
        self._callers: Mapping[bytes, Identity] = {}

    def __repr__(self) -> str:
        return f"TokenFile({str(self._path)!r})"

    def refresh(self) -> bool:
        """Read the file if it changed; whether it did. Blocks. Raises FileUnusable, and then the old lines stand."""
        seen = signature([self._path])
        if seen == self._signature:
            return False
        self._callers = parse_tokens(read_secret(self._path), str(self._path))
        self._signature = seen
        return True

    def identify(self, call: CallFacts) -> Caller:
        """Raises Unauthenticated."""
        given = [value for key, value in call.metadata if key == "authorization"]
        if len(given) != 1 or not isinstance(given[0], str) or not given[0].lower().startswith(_SCHEME):
            raise Unauthenticated("the call carries no bearer token")
        digest = hashlib.sha256(given[0][len(_SCHEME) :].strip().encode()).digest()
        found: Identity | None = None
        for known, identity in self._callers.items():  # all of them, so that the time says nothing about which
            if hmac.compare_digest(known, digest):
                found = identity
        if found is None:
            raise Unauthenticated("the bearer token is not known here")
        return Caller(identity=found, credential=digest)

    def stands(self, caller: Caller) -> bool:
        """Whether the token still is in the file, with the same grants."""
        return self._callers.get(caller.credential) == caller.identity


def parse_tokens(content: bytes, source: str) -> dict[bytes, Identity]:
    """Hash of each token -> whose it is, one at least. Raises FileUnusable, naming `source` and the line."""
    callers: dict[bytes, Identity] = {}
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise FileUnusable(f"{source}: not UTF-8 text") from error
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            digest = _digest(words[0])
            identity = Identity.parse(words[1:])
        except IdentityInvalid as error:
            raise FileUnusable(f"{source}: line {number}: {error}") from error
        if digest in callers:
            raise FileUnusable(f"{source}: line {number}: the token has a line already; put its grants on one line")
        if len(callers) >= MAX_TOKENS:
            raise FileUnusable(f"{source}: more than {MAX_TOKENS} tokens")
        callers[digest] = identity
    if not callers:  # a file cut short looks like this, and would keep everybody out
        raise FileUnusable(f"{source}: no line with a token")
    return callers


def _digest(word: str) -> bytes:
    text = word.removeprefix(_PREFIX)
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if not word.startswith(_PREFIX) or len(text) != _HEX_DIGITS or len(digest) != _HEX_DIGITS // 2:
        raise IdentityInvalid("a line starts with sha256: and the 64 hex digits of the token's hash, not with a token")
    return digest
