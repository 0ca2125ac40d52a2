"""Asks engines again and again which ids they list: an adapter that is loaded at run time is routable soon.

One small request for each endpoint that is ready. What is told is taken in by ``health.py``, as at the first contact.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from pdrouter.core.names import Card, renewed

_JITTER = 0.2
"""Share by which the time between two questions differs either way, so that they don't come all at once; chosen."""

_BASE_BYTES, _CARD_BYTES = 65_536, 1024
"""A longer reply isn't read: so much for all, and so much for each id. vLLM 0.32 writes 460 bytes for one."""

_BASE_OBJECTS, _CARD_OBJECTS = 64, 4
"""Nor one with more JSON objects: vLLM writes two for an id. Counting braces is cheap, reading them isn't."""


class ModelOptions(msgspec.Struct, frozen=True):
    """Settings of the question; ``config.py`` says what they mean."""

    interval_s: float
    most_ids: int


class ModelLists:
    """Holds what engines list to its bounds (I9); ``counts`` says what happened."""

    def __init__(self, options: ModelOptions) -> None:
        self.options = options
        self.counts = Counter(asked=0, failed=0, changed=0, too_long=0, left_out=0)

    def counters(self) -> Counter[str]:
        """Return the events counted since the start, and how many ids are left out of a list for want of room."""
        return self.counts

    def is_readable(self, body: bytes) -> bool:
        """Whether a reply is short enough to be read."""
        most = self.options.most_ids
        is_short = len(body) <= _BASE_BYTES + _CARD_BYTES * most
        if is_short and body.count(b"{") <= _BASE_OBJECTS + _CARD_OBJECTS * most:
            return True
        self.counts["too_long"] += 1
        return False

    def take(self, known: tuple[Card, ...], listed: tuple[Card, ...]) -> tuple[Card, ...]:
        """Return what is kept of a list, where ``known`` was kept before."""
        kept = renewed(known, listed[: self.options.most_ids])
        if kept != known:
            self.counts["changed"] += 1
            self.counts["left_out"] += len(listed) - len(kept)
        return kept


class ModelMonitor:
    """Asks one endpoint while it is ready."""

    def __init__(self, lists: ModelLists, is_ready: Callable[[], bool], ask: Callable[[], Awaitable[None]]) -> None:
        self._lists = lists
        self._is_ready = is_ready
        self._ask = ask
        self._rng = random.Random()  # noqa: S311

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            share = self._rng.uniform(1 - _JITTER, 1 + _JITTER)
            await asyncio.sleep(self._lists.options.interval_s * share)
            if self._is_ready():
                self._lists.counts["asked"] += 1
                await self._ask()
