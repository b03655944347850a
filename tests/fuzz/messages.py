"""Requests of every rpc as bytes: plausible ones, ones with fields out of every range, and bytes that are no message.

Pure and seeded. Built by walking the contract's descriptors, so that a field that is added is fuzzed without a change
here. Ids come from a small pool of our own, so that messages meet each other's leases and nobody else's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from kvlease.v1 import registry_pb2 as pb

RPCS: Final[Mapping[str, type[Message]]] = {
    "Publish": pb.PublishRequest,
    "Renew": pb.RenewRequest,
    "End": pb.EndRequest,
    "Resolve": pb.ResolveRequest,
    "Locate": pb.LocateRequest,
    "NameConversation": pb.NameConversationRequest,
    "ListLeases": pb.ListLeasesRequest,
    "ListEngines": pb.ListEnginesRequest,
    "Session": pb.SessionRequest,
    "ResolveStream": pb.ResolveStreamRequest,
    "Watch": pb.WatchRequest,
}
"""Every rpc and what it is asked with."""

HUGE_BYTES: Final = 4 * 1024 * 1024 + 1
"""More than one message may have."""
IDS: Final = 12
"""Of each kind."""
DEEPEST: Final = 5
INTEGERS: Final = (0, 1, 2, 63, 64, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, -1, -(2**31), -(2**63))
RANGES: Final[Mapping[int, tuple[int, int]]] = {
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}


class Maker:
    """Makes requests. Equal seeds make equal ones. `well_formed`: only such as a client of ours could send."""

    def __init__(self, seed: int, *, well_formed: bool = False) -> None:
        self._random: Final = random.Random(seed)
        self._well_formed: Final = well_formed

    def make(self, rpc: str) -> bytes:
        """The bytes of one request."""
        chance = 1.0 if self._well_formed else self._random.random()
        if chance < 0.001:
            return bytes(HUGE_BYTES)
        if chance < 0.05:
            return self._random.randbytes(self._random.randrange(200))
        message = RPCS[rpc]()
        if isinstance(message, pb.SessionRequest):
            self.say(message)
        else:
            self._fill(message, 0, sane=not self.errs(0.4))
        raw = message.SerializeToString()
        return self._mutated(raw) if chance < 0.35 else raw

    def say(self, message: pb.SessionRequest) -> None:
        """What a lender could say after its hello."""
        self._fill(message, 0, sane=not self.errs(0.3))

    def hello(self) -> pb.Hello:
        """A good one, of some engine of ours."""
        number = self._random.randrange(IDS)
        engine = pb.Engine(engine_id=f"fuzz-{number}", incarnation=bytes((number,)) * 16)
        return pb.Hello(engine=engine, now_lender_ms=self._random.choice((0, 10**6, 10**12)))

    def errs(self, share: float) -> bool:
        """True in so many of all cases, and never where all is to be well-formed."""
        return not self._well_formed and self._random.random() < share

    def choose(self, share: float) -> bool:
        """True in so many of all cases."""
        return self._random.random() < share

    def count(self, most: int) -> int:
        return self._random.randint(1, most)

    def _fill(self, message: Message, depth: int, *, sane: bool) -> None:
        for field in cast("Sequence[FieldDescriptor]", message.DESCRIPTOR.fields):
            if self._random.random() < (0.1 if sane else 0.4) or depth > DEEPEST:
                continue
            if field.containing_oneof is not None and self._random.random() < 0.6:
                continue
            if field.is_repeated:
                self._fill_many(message, field, depth, sane=sane)
            elif field.message_type is not None:
                getattr(message, field.name).SetInParent()
                self._fill(getattr(message, field.name), depth + 1, sane=sane)
            else:
                setattr(message, field.name, self._scalar(field, sane=sane))

    def _fill_many(self, message: Message, field: FieldDescriptor, depth: int, *, sane: bool) -> None:
        items = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for number in range(self._random.choice((0, 1, 16, 17, 33))):
                items[f"{number}{self._text(sane=sane)}"[:2_000]] = self._text(sane=sane)
            return
        most = 3 if depth else 40
        count = self._random.randint(1, most) if sane else self._random.choice((0, 1, 2, 64, 65, 257))
        for _ in range(count):
            if field.message_type is not None:
                self._fill(items.add(), depth + 1, sane=sane)
            else:
                items.append(self._scalar(field, sane=sane))

    def _scalar(self, field: FieldDescriptor, *, sane: bool) -> str | bytes | int | bool:
        kinds: dict[int, Callable[[], str | bytes | int | bool]] = {
            FieldDescriptor.TYPE_STRING: lambda: self._name(field.name) if sane else self._text(sane=False),
            FieldDescriptor.TYPE_BYTES: lambda: self._blob(field.name, sane=sane),
            FieldDescriptor.TYPE_BOOL: lambda: self._random.random() < 0.5,
        }
        kind = kinds.get(field.type)
        if kind is not None:
            return kind()
        if field.enum_type is not None and (sane or self._random.random() < 0.5):
            return self._random.choice([value.number for value in field.enum_type.values])
        if sane:
            return self._random.choice((1, 64, 64, 64, 1_000))
        low, high = RANGES[field.type]
        return max(low, min(high, self._random.choice(INTEGERS)))

    def _name(self, field: str) -> str:
        if field in ("traceparent", "page_token", "api_url", "version"):
            return ""
        return f"fuzz-{self._random.randrange(IDS)}" if self._random.random() < 0.8 else ""

    def _text(self, *, sane: bool) -> str:
        if sane:
            return f"fuzz-{self._random.randrange(IDS)}"
        odd = ("", "a", "a" * 128, "a" * 129, "a\0b", "a\nb", "\x1b[2J", "\u00e9", "\U0001f600" * 40, "../../x", "*")
        return self._random.choice((*odd, "x" * 5_000))

    def _blob(self, field: str, *, sane: bool) -> bytes:
        if sane and field == "digests":
            first = self._random.randrange(IDS)
            return b"".join(bytes((first, n)) * 8 for n in range(self._random.randint(1, 20)))
        if sane:
            return bytes((self._random.randrange(IDS),)) * 16
        size = self._random.choice((0, 1, 15, 16, 17, 32, 1_000, 65_536, 65_552, 262_145))
        return self._random.randbytes(min(size, 64)).ljust(size, b"\xff")

    def _mutated(self, raw: bytes) -> bytes:
        """The same with a few bytes wrong, cut, doubled, or with fields that nobody knows."""
        data = bytearray(raw)
        for _ in range(self._random.randint(1, 4)):
            place = self._random.randrange(len(data) + 1)
            match self._random.randrange(5):
                case 0 if data:
                    data[place % len(data)] ^= 1 << self._random.randrange(8)
                case 1:
                    del data[place:]
                case 2:
                    data[place:place] = self._random.randbytes(self._random.randrange(1, 9))
                case 3 if len(data) < 100_000:
                    data += bytes(data)
                case _:
                    data += b"\xfa\x7f\x03abc"  # field 2047, three bytes
        return bytes(data)
