"""What is known of the addresses behind names, while a resolver answers, fails, changes its mind and hangs.

The resolver is the test's; the rest is the product's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from kvlease.registry.client_addresses import AddressBook, look_up
from kvlease.registry.client_endpoints import parse_endpoints


class Resolver:
    """Answers what the test says. None: does not answer."""

    def __init__(self, **names: Sequence[str] | OSError | None) -> None:
        self.names: dict[str, Sequence[str] | OSError | None] = dict(names)
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        answer = self.names[host]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, OSError):
            raise answer
        assert answer is not None
        return answer


def targets(book: AddressBook) -> list[str]:
    return [x.target for x in book.addresses]


async def test_addresses_need_no_lookup() -> None:
    resolver = Resolver()
    book = AddressBook(parse_endpoints("10.0.0.2:1,10.0.0.1:1,[::1]:2"), resolver)
    assert not book.changes
    await book.refresh(limit_s=1)
    assert (targets(book), resolver.asked) == (["10.0.0.2:1", "10.0.0.1:1", "[::1]:2"], [])


async def test_a_name_stands_for_all_its_addresses_once() -> None:
    resolver = Resolver(pods=["10.0.0.3", "10.0.0.1", "10.0.0.2"])
    book = AddressBook(parse_endpoints("10.0.0.2:7411,pods:7411"), resolver)
    assert targets(book) == ["10.0.0.2:7411"]
    await book.refresh(limit_s=1)
    assert targets(book) == ["10.0.0.2:7411", "10.0.0.1:7411", "10.0.0.3:7411"]
    assert str(book.addresses[1]) == "pods:7411 at 10.0.0.1"
    resolver.names["pods"] = ["10.0.0.4"]
    await book.refresh(limit_s=1)
    assert targets(book) == ["10.0.0.2:7411", "10.0.0.4:7411"], "what the name does not say any more is gone"


async def test_the_family_that_the_machine_prefers_comes_first() -> None:
    book = AddressBook(parse_endpoints("both:1"), Resolver(both=["::1", "127.0.0.1"]))
    await book.refresh(limit_s=1)
    assert {x.ip: x.spare for x in book.addresses} == {"::1": False, "127.0.0.1": True}


async def test_a_name_that_cannot_be_looked_up_keeps_its_addresses() -> None:
    resolver = Resolver(pods=["10.0.0.1"], other=["10.0.0.9"])
    book = AddressBook(parse_endpoints("pods:1,other:1"), resolver)
    await book.refresh(limit_s=1)
    resolver.names.update(pods=OSError(-2, "Name or service not known"), other=[])
    await book.refresh(limit_s=1)
    assert targets(book) == ["10.0.0.1:1", "10.0.0.9:1"]
    assert sorted(book.faults.values()) == ["Name or service not known", "has no address"]
    resolver.names.update(pods=["10.0.0.2"], other=["10.0.0.9"])
    await book.refresh(limit_s=1)
    assert (targets(book), book.faults) == (["10.0.0.2:1", "10.0.0.9:1"], {})


async def test_a_resolver_that_hangs_is_asked_once_and_holds_nobody_up() -> None:
    resolver = Resolver(slow=None, pods=["10.0.0.1"])
    book = AddressBook(parse_endpoints("slow:1,pods:1"), resolver)
    async with asyncio.timeout(5):
        await book.refresh(limit_s=0.05)
        await book.refresh(limit_s=0.05)
    assert targets(book) == ["10.0.0.1:1"]
    assert resolver.asked.count("slow") == 1
    assert "takes too long" in next(iter(book.faults.values()))
    book.close()


async def test_the_machines_resolver() -> None:
    assert set(await look_up("localhost")) & {"127.0.0.1", "::1"}
    with pytest.raises(OSError, match=r"not known|failure|No address"):
        await look_up("no-such-host.invalid")
