"""Who has to go where no more may wait: of the lowest priority, of the tenant with the most waiting, its youngest.

How much a tenant has waiting counts by its weight. Source: longest queue drop (Suter, Lakshman, Stiliadis,
Choudhury, INFOCOM 1998). In which order those that stay have their turn is ``line.py``'s.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable
from typing import Generic, TypeVar

from pdrouter.core.heap import ChangingHeap, Entry
from pdrouter.core.line import Place, Waiting

T = TypeVar("T")


class _Crew(Generic[T]):
    """What waits of one tenant at one priority, the oldest first."""

    __slots__ = ("entry", "places", "tenant", "weight")

    def __init__(self, tenant: Hashable, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.places: dict[Place[T], None] = {}
        self.entry: Entry[_Crew[T]] | None = None

    def size_with(self, more: int) -> float:
        """Return how many there would be for each unit of weight, if so many more came."""
        return (len(self.places) + more) / self.weight


class _Band(Generic[T]):
    """The tenants that wait at one priority, those with the most first."""

    __slots__ = ("by_size", "crews")

    def __init__(self) -> None:
        self.crews: dict[Hashable, _Crew[T]] = {}
        self.by_size: ChangingHeap[_Crew[T]] = ChangingHeap()

    def resize(self, crew: _Crew[T]) -> None:
        """Put a tenant where the number of its waiting requests says."""
        if crew.entry is None:
            crew.entry = self.by_size.put(-crew.size_with(0), crew)
        elif crew.places:
            crew.entry = self.by_size.move(crew.entry, -crew.size_with(0))
        else:
            self.by_size.drop(crew.entry)
            del self.crews[crew.tenant]


class Crowd(Generic[T]):
    """All that wait, whatever their model; O(log n) to join, to leave and to find who has to go."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band[T]] = {}
        self._priorities: list[int] = []

    def join(self, place: Place[T]) -> None:
        """Count a request in."""
        waiting = place.waiting
        band = self._bands.get(waiting.priority)
        if band is None:
            band = self._bands[waiting.priority] = _Band()
            insort(self._priorities, waiting.priority)
        crew = band.crews.get(waiting.tenant)
        if crew is None:
            crew = band.crews[waiting.tenant] = _Crew(waiting.tenant, waiting.weight)
        crew.places[place] = None
        band.resize(crew)

    def leave(self, place: Place[T]) -> None:
        """Count a request out that was in."""
        priority = place.waiting.priority
        band = self._bands[priority]
        crew = band.crews[place.waiting.tenant]
        del crew.places[place]
        band.resize(crew)
        if not band.crews:
            del self._bands[priority]
            del self._priorities[bisect_left(self._priorities, priority)]

    def least_deserving(self, arrival: Waiting[T]) -> Place[T] | None:
        """Return who has to go for an arrival; ``None`` if that is the arrival itself.

        It stays by a higher priority, or if its tenant would have fewer than the one that has the most.
        """
        if not self._priorities or arrival.priority < self._priorities[0]:
            return None
        lowest = self._priorities[0]
        band = self._bands[lowest]
        largest = band.by_size.top().item
        if arrival.priority == lowest:
            own = band.crews.get(arrival.tenant) or _Crew(arrival.tenant, arrival.weight)
            if own.size_with(1) >= largest.size_with(0):
                return None
        return next(reversed(largest.places))
