"""The live router's core over a fleet of engine models, in virtual time.

Arrivals, engines, load reports and growth are moments on one heap; between them nothing happens. The core is told what
the live data plane would tell it, when it would. The same seed gives the same run (I4). Engines: ``engine_model.py``;
what a run has shown: ``virtual/run.py``.
"""

import random
from collections.abc import Mapping, Sequence
from math import inf

import msgspec

from pdrouter.core import events
from pdrouter.core.decision import Decision, Placement, Rejection
from pdrouter.core.entrance import MustWait
from pdrouter.core.fleet import Endpoint
from pdrouter.core.line import Waiting
from pdrouter.core.load import RankReport
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router
from pdrouter.errors import InvalidRequest, InvariantViolation, RouterError
from pdrouter.sim.job import Event, EventKind, Job, RankLoad
from pdrouter.sim.profiles import Profile
from pdrouter.sim.text import BYTES_PER_TOKEN
from pdrouter.sim.virtual.agenda import FIRST_AND_LAST, Agenda, Site, build
from pdrouter.sim.virtual.fleet_spec import FleetSpec
from pdrouter.sim.virtual.run import Answer, Run, start_run
from pdrouter.sim.virtual.trace import Request, Trace
from pdrouter.sim.virtual.waitroom import Waiter, Waitroom

# Read as members of their enums they would cost a tenth of a microsecond each time.
_FINISHED, _PROGRESS, _RESERVED, _TRANSFERRED = (
    EventKind.FINISHED,
    EventKind.PROGRESS,
    EventKind.RESERVED,
    EventKind.TRANSFERRED,
)


_IDLE_S = 0.01
"""What counts as a step of a rank all of whose answers were preempted; chosen."""


class SimulatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the world around the router behaves.

    Each endpoint reports every ``report_interval_s``, and what it tells is ``report_delay_s`` old; an interval of 0:
    never. Growth is told for all answers of a rank at once, every ``growth_steps`` steps (live: for each by itself,
    every 16 tokens). Chosen: figures with 16 and 64 differ by less than seeds do, and 64 takes a quarter less time.
    """

    report_interval_s: float = 2.0
    report_delay_s: float = 0.0
    growth_steps: int = 64
    seed: int = 0


class Leg(Job):
    """A job that knows its request."""

    __slots__ = ("flight", "site")

    def __init__(self, flight: "Flight", site: "Site", rank: int, request: Request) -> None:
        super().__init__(rank, request.prompt_tokens, request.output_tokens, request.blocks, FIRST_AND_LAST)
        self.flight = flight
        self.site = site


class Flight:
    """One request under way."""

    __slots__ = ("decision", "decode", "first_s", "is_prefilled", "is_reserved", "number", "prefill", "request", "told")
    decode: Leg

    def __init__(self, number: int, request: Request, decision: Decision) -> None:
        self.number = number
        self.request = request
        self.decision = decision
        self.prefill: Leg | None = None
        self.is_prefilled = False
        self.is_reserved = False
        self.first_s = 0.0
        self.told = 0


class Station(msgspec.Struct, frozen=True):
    """An endpoint: as the router knows it, and its sites."""

    endpoint: Endpoint
    sites: Sequence[Site]

    def find(self, rank: int) -> tuple[Site, int]:
        """Return the site of a rank, and the rank's number there."""
        return (self.sites[0], rank) if len(self.sites) == 1 else (self.sites[rank], 0)


class Simulator:
    """One run over one trace."""

    def __init__(
        self,
        router: Router,
        fleet: FleetSpec,
        profiles: Mapping[str, Profile],
        trace: Trace,
        settings: SimulatorSettings,
    ) -> None:
        self.router = router
        self.run = start_run(fleet, trace)
        self._stations: dict[str, Station] = {}
        self._trace = trace
        self._settings = settings
        self._agenda = Agenda(self._happened)
        entrance = router.entrance
        self._waitroom = None if entrance is None else Waitroom(entrance.admission, self._agenda)
        self._answering: dict[Site, dict[Flight, None]] = {}
        self._chance = random.Random(settings.seed)  # noqa: S311 - no secret
        self._left = len(trace.requests)
        for _, endpoint, sites in build(fleet, profiles, trace.block_tokens):
            self._stations[endpoint.address] = Station(endpoint, sites)

    def simulate(self) -> Run:
        """Run it to the end of the last answer."""
        agenda = self._agenda
        for station in self._stations.values():
            self.router.observe(events.EndpointJoined(station.endpoint), 0.0)
            self._report_later(station)
        for number, request in enumerate(self._trace.requests):
            agenda.run_until(request.at_s)
            self._arrive(number, request)
        while self._left:
            agenda.go_on()
        self.run.preemptions = sum(s.model.preemptions for station in self._stations.values() for s in station.sites)
        return self.run

    # A request's life.

    def _arrive(self, number: int, request: Request) -> None:
        facts = RequestFacts(
            request_id="",
            prompt_tokens=request.prompt_tokens,
            model=request.model,
            prefix_blocks=request.blocks,
            block_tokens=self._trace.block_tokens,
        )
        told = self._decide(number, request, facts, request.at_s, is_admitted=False)
        if told is not None:
            self._wait(number, request, facts, told)

    def _wait(self, number: int, request: Request, facts: RequestFacts, told: MustWait) -> None:
        if self._waitroom is None:
            raise InvariantViolation("a request is to wait where nobody does")

        def go_on(now_s: float) -> None:
            self._decide(number, request, facts, now_s, is_admitted=True)

        waiting: Waiting[object] = Waiting(
            request=Waiter(go_on, self._reject),
            model=told.model,
            priority=facts.priority,
            tenant=facts.tenant,
            weight=facts.weight,
            work_s=told.work_s,
            size_bytes=request.prompt_tokens * BYTES_PER_TOKEN,
            deadline_s=inf,
        )
        self._waitroom.enter(waiting, request.at_s)

    def _decide(
        self, number: int, request: Request, facts: RequestFacts, now_s: float, *, is_admitted: bool
    ) -> MustWait | None:
        decision = self.router.decide(facts, now_s, is_admitted=is_admitted)
        if isinstance(decision, MustWait):
            return decision
        if isinstance(decision, Rejection):
            self._reject(decision.error)
        else:
            self._start(Flight(number, request, decision), now_s)
        return None

    def _reject(self, error: RouterError) -> None:
        self.run.rejected[error.code] += 1
        self._left -= 1

    def _start(self, flight: Flight, now_s: float) -> None:
        decision = flight.decision
        flight.decode = self._leg(flight, decision.decode)
        legs = [flight.decode]
        if decision.prefill is not None:
            flight.prefill = self._leg(flight, decision.prefill)
            legs.insert(0, flight.prefill)
        if not all(leg.site.model.fits(leg) for leg in legs):
            error = InvalidRequest("longer than the engine's KV")
            self.router.settle(decision, now_s, error)
            self._reject(error)
            return
        for leg in legs:
            leg.site.model.submit(leg, now_s)
            self._agenda.advance(leg.site, now_s)

    def _leg(self, flight: Flight, placement: Placement) -> Leg:
        site, rank = self._stations[placement.endpoint.address].find(placement.rank or 0)
        return Leg(flight, site, rank, flight.request)

    def _happened(self, event: Event) -> None:
        leg, kind, at_s = event.job, event.kind, event.at_s
        assert isinstance(leg, Leg)  # noqa: S101 (narrows the type)
        flight = leg.flight
        if kind is _FINISHED:
            self._finished(flight, event)
        elif kind is _PROGRESS:
            self._begun(flight, at_s)
        elif kind is _TRANSFERRED:
            prefill, decision = flight.prefill, flight.decision
            if prefill is not None:
                usage = events.PrefillUsageSeen(decision, prefill.prompt_tokens, prefill.cached_tokens)
                self.router.observe(usage, at_s)
            self.router.observe(events.FirstTokenSeen(decision), at_s)
            if prefill is not None:
                prefill.site.model.release(prefill, at_s)
                self._agenda.advance(prefill.site, at_s)
        else:
            if kind is _RESERVED:
                flight.is_reserved = True
            else:
                flight.is_prefilled = True
            if flight.is_reserved and flight.is_prefilled:
                decode = flight.decode
                decode.site.model.start_transfer(decode, at_s)
                if decode.site is not leg.site:
                    self._agenda.advance(decode.site, at_s)

    def _begun(self, flight: Flight, at_s: float) -> None:
        flight.first_s = at_s
        if flight.prefill is None:
            self.router.observe(events.FirstTokenSeen(flight.decision), at_s)
        site = flight.decode.site
        answering = self._answering.get(site)
        if answering is None:
            self._answering[site] = answering = {}
            self._tell_later(site, at_s)
        answering[flight] = None

    def _finished(self, flight: Flight, event: Event) -> None:
        router, decision, now_s = self.router, flight.decision, event.at_s
        if flight.first_s:
            del self._answering[flight.decode.site][flight]
        else:  # an answer of one token
            flight.first_s = now_s
            if flight.prefill is None:
                router.observe(events.FirstTokenSeen(decision), now_s)
        if event.tokens > flight.told:
            router.observe(events.TokensGenerated(decision, event.tokens - flight.told), now_s)
        if router.wants_usage(decision):
            prompt_tokens = flight.request.prompt_tokens
            router.observe(events.UsageSeen(decision, prompt_tokens, event.tokens, event.tokens), now_s)
        router.settle(decision, now_s)
        if self._waitroom is not None:
            self._waitroom.room_may_be(now_s)
        self._note(flight, now_s)
        flight.prefill = None  # nor is a cycle left for the collector
        del flight.decode
        self._left -= 1

    def _note(self, flight: Flight, now_s: float) -> None:
        request, reader, writer = flight.request, flight.prefill or flight.decode, flight.decode
        self.run.answers.append(
            Answer(
                flight.number,
                request.at_s,
                flight.first_s - request.at_s,
                now_s - request.at_s,
                request.prompt_tokens,
                request.output_tokens,
                reader.cached_tokens,
                reader.site.place + reader.rank,
                writer.site.place + writer.rank,
            )
        )

    # What the router is told meanwhile.

    def _tell_later(self, site: Site, now_s: float) -> None:
        at_s = now_s + self._settings.growth_steps * (site.model.step_s or _IDLE_S)
        self._agenda.put(at_s, lambda now_s: self._tell_growth(site, now_s))

    def _tell_growth(self, site: Site, now_s: float) -> None:
        flights = self._answering[site]
        if not flights:
            del self._answering[site]
            return
        observe = self.router.observe
        generated = site.model.generated_by([flight.decode for flight in flights], now_s)
        for flight, tokens in zip(flights, generated, strict=True):
            if tokens > flight.told:
                observe(events.TokensGenerated(flight.decision, tokens - flight.told), now_s)
                flight.told = tokens
        self._tell_later(site, now_s)

    def _report_later(self, station: Station) -> None:
        if self._settings.report_interval_s > 0:
            first_s = self._settings.report_interval_s * self._chance.random()
            self._agenda.put(first_s, lambda now_s: self._sample(station, now_s))

    def _sample(self, station: Station, now_s: float) -> None:
        ranks: list[RankReport] = []
        for site in station.sites:
            ranks += [_report(len(ranks) + load.rank, load) for load in site.model.loads(now_s)]
            self._agenda.advance(site, now_s)
        report = events.LoadReported(station.endpoint.address, ranks, now_s)
        delay_s = self._settings.report_delay_s
        if delay_s > 0:
            self._agenda.put(now_s + delay_s, lambda now_s: self.router.observe(report, now_s))
        else:
            self.router.observe(report, now_s)
        self._agenda.put(now_s + self._settings.report_interval_s, lambda now_s: self._sample(station, now_s))


def _report(rank: int, load: RankLoad) -> RankReport:
    """What SGLang tells of a rank, as ``engines/sglang.py`` reads it."""
    waiting = load.waiting + load.bootstrap + load.prealloc + load.retracted
    return RankReport(
        rank,
        tokens=load.total_tokens,
        requests=load.running + waiting,
        throughput_tokens_per_s=load.gen_tokens_per_s,
        kv_use=load.used_tokens / load.capacity_tokens,
        waiting_requests=waiting,
        prefill_tokens_total=load.prefill_uncached_tokens,
        prefill_busy_s_total=load.prefill_busy_s,
    )
