"""The prefix index: chained blocks, longest match by rank, one bound for all."""

import pytest

from pdrouter.core.ledger import RankKey
from pdrouter.core.prefix import PrefixIndex, block_hashes

A0, A1, B0 = RankKey("a", 0), RankKey("a", 1), RankKey("b", 0)


def test_equal_prefixes_have_equal_hashes() -> None:
    """Hashes agree up to the first difference and never again, even where later blocks are the same."""
    ours, theirs = block_hashes(b"aaaabbbbcccc", 4), block_hashes(b"aaaaXbbbcccc", 4)
    assert len(set(ours + theirs)) == 5
    assert ours[0] == theirs[0]


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_whole_blocks_count(length: int, blocks: int) -> None:
    """A rest is left out."""
    assert len(block_hashes(b"x" * length, 4)) == blocks


def test_a_seed_separates() -> None:
    """The same text under another model or other tools matches nothing."""
    assert not set(block_hashes(b"x" * 8, 4, seed=b"m1")) & set(block_hashes(b"x" * 8, 4, seed=b"m2"))


@pytest.mark.parametrize(
    ("prompt", "matched"),
    [
        ((), {}),
        ((9,), {}),
        ((1,), {A0: 1, A1: 1, B0: 1}),
        ((1, 2, 3), {A0: 3, A1: 2, B0: 1}),
        ((1, 2, 3, 4), {A0: 3, A1: 2, B0: 1}),
        ((2, 7), {A0: 1, A1: 1}),
        ((1, 7, 3), {A0: 1, A1: 1, B0: 3}),
    ],
)
def test_a_match_is_the_leading_blocks(prompt: tuple[int, ...], matched: dict[RankKey, int]) -> None:
    """Each rank matches as many leading blocks as it holds without a gap."""
    index = PrefixIndex(100)
    index.insert((1, 2, 3), A0)
    index.insert((1, 2), A1)
    index.insert((1,), B0)
    index.insert((7,), B0)
    index.insert((3,), B0)
    assert index.match(prompt) == matched


@pytest.mark.invariant("I9")
def test_one_bound_for_all_ranks() -> None:
    """The least recently used blocks go first, and are counted."""
    index = PrefixIndex(4)
    index.insert((1, 2), A0)
    index.insert((5, 6), B0)
    index.insert((1, 2), A0)
    assert (index.entries, index.evictions) == (4, 0)
    index.insert((7,), A1)
    assert (index.entries, index.evictions) == (4, 1)
    assert (index.match((1, 2)), index.match((5, 6)), index.match((7,))) == ({A0: 2}, {B0: 1}, {A1: 1})


@pytest.mark.invariant("I9")
def test_a_chain_is_evicted_from_its_end() -> None:
    """What is left of a prompt too long to keep is its beginning, which still matches."""
    index = PrefixIndex(3)
    index.insert((1, 2, 3, 4, 5), A0)
    assert index.match((1, 2, 3, 4, 5)) == {A0: 3}
    assert (index.entries, index.evictions) == (3, 2)


def test_a_gone_endpoint_is_forgotten() -> None:
    """All of its ranks, nothing of others."""
    index = PrefixIndex(100)
    index.insert((1, 2), A0)
    index.insert((1,), A1)
    index.insert((1,), B0)
    index.forget("a")
    assert (index.match((1, 2)), index.entries) == ({B0: 1}, 1)
    index.forget("b")
    assert (index.match((1,)), index.entries) == ({}, 0)
