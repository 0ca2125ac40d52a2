"""What ranks hold of a prompt: those that hold most are listed, the others can be asked for."""

from pdrouter.core.holders import cached_tokens
from pdrouter.core.ledger import RankKey
from pdrouter.core.prefix import PrefixIndex

from .builders import facts

PROMPT = facts(1000, prefix_blocks=(1, 2, 3, 4), block_tokens=250.0)


def index(holders: int) -> PrefixIndex:
    """Return an index in which so many ranks hold the prompt's first block, the first of them all of it."""
    prefixes = PrefixIndex(2**24)
    for rank in range(holders):
        prefixes.insert(PROMPT.prefix_blocks if not rank else PROMPT.prefix_blocks[:1], RankKey("p", rank))
    return prefixes


def test_what_few_ranks_hold() -> None:
    """All are listed; of a prompt that is held whole one token is left to read."""
    assert cached_tokens(index(2), PROMPT) == {RankKey("p", 0): 999, RankKey("p", 1): 250}
    assert cached_tokens(index(0), PROMPT) == {}
    assert cached_tokens(index(2), facts(1000)) == {}


def test_what_many_ranks_hold() -> None:
    """Only so many are listed; whoever isn't is looked up."""
    cached = cached_tokens(index(40), PROMPT)
    assert len(cached) == 32
    assert cached[RankKey("p", 0)] == 999
    (unlisted, *_) = {RankKey("p", rank) for rank in range(40)} - set(cached)
    assert [cached.get(key, 0) for key in (unlisted, RankKey("p", 0), RankKey("q", 0))] == [250, 999, 0]
