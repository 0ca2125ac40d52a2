"""Prefix cache of one rank: blocks of KV by chained hash, shared, pinned while in use, evicted by age.

A chained hash names a block together with all before it, so a flat table is the radix tree. Requests pin
whole chains from the root; chains are let go leaf first, so the oldest unpinned block is always a leaf and
eviction in that order never breaks a chain.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Blocks held by one rank. ``block_tokens`` is the size of a block; the pool is owned by the caller."""

    __slots__ = ("_idle", "_pins", "block_tokens")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def pinned_tokens(self) -> int:
        """Tokens in blocks that live requests use, each block counted once."""
        return len(self._pins) * self.block_tokens

    @property
    def idle_tokens(self) -> int:
        """Tokens in blocks kept for reuse, which may be evicted."""
        return len(self._idle) * self.block_tokens

    def match(self, blocks: Sequence[int], limit: int) -> int:
        """Count of leading blocks present, ``limit`` at most."""
        pins, idle = self._pins, self._idle
        count = 0
        for block in blocks[:limit]:
            if block not in pins and block not in idle:
                break
            count += 1
        return count

    def pin(self, blocks: Sequence[int]) -> int:
        """Hold these blocks, adding what is missing; returns how many were added."""
        pins, idle = self._pins, self._idle
        before = len(pins) + len(idle)
        for block in blocks:
            if block in pins:
                pins[block] += 1
            else:
                pins[block] = 1
                if block in idle:
                    del idle[block]
        return len(pins) + len(idle) - before

    def unpin(self, blocks: Sequence[int]) -> None:
        """Let go of blocks pinned before; the last to let go leaves them idle, newest at the root."""
        pins, idle = self._pins, self._idle
        for block in reversed(blocks):
            count = pins.pop(block)
            if count > 1:
                pins[block] = count - 1
            else:
                idle[block] = None

    def evict(self, tokens: int) -> int:
        """Drop the oldest idle blocks until ``tokens`` are freed or none is left; returns tokens freed."""
        freed = 0
        while freed < tokens and self._idle:
            self._idle.popitem(last=False)
            freed += self.block_tokens
        return freed

    def clear(self) -> None:
        """Drop all idle blocks."""
        self._idle.clear()
