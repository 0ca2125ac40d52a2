"""Virtual time: engines and other moments on one heap, in order. Knows no requests and no router.

A site is what goes on by itself: an engine whose ranks step together, or one rank of another engine.
"""

from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf

from pdrouter.core.fleet import Endpoint
from pdrouter.sim.engine_model import EngineModel, ModelSettings
from pdrouter.sim.full_kv import rule_of
from pdrouter.sim.job import Event
from pdrouter.sim.profiles import Profile
from pdrouter.sim.virtual.fleet_spec import EngineSpec, FleetSpec, at_speed, endpoints_of

FIRST_AND_LAST = 1 << 40
"""The interval of a job of which only the first and the last token are told."""

Action = Callable[[float], None]


class Site:
    """A model, the place of its first rank among all ranks of the fleet, and when it must be looked at."""

    __slots__ = ("due_s", "model", "place")

    def __init__(self, model: EngineModel, place: int) -> None:
        self.model = model
        self.place = place
        self.due_s = inf


class Agenda:
    """All that is to come; ``happened`` takes the events of sites."""

    def __init__(self, happened: Callable[[Event], None]) -> None:
        self._happened = happened
        self._heap: list[tuple[float, int, Site | Action]] = []
        self._order = count()

    @property
    def next_s(self) -> float:
        """The next moment, infinite if there is none."""
        return self._heap[0][0] if self._heap else inf

    def put(self, at_s: float, action: Action) -> None:
        """Do something at a moment, which it is given."""
        heappush(self._heap, (at_s, next(self._order), action))

    def go_on(self) -> None:
        """Let the next moment come."""
        self.run_until(self.next_s)

    def run_until(self, end_s: float) -> None:
        """Let all moments come up to and including this one."""
        heap = self._heap
        while heap and heap[0][0] <= end_s:
            now_s, _, what = heappop(heap)
            if not isinstance(what, Site):
                what(now_s)
            elif what.due_s == now_s:
                what.due_s = inf
                self.advance(what, now_s)

    def advance(self, site: Site, now_s: float) -> None:
        """Let a site go on to a moment, and come back when it has something to do."""
        model, happened = site.model, self._happened
        while (due_s := model.next_event_s) <= now_s:
            for event in model.advance(now_s):
                happened(event)
        if due_s != site.due_s:
            site.due_s = due_s
            if due_s < inf:
                heappush(self._heap, (due_s, next(self._order), site))


def build(
    fleet: FleetSpec, profiles: Mapping[str, Profile], block_tokens: int
) -> Iterator[tuple[EngineSpec, Endpoint, list[Site]]]:
    """Return every endpoint with its sites: one for all its ranks if they step together, else one for each."""
    place = 0
    for spec, endpoint in endpoints_of(fleet):
        profile = at_speed(profiles[spec.profile], spec.speed)
        ranks = spec.ranks if profile.dp_split is not None else 1
        settings = ModelSettings(
            profile=profile,
            role=spec.role,
            dp_size=ranks,
            kv_capacity_tokens=spec.kv_capacity_tokens or profile.kv_capacity_tokens,
            block_tokens=block_tokens,
            when_full=rule_of(profile.engine),
        )
        yield spec, endpoint, [Site(EngineModel(settings), place + first) for first in range(0, spec.ranks, ranks)]
        place += spec.ranks
