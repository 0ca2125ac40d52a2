"""Bytes on their way to one client: what the kernel doesn't take waits here, within limits.

It knows no HTTP and no clock. Read next: ``connection.py``, which has one of these.
"""

import asyncio
from collections import Counter

from pdrouter.proxy.budgets import WriteBudget


class Outgoing:
    """Writes to one client.

    ``is_behind``: the kernel takes no more, so some bytes wait. ``is_full``: more than ``limit_bytes`` wait.
    """

    __slots__ = ("_budget", "_counts", "_limit_bytes", "_transport", "_untaken_bytes", "is_behind", "is_full")

    def __init__(
        self, transport: asyncio.Transport, limit_bytes: int, budget: WriteBudget, counts: Counter[str]
    ) -> None:
        transport.set_write_buffer_limits(0)  # pause_writing() comes with the first byte that must wait
        self.is_behind = False
        self.is_full = False
        self._transport = transport
        self._limit_bytes = limit_bytes
        self._budget = budget
        self._counts = counts
        self._untaken_bytes = 0

    def write(self, data: bytes) -> None:
        """Send bytes, unless the connection is closing."""
        transport = self._transport
        if transport.is_closing():
            return
        if self.is_behind:
            self._untaken_bytes += len(data)
        transport.write(data)  # it may call pause_writing(), and that may cut the connection
        if self.is_behind and not transport.is_closing():
            self.count()

    def count(self) -> None:
        """Count the bytes that wait."""
        unsent_bytes = self.measure()
        if unsent_bytes > self._limit_bytes and not self.is_full:  # I9
            self.is_full = True
            self._counts["write_buffer_full"] += 1
        self._budget.hold(self, unsent_bytes)

    def clear(self) -> None:
        """Nothing waits any more."""
        self.is_behind = self.is_full = False
        self._budget.release(self)

    def measure(self) -> int:
        """Return how many bytes wait to be sent now."""
        return self._transport.get_write_buffer_size()

    def mark(self) -> None:
        """Remember what waits, for ``has_moved``."""
        self._untaken_bytes = self.measure()

    @property
    def has_moved(self) -> bool:
        """Whether the client has taken anything since ``mark()``."""
        return self.measure() < self._untaken_bytes

    def abort(self) -> None:
        """Close at once; what waits is dropped."""
        self._transport.abort()
