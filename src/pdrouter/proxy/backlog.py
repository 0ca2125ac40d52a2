"""Bytes of one client that came before their turn: pipelined requests wait here unparsed, as they were sent.

A parsed request takes many times the memory of its bytes, so of small ones no more than one is parsed ahead.
Read next: ``connection.py``.
"""

from pdrouter.proxy.budgets import BodyBudget, Sender
from pdrouter.proxy.client import Client

AT_ONCE_BYTES = 1024
"""Bytes that are parsed at once where it isn't known where a request ends (I9): some forty requests; chosen."""

_END_OF_HEAD = b"\r\n\r\n"


class Backlog:
    """What came and isn't parsed; it counts in the budget of bodies once it has to wait."""

    __slots__ = ("_budget", "_data", "_held_bytes", "_start")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._data = b""
        self._start = 0
        self._held_bytes = 0

    def __bool__(self) -> bool:
        """Whether anything is left."""
        return bool(self._data)

    def put(self, data: bytes) -> None:
        """Take bytes; there are none left of those before."""
        self._data, self._start = data, 0

    def hold(self, sender: Sender) -> bool:
        """Count what has to wait; return whether there is room for it."""
        self._held_bytes = len(self._data)
        return not self._held_bytes or self._budget.hold(sender, self._held_bytes)

    def take(self, incoming: Client | None) -> memoryview:
        """Return what to parse next: a head, the rest of a body whose length is known, or not much."""
        data, start = self._data, self._start
        end = self._start = _end_of_piece(data, start, incoming)
        if end >= len(data):
            self.drop()
        return memoryview(data)[start:end]

    def drop(self) -> None:
        """Forget what is left."""
        self._data = b""
        if self._held_bytes:
            self._budget.release(self._held_bytes)
            self._held_bytes = 0


def _end_of_piece(data: bytes, start: int, incoming: Client | None) -> int:
    end = start + AT_ONCE_BYTES
    if incoming is None:
        end_of_head = data.find(_END_OF_HEAD, start, end)
        return end if end_of_head < 0 else end_of_head + len(_END_OF_HEAD)
    length = incoming.header.get(b"content-length")
    return end if length is None else start + max(int(length) - incoming.body_bytes, 1)
