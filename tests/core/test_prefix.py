"""The prefix index: chained blocks, longest match by rank, one bound for all."""

from collections import UserList
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdrouter.core.ledger import RankKey
from pdrouter.core.prefix import PrefixIndex, block_hashes
from pdrouter.errors import InvariantViolation

A0, A1, B0 = RankKey("a", 0), RankKey("a", 1), RankKey("b", 0)
RANKS = (A0, A1, B0, RankKey("b", 1), RankKey("c", 0))
ROOMY = 1 << 20


def chain(letters: Sequence[object]) -> tuple[int, ...]:
    """Return blocks that are equal where all letters so far are."""
    return tuple(hash(tuple(letters[: end + 1])) for end in range(len(letters)))


def make_index(max_bytes: int = ROOMY, **held: Sequence[RankKey]) -> PrefixIndex:
    """Return an index in which ranks hold prompts of these letters."""
    index = PrefixIndex(max_bytes)
    for letters, ranks in held.items():
        for rank in ranks:
            index.insert(chain(letters), rank)
    return index


# Hashes


def test_equal_prefixes_have_equal_hashes() -> None:
    """Hashes agree up to the first difference and never again, even where later blocks are the same."""
    ours, theirs = block_hashes([b"a", b"b", b"c", b"d"], b""), block_hashes([b"a", b"X", b"c", b"d"], b"")
    assert len(set(ours + theirs)) == 7
    assert ours[0] == theirs[0]
    assert block_hashes([memoryview(b"a")], b"") == ours[:1]
    assert block_hashes([], b"") == ()


def test_hashes_fit_the_index() -> None:
    """They are signed numbers of 64 bits, of both signs."""
    hashes = block_hashes([bytes([number]) for number in range(64)], b"")
    assert -(2**63) <= min(hashes) < 0 < max(hashes) < 2**63


def test_a_seed_separates() -> None:
    """The same text under another model or salt matches nothing."""
    assert not set(block_hashes([b"x", b"y"], b"m1")) & set(block_hashes([b"x", b"y"], b"m2"))


# Matches


@pytest.mark.parametrize(
    ("letters", "matched"),
    [
        ("", []),
        ("x", []),
        ("a", [(A0, 1), (A1, 1), (B0, 1)]),
        ("abc", [(A0, 3), (A1, 2), (B0, 1)]),
        ("abcd", [(A0, 3), (A1, 2), (B0, 1)]),
        ("abx", [(A0, 2), (A1, 2), (B0, 1)]),
        ("axcd", [(B0, 3), (A0, 1), (A1, 1)]),
    ],
)
def test_a_match_is_the_leading_blocks(letters: str, matched: list[tuple[RankKey, int]]) -> None:
    """Each rank matches as many leading blocks as it holds, the longest first."""
    index = make_index(abc=[A0], ab=[A1], axc=[B0])
    found = index.find(chain(letters))
    assert sorted(index.match(chain(letters)).items(), key=lambda pair: (-pair[1], pair[0])) == matched
    assert list(index.match(chain(letters)).values()) == [blocks for _, blocks in matched]
    assert found.ranks == len(matched)
    assert [found.of(rank) for rank in RANKS] == [dict(matched).get(rank, 0) for rank in RANKS]


def test_the_longest_matches_come_first_up_to_a_limit() -> None:
    """Where all ranks hold the beginning, a few have more: those are never cut off."""
    index = PrefixIndex(64 << 20)
    ranks = [RankKey(f"e{number}", 0) for number in range(100)]
    for number, rank in enumerate(ranks):
        index.insert(chain(("system", number)), rank)
    index.insert(chain(("system", "chat", 1)), ranks[70])
    index.insert(chain(("system", "chat")), ranks[30])
    longest = index.find(chain(("system", "chat", 1, 2))).longest(5)
    assert list(longest.items())[:2] == [(ranks[70], 3), (ranks[30], 2)]
    assert list(longest.values()) == [3, 2, 1, 1, 1]


def test_equals_take_turns() -> None:
    """Of ranks that hold the same, others are named after each insert, until all were."""
    index, other = PrefixIndex(64 << 20), RankKey("other", 0)
    ranks = {RankKey(f"e{number}", 0) for number in range(30)}
    for rank in ranks:
        index.insert(chain("s"), rank)
    named: set[RankKey] = set()
    for number in range(8):
        longest = index.find(chain("s")).longest(4)
        assert len(longest) == 4
        named |= set(longest)
        index.insert(chain((number,)), other)
    assert named == ranks


class Counted(UserList[int]):
    """Blocks that count how often they are looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.looks += 1
        return self.data[index]


@pytest.mark.parametrize("ranks", [1, 10_000])
def test_a_lookup_costs_by_nodes(ranks: int) -> None:
    """A prompt of ten thousand blocks that is held by ten thousand ranks takes as many looks as by one."""
    index = PrefixIndex(256 << 20)
    blocks = range(10_000)
    index.insert(blocks, A0)
    for number in range(ranks - 1):
        index.insert(blocks, RankKey(f"e{number}", 0))
    Counted.looks = 0
    found = index.find(Counted([*blocks, -1]))
    assert len(found.longest(8)) == min(8, ranks)
    assert Counted.looks < 8
    Counted.looks = 0
    assert index.find(Counted([*blocks[:5000], -2, -3])).of(A0) == 5000
    assert Counted.looks < 24  # a bisection


# Bounds


@pytest.mark.invariant("I9")
def test_one_bound_for_all_ranks() -> None:
    """The least recently used prompts go first, whoever holds them, and are counted."""
    index = PrefixIndex(10_000)
    for number in range(100):
        index.insert(chain((number, "x")), RANKS[number % 3])
        index.insert(chain(("often", "y")), B0)
        assert index.used_bytes <= 10_000
        assert index.match(chain((number, "x"))) == {RANKS[number % 3]: 2}
        assert index.match(chain(("often", "y"))) == {B0: 2}
    kept = [number for number in range(100) if index.match(chain((number,)))]
    assert 2 < len(kept) < 20
    assert kept == list(range(100 - len(kept), 100))
    assert (index.entries, index.evictions) == (2 * len(kept) + 2, 200 - 2 * len(kept))
    index.validate()


@pytest.mark.invariant("I9")
def test_a_prompt_too_long_to_keep() -> None:
    """What is left is its beginning."""
    index = PrefixIndex(4000)
    index.insert(chain(range(1000)), A0)
    assert index.match(chain(range(1000))) == {A0: 250}
    assert (index.entries, index.evictions) == (250, 750)


@pytest.mark.invariant("I9")
def test_too_little_memory_for_anything() -> None:
    """Nothing is kept, and nothing breaks."""
    index = PrefixIndex(1)
    for number in range(10):
        index.insert(chain((number,)), A0)
    assert (index.entries, index.evictions, index.match(chain((9,)))) == (0, 10, {})


@pytest.mark.invariant("I9")
def test_a_rank_holds_no_more_than_its_capacity() -> None:
    """The least recently used goes from its end, as far as needed; other ranks' stays."""
    index = make_index(abcdef=[A0, A1], xyz=[A0])
    index.set_capacity(A0, 7)
    assert (index.match(chain("abcdef")), index.match(chain("xyz"))) == ({A1: 6}, {A0: 3})
    index.insert(chain("abc"), A0)
    index.insert(chain("mn"), A0)
    assert (index.match(chain("abcdef")), index.match(chain("xyz"))) == ({A1: 6, A0: 3}, {A0: 2})
    index.insert(chain("12345678"), A0)
    assert [index.match(chain(letters)).get(A0) for letters in ("12345678", "mn", "abc", "x")] == [7, None, None, None]
    assert (index.entries, index.evictions) == (13, 6 + 1 + 1 + 2 + 3 + 2)
    index.set_capacity(A0, None)
    index.insert(chain("12345678"), A0)
    assert index.match(chain("12345678")) == {A0: 8}
    index.set_capacity(A0, 0)
    assert index.match(chain("1")) == {}
    index.insert(chain("1"), A0)
    assert index.match(chain("1")) == {}


@pytest.mark.invariant("I9")
def test_a_chain_is_evicted_from_its_end() -> None:
    """A beginning that many prompts share outlives them."""
    index = make_index(abcd=[A0], abxy=[A0], abmn=[A0])
    index.set_capacity(A0, 4)
    assert index.match(chain("abmn")) == {A0: 4}
    assert index.match(chain("abcd")) == {A0: 2}
    index.set_capacity(A0, 1)
    assert index.match(chain("abcd")) == {A0: 1}


def test_the_oldest_rank_may_have_been_used_again() -> None:
    """What counts is the last use, not the first."""
    index = PrefixIndex(6000)
    for letters, rank in (("a", A0), ("b", A1), ("c", B0), ("a", A0)):
        index.insert(chain(letters), rank)
    number = 0
    while index.match(chain("a")):
        assert number == 0 or not index.match(chain("b")) or index.match(chain("c"))
        number += 1
        index.insert(chain((number,)), RANKS[3])
    assert not index.match(chain("b"))
    assert not index.match(chain("c"))


# Endpoints that leave, and corrections


def test_a_gone_endpoint_is_forgotten() -> None:
    """All of its ranks, nothing of others; also one of which nothing is known."""
    index = make_index(ab=[A0], a=[A1, B0])
    empty = PrefixIndex(ROOMY).used_bytes
    index.forget("nobody")
    index.forget("a")
    assert (index.match(chain("ab")), index.entries) == ({B0: 1}, 1)
    index.forget("b")
    assert (index.match(chain("a")), index.entries, index.used_bytes) == ({}, 0, empty)


@pytest.mark.invariant("I9")
def test_endpoints_that_come_and_go_leave_nothing() -> None:
    """Also while nothing is ever evicted."""
    index = make_index(a=[A0])
    for number in range(1000):
        index.insert(chain("ab"), RankKey(f"e{number}", 0))
        index.forget(f"e{number}")
    assert index.match(chain("ab")) == {A0: 1}
    assert len(index._oldest) < 10


@pytest.mark.parametrize(
    ("held", "matched"),
    [
        (0, {"abcd": 0, "abxy": 0, "q": 1}),
        (1, {"abcd": 1, "abxy": 1, "q": 1}),
        (2, {"abcd": 2, "abxy": 4, "q": 1}),
        (3, {"abcd": 3, "abxy": 4, "q": 1}),
        (4, {"abcd": 4, "abxy": 4, "q": 1}),
        (5, {"abcde": 5, "abxy": 4, "q": 1}),
        (9, {"abcde": 5, "abxy": 4, "q": 1}),
    ],
)
def test_a_correction(held: int, matched: dict[str, int]) -> None:
    """A rank that held less than was thought has lost what hangs on the rest; one that held more is believed."""
    index = make_index(abcd=[A0, A1], abxy=[A0], q=[A0])
    index.correct(chain("abcde"), A0, held)
    assert {letters: index.match(chain(letters)).get(A0, 0) for letters in matched} == matched
    assert index.match(chain("abcd"))[A1] == 4
    index.validate()


def test_a_correction_within_one_run() -> None:
    """Nothing hangs on it: its end goes."""
    index = make_index(abcd=[A0])
    index.correct(chain("abcd"), A0, 3)
    assert (index.match(chain("abcd")), index.entries) == ({A0: 3}, 3)
    index.correct(chain("abcd"), A0, 0)
    assert (index.match(chain("abcd")), index.entries) == ({}, 0)


def test_who_left_is_not_corrected() -> None:
    """A late word of a gone endpoint's rank changes nothing."""
    index = make_index(ab=[A0])
    index.forget("a")
    index.correct(chain("ab"), A0, 2)
    assert (index.match(chain("ab")), index.used_bytes) == ({}, 0)


def test_wrong_books_are_told() -> None:
    """Sizes that don't add up, and a chain without its beginning."""
    index = make_index(ab=[A0])
    index.entries += 1
    with pytest.raises(InvariantViolation, match="books"):
        index.validate()
    index = make_index(ab=[A0, A1], abc=[A1])
    holder = index._holders[A1]
    index._drop(next(hold for hold in holder.holds.values() if hold.node.parent is None))
    with pytest.raises(InvariantViolation, match="beginning"):
        index.validate()


# Beside a naive model

LETTERS = st.text("ab", max_size=6)
WHO = st.sampled_from(RANKS)


class Naive:
    """Each rank's prefixes in a set; nothing is ever evicted."""

    def __init__(self) -> None:
        self.held: dict[RankKey, set[str]] = {}

    def insert(self, letters: str, rank: RankKey) -> None:
        """Remember every prefix."""
        self.held.setdefault(rank, set()).update(letters[: end + 1] for end in range(len(letters)))

    def correct(self, letters: str, rank: RankKey, held: int) -> None:
        """Remember what is held, and drop whatever begins with what isn't."""
        if rank not in self.held:
            return
        self.insert(letters[:held], rank)
        if held < len(letters):
            gone = letters[: held + 1]
            self.held[rank] = {prefix for prefix in self.held[rank] if not prefix.startswith(gone)}

    def match(self, letters: str) -> dict[RankKey, int]:
        """Count leading blocks."""
        counts = {
            rank: sum(letters[: end + 1] in held for end in range(len(letters))) for rank, held in self.held.items()
        }
        return {rank: count for rank, count in counts.items() if count}


class IndexBesideModel(RuleBasedStateMachine):
    """Without bounds the index is the model; with bounds it knows no more than the model, and what was just told."""

    def __init__(self) -> None:
        super().__init__()
        self.naive = Naive()
        self.roomy = PrefixIndex(1 << 30)
        self.tight = PrefixIndex(9000)
        self.capacities: dict[RankKey, int | None] = {}

    @rule(letters=LETTERS, rank=WHO)
    def insert(self, letters: str, rank: RankKey) -> None:
        """What was just inserted is held, as far as it fits."""
        for book in (self.roomy, self.tight):
            book.insert(chain(letters), rank)
        self.naive.insert(letters, rank)
        capacity = self.capacities.get(rank)
        fitting = len(letters) if capacity is None else min(capacity, len(letters))
        assert self.tight.find(chain(letters)).of(rank) >= fitting

    @rule(letters=LETTERS, rank=WHO, held=st.integers(0, 7))
    def correct(self, letters: str, rank: RankKey, held: int) -> None:
        """Whatever was thought before."""
        for book in (self.roomy, self.tight):
            book.correct(chain(letters), rank, held)
        self.naive.correct(letters, rank, held)

    @rule(endpoint=st.sampled_from("abc"))
    def forget(self, endpoint: str) -> None:
        """An endpoint leaves; its ranks' capacities go with it."""
        for book in (self.roomy, self.tight):
            book.forget(endpoint)
        self.naive.held = {rank: held for rank, held in self.naive.held.items() if rank.endpoint != endpoint}
        self.capacities = {rank: known for rank, known in self.capacities.items() if rank.endpoint != endpoint}

    @rule(rank=WHO, capacity=st.one_of(st.none(), st.integers(0, 8)))
    def set_capacity(self, rank: RankKey, capacity: int | None) -> None:
        """Only the tight index has them."""
        self.tight.set_capacity(rank, capacity)
        self.naive.held.setdefault(rank, set())
        self.roomy.set_capacity(rank, None)
        self.capacities[rank] = capacity

    @rule(letters=LETTERS)
    def match(self, letters: str) -> None:
        """The same, or no more."""
        expected = self.naive.match(letters)
        assert self.roomy.match(chain(letters)) == expected
        found = self.tight.match(chain(letters))
        assert all(blocks <= expected[rank] for rank, blocks in found.items())
        assert list(found.values()) == sorted(found.values(), reverse=True)

    @rule(letters=LETTERS, limit=st.integers(1, 4))
    def longest(self, letters: str, limit: int) -> None:
        """As many as asked for, and none that is longer is left out."""
        match = self.roomy.find(chain(letters))
        longest, everybody = match.longest(limit), self.naive.match(letters)
        assert list(longest.values()) == sorted(everybody.values(), reverse=True)[:limit]
        assert all(match.of(rank) == everybody[rank] == blocks for rank, blocks in longest.items())

    @invariant()
    def the_books_are_right(self) -> None:
        """Sizes, bounds, chains."""
        for book in (self.roomy, self.tight):
            book.validate()
        assert self.tight.used_bytes <= 9000
        for rank, capacity in self.capacities.items():
            assert capacity is None or self.tight._holders[rank].blocks <= capacity

    @precondition(lambda self: not self.capacities)
    @invariant()
    def entries_are_pairs(self) -> None:
        """A block that two ranks hold counts twice."""
        assert self.roomy.entries == sum(len(held) for held in self.naive.held.values())


TestIndexBesideModel = pytest.mark.invariant("I9")(IndexBesideModel.TestCase)
TestIndexBesideModel.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)

ANY_BLOCKS = st.lists(st.integers(-3, 3), max_size=6).map(tuple)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("icm"), ANY_BLOCKS, WHO, st.integers(0, 6)), max_size=25))
def test_hashes_that_collide_break_nothing(steps: list[tuple[str, tuple[int, ...], RankKey, int]]) -> None:
    """Where two different beginnings have one hash a match may be wrong; sizes stay right, and all can be forgotten."""
    index = PrefixIndex(5000)
    for verb, blocks, rank, number in steps:
        if verb == "i":
            index.insert(blocks, rank)
        elif verb == "c":
            index.correct(blocks, rank, number)
        else:
            assert all(0 < held <= len(blocks) for held in index.match(blocks).values())
        assert index.used_bytes <= 5000
    for endpoint in "abc":
        index.forget(endpoint)
    assert (index.entries, index.used_bytes) == (0, 0)
