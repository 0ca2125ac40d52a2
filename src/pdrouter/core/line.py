"""Those of one model that wait for a rank, in the order in which they go: by priority, fair share, least work.

1. The highest priority goes first.
2. Within it tenants share by weight: the one whose start tag is the least goes next, and its tag grows by the work
   that it was given. Source: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), the work as the cost.
3. Within a tenant the least work goes first, and each second of waiting takes ``aging_rate`` seconds off it:
   ``work - aging_rate * (now - since)`` orders as ``work + aging_rate * since``, which time doesn't change.

It knows no bounds (``admission.py``) and no clock.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

from pdrouter.core.heap import ChangingHeap

T = TypeVar("T")

_MAX_RESTING = 4096
"""Tenants without waiting requests whose share is remembered, for each priority (I9)."""


class Waiting(msgspec.Struct, Generic[T], frozen=True, eq=False, kw_only=True):
    """A request that may have to wait, and what its turn depends on.

    ``request`` is the caller's. A higher ``priority`` goes first. ``tenant`` is whose share it is taken from,
    ``weight`` (above 0) how large that share is beside others'. ``work_s`` is the time that its prompt is expected to
    take, ``size_bytes`` what it holds in memory, ``deadline_s`` the moment after which nobody wants it any more.
    """

    request: T
    model: str | None
    priority: int
    tenant: Hashable
    weight: float
    work_s: float
    size_bytes: int
    deadline_s: float


class Place(Generic[T]):
    """One place in a line: the handle by which a request leaves it."""

    __slots__ = ("flow", "since_s", "turn", "waiting")

    def __init__(self, waiting: Waiting[T], since_s: float, flow: "Flow[T]", key: float) -> None:
        self.waiting = waiting
        self.since_s = since_s
        self.flow = flow
        self.turn = flow.by_work.put(key, self)

    @property
    def is_kept(self) -> bool:
        """Whether it still stands in its line."""
        return self.turn.is_live


class Flow(Generic[T]):
    """What waits of one tenant at one priority; ``start_s`` is its start tag."""

    __slots__ = ("by_work", "start_s", "tenant", "turn", "weight")

    def __init__(self, tenant: Hashable, weight: float, start_s: float, by_start: "ChangingHeap[Flow[T]]") -> None:
        self.tenant = tenant
        self.weight = weight
        self.start_s = start_s
        self.by_work: ChangingHeap[Place[T]] = ChangingHeap()
        self.turn = by_start.put(start_s, self)


class _Band(Generic[T]):
    """The tenants that wait at one priority; ``now_s`` is its virtual time."""

    __slots__ = ("_counts", "by_start", "flows", "now_s", "resting")

    def __init__(self, counts: Counter[str]) -> None:
        self.now_s = 0.0
        self.flows: dict[Hashable, Flow[T]] = {}
        self.by_start: ChangingHeap[Flow[T]] = ChangingHeap()
        self.resting: dict[Hashable, float] = {}
        self._counts = counts

    def flow_of(self, waiting: Waiting[T]) -> Flow[T]:
        """Return what waits of the tenant; one that is new here starts at virtual time, or where it had got to."""
        flow = self.flows.get(waiting.tenant)
        if flow is None:
            start_s = max(self.now_s, self.resting.pop(waiting.tenant, 0.0))
            flow = self.flows[waiting.tenant] = Flow(waiting.tenant, waiting.weight, start_s, self.by_start)
        return flow

    def charge(self, flow: Flow[T], work_s: float) -> None:
        """Let virtual time go on to the tenant that is served, and its tag by what it was given."""
        self.now_s = flow.start_s
        flow.start_s += work_s / flow.weight
        flow.turn = self.by_start.move(flow.turn, flow.start_s)

    def rest(self, flow: Flow[T]) -> None:
        """Let a tenant go of which nothing waits; what it was given is remembered while it is ahead of others."""
        del self.flows[flow.tenant]
        self.by_start.drop(flow.turn)
        if flow.start_s > self.now_s:
            self.resting[flow.tenant] = flow.start_s
            if len(self.resting) > _MAX_RESTING:  # I9
                del self.resting[next(iter(self.resting))]
                self._counts["forgotten_shares"] += 1


class Line(Generic[T]):
    """The waiting requests of one model; O(log n) to join, to leave and to be the next.

    ``counts`` is where it counts that it forgot what a tenant had been given.
    """

    def __init__(self, aging_rate: float, counts: Counter[str]) -> None:
        self._counts = counts
        self._aging_rate = aging_rate
        self._bands: dict[int, _Band[T]] = {}
        self._priorities: list[int] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def highest(self) -> int:
        """The highest priority that waits; there must be one."""
        return self._priorities[-1]

    def join(self, waiting: Waiting[T], now_s: float) -> Place[T]:
        """Let a request wait from now on."""
        band = self._bands.get(waiting.priority)
        if band is None:
            band = self._bands[waiting.priority] = _Band(self._counts)
            insort(self._priorities, waiting.priority)
        flow = band.flow_of(waiting)
        place = Place(waiting, now_s, flow, waiting.work_s + self._aging_rate * now_s)
        self._length += 1
        return place

    def leave(self, place: Place[T]) -> bool:
        """Let a request go without its turn; ``False`` if it was gone."""
        if not place.is_kept:
            return False
        flow, priority = place.flow, place.waiting.priority
        band = self._bands[priority]
        flow.by_work.drop(place.turn)
        self._length -= 1
        if not len(flow.by_work):
            band.rest(flow)
        if not band.flows:
            del self._bands[priority]
            del self._priorities[bisect_left(self._priorities, priority)]
        return True

    def take(self) -> Place[T]:
        """Take out the request whose turn it is; there must be one."""
        band = self._bands[self.highest]
        flow = band.by_start.top().item
        place = flow.by_work.top().item
        band.charge(flow, place.waiting.work_s)
        self.leave(place)
        return place
