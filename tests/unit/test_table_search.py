"""What the table answers: the longest common prefix against a plain search, reasons of misses, aliases, lists.

The plain search looks at every lease; the table's answer must be as good, whatever the order of the leases.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlease.registry.errors import InvalidRequest, LimitReached
from kvlease.registry.prefix_index import ROW_ENTRIES, PrefixIndex
from kvlease.registry.table_limits import ALIAS_SWEEP_MS, SCAN_LIMIT, TableLimits
from kvlease.registry.values import (
    Alias,
    ConversationId,
    EndReason,
    EngineId,
    Hit,
    LeaseFilter,
    LeaseId,
    Located,
    Miss,
    MissReason,
    ResolveQuery,
    TenantId,
)

from tests.unit.table_story import FINGERPRINT, TENANT, Story, chain

OTHER = TenantId("other")
TEXTS = st.text(alphabet="ab", min_size=1, max_size=6)
UNKNOWN = Miss(reason=MissReason.UNKNOWN)


def _common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(texts=st.lists(TEXTS, max_size=12), query=TEXTS, removed=st.sets(st.integers(0, 11)))
def test_nearest_gives_every_lease_in_order_of_its_common_prefix(
    texts: list[str], query: str, removed: set[int]
) -> None:
    index = PrefixIndex()
    for i, text in enumerate(texts):
        index.add(chain(text), LeaseId(str(i)))
    for i in removed & set(range(len(texts))):
        index.remove(chain(texts[i]), LeaseId(str(i)))
    found = list(index.nearest(chain(query)))
    expected = {str(i): _common(t, query) for i, t in enumerate(texts) if i not in removed and _common(t, query)}
    assert {lease_id: common for common, lease_id in found} == expected
    assert [common for common, _ in found] == sorted(expected.values(), reverse=True)


def test_an_index_of_many_rows_stays_in_order_and_finds_the_best() -> None:
    index, chance = PrefixIndex(), Random(7)
    chains = ["".join(chance.choices("abc", k=chance.randint(1, 8))) for _ in range(5 * ROW_ENTRIES)]
    for i, text in enumerate(chains):
        index.add(chain(text), LeaseId(str(i)))
    index.check()
    gone = set(chance.sample(range(len(chains)), 3 * ROW_ENTRIES))
    for i in gone:
        index.remove(chain(chains[i]), LeaseId(str(i)))
    index.check()
    with pytest.raises(KeyError):
        index.remove(chain(chains[min(gone)]), LeaseId(str(min(gone))))
    left = [text for i, text in enumerate(chains) if i not in gone]
    assert len(index) == len(left)
    for query in ("".join(chance.choices("abc", k=8)) for _ in range(50)):
        found = [common for common, _ in index.nearest(chain(query))]
        assert found == sorted((n for t in left if (n := _common(t, query))), reverse=True)
    for i in set(range(len(chains))) - gone:
        index.remove(chain(chains[i]), LeaseId(str(i)))
    assert list(index.nearest(chain("abc"))) == []


def test_the_longest_prefix_wins_then_the_longest_time_left() -> None:
    story = Story()
    first, second = story.lender("d0"), story.lender("d1", clock_ms=-500)
    first.lend("short", "ab", conversation="1", ttl_ms=900_000)
    first.lend("early", "abcd", conversation="2", ttl_ms=5_000)
    second.lend("late", "abce", conversation="3", ttl_ms=6_000)
    assert story.found("abcx") == "late"
    assert story.found("abcdx") == "early"
    assert story.found("abx") == "short"
    assert story.resolve("x") == UNKNOWN


def test_a_lease_longer_than_the_prompt_counts_by_what_is_common() -> None:
    story = Story()
    story.lender("d0").lend("a", "abcdef")
    answer = story.resolve("abc")
    assert isinstance(answer, Hit)
    assert answer.matched_strides == 3


def test_silent_lenders_and_other_fingerprints_are_searched_past() -> None:
    story = Story()
    silent = story.lender("d0")
    silent.lend("silent", "abcd", conversation="1")
    story.now_ms += TableLimits().suspect_after_ms
    lender = story.lender("d1")
    lender.lend("good", "ab", conversation="2")
    assert story.found("abcd") == "good"
    lender.ended("good")
    assert story.resolve("abcd") == Miss(reason=MissReason.SUSPECT)
    lender.publish(replace(lender.lease("relaid", "abcd", conversation="3"), fingerprint_hash=b"g" * 16))
    answer = story.resolve("abcd", fingerprint=b"g" * 16)
    assert isinstance(answer, Hit)
    assert answer.lease_id == "relaid"


def test_the_scan_is_bounded() -> None:
    story = Story()
    silent = story.lender("d0")
    silent.publish(*(silent.lease(f"l{i}", f"ab{i:04}", conversation=None) for i in range(SCAN_LIMIT - 1)))
    story.now_ms += TableLimits().suspect_after_ms
    story.lender("d1").lend("good", "a", conversation="2")
    assert story.found("abx") == "good"
    silent.lend("one-more", "ab", conversation=None)
    assert story.resolve("abx") == Miss(reason=MissReason.SUSPECT), "a lease beyond the limit is not looked for"


def test_another_stride_matches_nothing() -> None:
    story = Story()
    story.lender("d0").lend("a", "abc")
    query = ResolveQuery(tenant=TENANT, digests=chain("abc"), stride_tokens=128)
    assert story.table.resolve(query, now_ms=story.now_ms) == Miss(reason=MissReason.DIVERGED)


def test_a_miss_says_why_as_exactly_as_what_was_named_allows() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "abc", conversation="chat")
    lender.lend("b", "xyz", conversation="over")
    lender.ended("b", EndReason.WEIGHTS_CHANGED)
    assert story.resolve("uvw") == UNKNOWN
    assert story.resolve("uvw", lease="a") == Miss(reason=MissReason.DIVERGED)
    assert story.resolve("uvw", conversation="chat") == Miss(reason=MissReason.DIVERGED)
    assert story.resolve("uvw", conversation="nothing") == UNKNOWN
    ended = Miss(reason=MissReason.ENDED, end_reason=EndReason.WEIGHTS_CHANGED)
    assert story.resolve("uvw", lease="b") == ended
    assert story.resolve(lease="b") == ended
    named = Miss(reason=MissReason.FINGERPRINT, lender_fingerprint=FINGERPRINT)
    assert story.resolve(lease="a", fingerprint=b"g" * 16) == named
    assert story.resolve(conversation="chat", fingerprint=b"g" * 16) == named
    assert isinstance(story.resolve(lease="a", fingerprint=FINGERPRINT.hash), Hit)
    story.now_ms += TableLimits().suspect_after_ms
    assert story.resolve(lease="a") == Miss(reason=MissReason.SUSPECT)
    assert story.resolve(conversation="chat") == Miss(reason=MissReason.SUSPECT)


def test_by_conversation_the_longest_and_by_lease_the_one_named() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "abc")
    lender.lend("b", "abdef")
    assert story.found(conversation="chat") == "b"
    assert story.found(lease="a", conversation="chat") == "a"
    lender.ended("a")
    assert story.found(lease="a", conversation="chat") == "b"


def test_a_foreign_lease_looks_exactly_like_none() -> None:
    story = Story()
    lender = story.lender("d0")
    lender.lend("a", "abc")
    lender.lend("gone", "xyz")
    lender.ended("gone")
    for lease in ("a", "gone", "never"):
        assert story.resolve(lease=lease, tenant=OTHER) == UNKNOWN
        assert story.resolve("abc", lease=lease, tenant=OTHER) == UNKNOWN
    assert story.resolve(conversation="chat", tenant=OTHER) == UNKNOWN
    located = story.table.locate(OTHER, ConversationId("chat"), (), now_ms=story.now_ms)
    assert located == Located(conversation=ConversationId("chat"), lease=None, reason=MissReason.UNKNOWN)
    assert story.table.list_leases(LeaseFilter(tenant=OTHER), limit=9, now_ms=story.now_ms) == ([], None)


@pytest.mark.parametrize("query", [ResolveQuery(tenant=TENANT), ResolveQuery(tenant=TENANT, digests=b"d" * 15)])
def test_a_query_without_sense_is_refused(query: ResolveQuery) -> None:
    with pytest.raises(InvalidRequest):
        Story().table.resolve(query, now_ms=0)


def _alias(number: int) -> Alias:
    return Alias(number.to_bytes(16, "big"))


def _name(story: Story, conversation: str, *aliases: int, ttl_ms: int = 0, tenant: TenantId = TENANT) -> None:
    names = [_alias(x) for x in aliases]
    story.heard(
        story.table.name_conversation(tenant, ConversationId(conversation), names, ttl_ms=ttl_ms, now_ms=story.now_ms)
    )


def _locate(story: Story, *aliases: int, tenant: TenantId = TENANT) -> Located:
    located = story.table.locate(tenant, None, [_alias(x) for x in aliases], now_ms=story.now_ms)
    story.table.check()
    return located


def test_the_first_alias_that_is_known_names_the_conversation() -> None:
    story = Story()
    story.lender("d0").lend("a", "abc")
    _name(story, "chat", 1)
    _name(story, "older", 2)
    located = _locate(story, 9, 1, 2)
    assert located.lease is not None
    assert (located.conversation, located.lease.lease_id, located.api_url) == ("chat", "a", "http://d0")
    assert _locate(story, 9, 2) == Located(conversation=ConversationId("older"), lease=None, reason=MissReason.UNKNOWN)
    assert _locate(story, 9) == Located(conversation=None, lease=None, reason=MissReason.UNKNOWN)
    assert _locate(story, 1, tenant=OTHER).conversation is None


def test_the_newest_naming_wins_and_is_forgotten_in_time() -> None:
    story = Story()
    _name(story, "one", 1, ttl_ms=1_000)
    _name(story, "two", 1, ttl_ms=2_000)
    story.now_ms += 1_999
    assert _locate(story, 1).conversation == "two"
    story.now_ms += 1
    assert _locate(story, 1).conversation is None, "before any tick"
    story.wait(ALIAS_SWEEP_MS)
    assert story.table.next_wake_ms() is None, "nothing is left to do"


def test_aliases_are_bounded() -> None:
    story = Story(TableLimits(max_aliases_per_tenant=2, max_tenants=1))
    _name(story, "one", 1, ttl_ms=5_000)
    _name(story, "two", 2, ttl_ms=1_000)
    _name(story, "three", 3, ttl_ms=9_000)
    assert [_locate(story, x).conversation for x in (1, 2, 3)] == ["one", None, "three"]
    with pytest.raises(LimitReached):
        _name(story, "four", 4, tenant=OTHER)
    with pytest.raises(InvalidRequest):
        _name(story, "five", 5, ttl_ms=TableLimits().max_alias_ttl_ms + 1)


def test_a_list_goes_on_where_it_stopped_whatever_came_and_went() -> None:
    story = Story()
    first, second = story.lender("d0"), story.lender("d1")
    for name in "bdfhj":
        (first if name < "f" else second).lend(name, name, conversation=name)
    seen: list[str] = []
    after: LeaseId | None = None
    while True:
        page, after = story.table.list_leases(LeaseFilter(), after=after, limit=2, now_ms=story.now_ms)
        seen.extend(x.lease_id for x in page)
        if after is None:
            break
        if after == "d":
            first.ended("d")
            first.lend("a", "a", conversation="a")
            first.lend("e", "e", conversation="e")
    assert seen == ["b", "d", "e", "f", "h", "j"]

    def listed(wanted: LeaseFilter) -> list[str]:
        return [x.lease_id for x in story.table.list_leases(wanted, limit=99, now_ms=story.now_ms)[0]]

    assert listed(LeaseFilter(engine_id=EngineId("d1"))) == ["f", "h", "j"]
    assert listed(LeaseFilter(conversation=ConversationId("e"))) == ["e"]
    assert listed(LeaseFilter(tenant=TENANT, conversation=ConversationId("e"))) == ["e"]
    assert listed(LeaseFilter(tenant=OTHER)) == []


def test_a_tenants_list_goes_on_after_leases_of_its_own_only() -> None:
    """Whoever could start a page behind another tenant's lease would learn that it is there, and its id."""
    story = Story()
    lender = story.lender("d0")
    for number in range(40):
        lender.lend(f"a{number:02}", f"a{number}", conversation=f"c{number}")
    for start in (None, LeaseId("a"), LeaseId("a17")):
        listed = story.table.list_leases(LeaseFilter(tenant=OTHER), after=start, limit=1, now_ms=story.now_ms)
        assert listed == ([], None)
    lender.publish(*(replace(lender.lease(x, x, conversation=x), tenant=OTHER) for x in ("a05x", "a30x")))
    for wanted in (LeaseFilter(tenant=OTHER), LeaseFilter(tenant=OTHER, engine_id=EngineId("d0"))):
        assert _pages(story, wanted) == [(["a05x"], "a05x"), (["a30x"], "a30x"), ([], None)]


def test_a_page_looks_at_a_bounded_part_of_a_tenants_leases() -> None:
    story = Story()
    first, second = story.lender("d0"), story.lender("d1")
    for number in range(25):
        first.lend(f"a{number:02}", f"a{number}", conversation=f"c{number}")
    second.lend("b", "b", conversation="b")
    pages = _pages(story, LeaseFilter(tenant=TENANT, engine_id=EngineId("d1")))
    assert pages == [([], "a09"), ([], "a19"), (["b"], "b"), ([], None)]


def _pages(story: Story, wanted: LeaseFilter) -> list[tuple[list[str], LeaseId | None]]:
    """All pages of one lease each: the ids in it, and where the next one starts."""
    pages: list[tuple[list[str], LeaseId | None]] = []
    while not pages or pages[-1][1] is not None:
        after = pages[-1][1] if pages else None
        leases, following = story.table.list_leases(wanted, after=after, limit=1, now_ms=story.now_ms)
        pages.append(([x.lease_id for x in leases], following))
    return pages


@given(texts=st.lists(TEXTS, max_size=12), query=TEXTS)
def test_the_short_cut_says_what_the_long_way_says_or_nothing(texts: list[str], query: str) -> None:
    index = PrefixIndex()
    for i, text in enumerate(texts):
        index.add(chain(text), LeaseId(str(i)))
    best, ways = index.best(chain(query)), list(index.nearest(chain(query)))
    if best is not None:
        assert best == ways[0]
        assert len(ways) == 1 or ways[1][0] < ways[0][0], "the only one that shares as much"


def test_the_next_turn_of_a_conversation_takes_the_short_cut() -> None:
    index, texts = PrefixIndex(), [f"{first}bc" for first in "abcdefghijklmnopqrstuvwxyz"]
    for text in texts:
        index.add(chain(text), LeaseId(text))
    answers = [index.best(chain(f"{text}de")) for text in texts]
    assert len([x for x in answers if x is not None]) >= len(texts) - 2, "all but those at the ends of a row"
    assert {x for x in answers if x is not None} <= {(3, LeaseId(text)) for text in texts}
