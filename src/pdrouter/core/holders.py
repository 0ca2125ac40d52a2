"""What ranks hold of a prompt, in tokens: from the prefix index's blocks to what a decision weighs."""

from collections.abc import Mapping

from pdrouter.core.ledger import RankKey
from pdrouter.core.prefix import Match, PrefixIndex
from pdrouter.core.request import RequestFacts

_MAX_LISTED = 32
"""Ranks that are looked at one by one whatever their load, those that hold most (I9); chosen."""


def cached_tokens(prefixes: PrefixIndex, facts: RequestFacts) -> Mapping[RankKey, int]:
    """Return what each rank holds of a request's prompt; those that hold nothing aren't in it."""
    if not facts.prefix_blocks:
        return {}
    match = prefixes.find(facts.prefix_blocks)
    most = max(0, facts.prompt_tokens - 1)  # an engine computes at least one token
    longest = match.longest(_MAX_LISTED)
    cached: dict[RankKey, int] = {}
    last, tokens = 0, 0
    for rank, blocks in longest.items():
        if blocks != last:
            last, tokens = blocks, min(most, int(blocks * facts.block_tokens))
        cached[rank] = tokens
    return cached if match.ranks <= _MAX_LISTED else _ManyHolders(cached, match, facts.block_tokens, most)


class _ManyHolders(dict[RankKey, int]):
    """What ranks hold of a prompt, where more hold some than are listed: the others are looked up when asked for."""

    def __init__(self, listed: Mapping[RankKey, int], match: Match, block_tokens: float, most: int) -> None:
        super().__init__(listed)
        self._match = match
        self._block_tokens = block_tokens
        self._most = most

    def get(self, key: RankKey, default: int) -> int:  # type: ignore[override]
        """Return the tokens that a rank holds."""
        if key in self:
            return self[key]
        blocks = self._match.of(key)
        return min(self._most, int(blocks * self._block_tokens)) if blocks else default
