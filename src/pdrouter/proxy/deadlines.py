"""Time limits: one timer for all that wait equally long, because a timer for each costs more than to look once."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Calls ``expire`` with whatever hasn't been taken out ``limit_s`` after it was put in."""

    def __init__(self, limit_s: float, expire: Callable[[T], None]) -> None:
        self.limit_s = limit_s
        self._expire = expire
        self._due_s: dict[T, float] = {}  # the first to expire comes first
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: T) -> None:
        """Begin to wait."""
        self._due_s[item] = time.monotonic() + self.limit_s
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.limit_s, self._look)

    def take_out(self, item: T) -> None:
        """Wait no more."""
        self._due_s.pop(item, None)

    def _look(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        for item, due_s in list(self._due_s.items()):
            if due_s > now_s:
                self._timer = asyncio.get_running_loop().call_later(due_s - now_s, self._look)
                return
            if self._due_s.pop(item, None) is not None:
                self._expire(item)
