"""Which rank likely holds which prefix of a prompt: a bounded index of chained block hashes.

A prompt is cut into blocks; each block's hash includes all before it, so that equal hashes mean equal prefixes.
Whoever computed the hashes, the index takes them as they are.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import xxhash

from pdrouter.core.ledger import RankKey


def block_hashes(text: bytes, block_bytes: int, *, seed: bytes = b"") -> tuple[int, ...]:
    """Return the chained hashes of the whole blocks of ``text``; ``seed`` separates what must not match."""
    chained = xxhash.xxh3_64_intdigest(seed)
    hashes = []
    for start in range(0, len(text) - block_bytes + 1, block_bytes):
        chained = xxhash.xxh3_64_intdigest(text[start : start + block_bytes], chained)
        hashes.append(chained)
    return tuple(hashes)


class PrefixIndex:
    """Block hash to the ranks that likely hold it.

    It holds at most ``max_entries`` (block, rank) pairs (I9); the least recently used block goes first.
    """

    def __init__(self, max_entries: int) -> None:
        self.entries = 0
        self.evictions = 0
        self._max_entries = max_entries
        self._blocks: OrderedDict[int, dict[RankKey, None]] = OrderedDict()

    def match(self, blocks: Iterable[int]) -> dict[RankKey, int]:
        """Return how many leading blocks each rank holds; ranks that hold none are left out."""
        matched: dict[RankKey, int] = {}
        for depth, block in enumerate(blocks):
            holders = self._blocks.get(block)
            if holders is None:
                break
            is_longer = False
            for rank in holders:
                if matched.get(rank, 0) == depth:
                    matched[rank] = depth + 1
                    is_longer = True
            if not is_longer:
                break
        return matched

    def insert(self, blocks: Sequence[int], rank: RankKey) -> None:
        """Remember that ``rank`` holds these leading blocks."""
        for block in reversed(blocks):  # a chain's end is older than its beginning, so that it goes first
            holders = self._blocks.get(block)
            if holders is None:
                holders = self._blocks[block] = {}
            else:
                self._blocks.move_to_end(block)
            if rank not in holders:
                holders[rank] = None
                self.entries += 1
        while self.entries > self._max_entries:
            _, evicted = self._blocks.popitem(last=False)
            self.entries -= len(evicted)
            self.evictions += len(evicted)

    def forget(self, endpoint: str) -> None:
        """Drop all that was known of an endpoint's ranks; it left."""
        empty = []
        for block, holders in self._blocks.items():
            for rank in [r for r in holders if r.endpoint == endpoint]:
                del holders[rank]
                self.entries -= 1
            if not holders:
                empty.append(block)
        for block in empty:
            del self._blocks[block]
