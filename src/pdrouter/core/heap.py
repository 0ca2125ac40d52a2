"""A heap whose entries' keys change: the old place is left behind and passed over.

Each change costs one push of the C library's heap. Entries come in the order of their keys without being taken out, so
that a search may stop as soon as no later key can do better.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

T = TypeVar("T")

_SLACK = 64
"""Places left behind that are always allowed; beyond that as many as there are entries (I9)."""

_GONE = 0


class Entry(Generic[T]):
    """One item and its key; ``serial`` names its place in the heap, others of it are left behind."""

    __slots__ = ("item", "key", "serial")

    def __init__(self, key: float, item: T) -> None:
        self.key = key
        self.item = item
        self.serial = _GONE

    @property
    def is_live(self) -> bool:
        """Whether it is in its heap."""
        return self.serial != _GONE


class ChangingHeap(Generic[T]):
    """Items by key; among equal keys the one that was put longest ago comes first, so that ties rotate.

    The first place is never one that was left behind.
    """

    __slots__ = ("_heap", "_live", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry[T]]] = []
        self._live = 0
        self._serial = _GONE

    def __len__(self) -> int:
        return self._live

    @property
    def left_behind(self) -> int:
        """Places that are passed over."""
        return len(self._heap) - self._live

    def put(self, key: float, item: T) -> Entry[T]:
        """Add an item."""
        self._live += 1
        return self.move(Entry(key, item), key)

    def move(self, entry: Entry[T], key: float) -> Entry[T]:
        """Give an entry of this heap another key, and return it."""
        self._serial += 1
        entry.key, entry.serial = key, self._serial
        heap = self._heap
        if heap and heap[0][2] is entry:
            heapreplace(heap, (key, self._serial, entry))
            self._tidy()
        else:
            heappush(heap, (key, self._serial, entry))
            if len(heap) > 2 * self._live + _SLACK:
                self._shrink()
        return entry

    def drop(self, entry: Entry[T]) -> None:
        """Pass over an entry from now on."""
        if entry.serial != _GONE:
            entry.serial = _GONE
            self._live -= 1
            self._tidy()
            if len(self._heap) > 2 * self._live + _SLACK:
                self._shrink()

    def top(self) -> Entry[T]:
        """Return the entry with the least key; there must be one."""
        return self._heap[0][2]

    def in_order(self) -> Iterator[Entry[T]]:
        """Yield entries by key; only as many are looked at as are asked for, and those left behind among them."""
        heap = self._heap
        if not heap:
            return
        frontier: list[tuple[float, int, int]] = [(heap[0][0], heap[0][1], 0)]
        while frontier:
            _, serial, index = heappop(frontier)
            entry = heap[index][2]
            if entry.serial == serial:
                yield entry
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heappush(frontier, (heap[child][0], heap[child][1], child))

    def _tidy(self) -> None:
        heap = self._heap
        while heap and heap[0][2].serial != heap[0][1]:
            heappop(heap)

    def _shrink(self) -> None:
        self._heap = [place for place in self._heap if place[2].serial == place[1]]
        heapify(self._heap)
