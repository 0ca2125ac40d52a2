"""A heap whose entries' keys change: the old entry is left behind and passed over.

Each change costs one push of the C library's heap. Entries come in the order of their keys without being taken out, so
that a search may stop as soon as no later key can do better.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

_SLACK = 64
"""Entries left behind that are always allowed; beyond that as many as there are live ones (I9)."""


class Entry(Generic[T]):
    """One item and its key; ``is_live`` until another entry takes its place."""

    __slots__ = ("is_live", "item", "key")

    def __init__(self, key: float, item: T) -> None:
        self.key = key
        self.item = item
        self.is_live = True


class ChangingHeap(Generic[T]):
    """Items by key; among equal keys the one that was put longest ago comes first, so that ties rotate."""

    __slots__ = ("_heap", "_live", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry[T]]] = []
        self._live = 0
        self._serial = 0

    def __len__(self) -> int:
        return self._live

    @property
    def left_behind(self) -> int:
        """Entries that are passed over."""
        return len(self._heap) - self._live

    def put(self, key: float, item: T) -> Entry[T]:
        """Add an item."""
        self._live += 1
        return self._push(key, item)

    def move(self, entry: Entry[T], key: float) -> Entry[T]:
        """Give a live entry's item another key, and return its new entry."""
        entry.is_live = False
        return self._push(key, entry.item)

    def drop(self, entry: Entry[T]) -> None:
        """Pass over an entry from now on."""
        if entry.is_live:
            entry.is_live = False
            self._live -= 1
            self._tidy()

    def _push(self, key: float, item: T) -> Entry[T]:
        entry = Entry(key, item)
        self._serial += 1
        heap = self._heap
        heappush(heap, (key, self._serial, entry))
        if not heap[0][2].is_live or len(heap) > 2 * self._live + _SLACK:
            self._tidy()
        return entry

    def top(self) -> Entry[T]:
        """Return the live entry with the least key; there must be one."""
        return self._heap[0][2]

    def first(self) -> Entry[T] | None:
        """Return the live entry with the least key."""
        return self._heap[0][2] if self._heap else None

    def in_order(self) -> Iterator[Entry[T]]:
        """Yield live entries by key; only as many are looked at as are asked for, and those left behind among them."""
        heap = self._heap
        if not heap:
            return
        frontier: list[tuple[float, int, int]] = [(heap[0][0], heap[0][1], 0)]
        while frontier:
            _, _, index = heappop(frontier)
            entry = heap[index][2]
            if entry.is_live:
                yield entry
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heappush(frontier, (heap[child][0], heap[child][1], child))

    def _tidy(self) -> None:
        heap = self._heap
        while heap and not heap[0][2].is_live:
            heappop(heap)
        if len(heap) > 2 * self._live + _SLACK:
            heap[:] = [item for item in heap if item[2].is_live]
            heapify(heap)
