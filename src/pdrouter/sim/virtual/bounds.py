"""What no router can beat: a request alone on the idle, warm fleet, and one queue with perfect knowledge.

``alone`` is a formula for each request. ``clairvoyant`` reads prompts first come, first served on whichever rank is
free, all ranks sharing one cache; then it gives each answer to the rank whose step it leaves the shortest.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import ceil, inf
from typing import NamedTuple

from pdrouter.errors import InvalidRequest
from pdrouter.sim.job import Event, EventKind, Job, Role
from pdrouter.sim.profiles import Profile
from pdrouter.sim.virtual.agenda import FIRST_AND_LAST, Agenda, Site, build
from pdrouter.sim.virtual.fleet_spec import EngineSpec, FleetSpec, at_speed
from pdrouter.sim.virtual.run import Answer, Run, start_run
from pdrouter.sim.virtual.trace import Request, Trace


class _Blocks:
    """Blocks that a cache of so many holds, those used longest ago dropped first."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def count(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks are there."""
        held = self._held
        return next((i for i, block in enumerate(blocks) if block not in held), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        """Put blocks in, the root last, so that a chain loses its end first."""
        held = self._held
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._capacity:
            held.popitem(last=False)


def prompt_s(profile: Profile, ranks: int, new_tokens: int, past_tokens: int) -> float:
    """Return the time to read one prompt, chunk by chunk, with nobody else on the engine's ``ranks``."""
    return _steps_s(profile, ranks, new_tokens, past_tokens, ceil(new_tokens / profile.prefill_chunk_tokens))


def shared_prompt_s(profile: Profile, ranks: int, new_tokens: int, past_tokens: int) -> float:
    """Return the time to read a prompt if what it leaves of its last chunk is another's."""
    return _steps_s(profile, ranks, new_tokens, past_tokens, max(1, new_tokens / profile.prefill_chunk_tokens))


def _steps_s(profile: Profile, ranks: int, new_tokens: int, past_tokens: int, steps: float) -> float:
    split = profile.dp_split if ranks > 1 else None
    curve = profile.prefill if split is None else split.prefill_local
    time_ms = curve.a0 * steps + curve.chunk_ms(new_tokens, past_tokens)
    if split is not None:
        time_ms += split.prefill_moe.g0 * steps + split.prefill_moe.g1 * new_tokens
    return time_ms / 1000


def answer_s(profile: Profile, ranks: int, prompt_tokens: int, output_tokens: int) -> float:
    """Return the time to write the tokens behind the first, with nobody else on the engine's ``ranks``."""
    steps = output_tokens - 1
    split = profile.dp_split if ranks > 1 else None
    curve = profile.decode if split is None else split.decode_local
    step_ms = curve.step_ms(1, prompt_tokens + 1) + (0.0 if split is None else split.decode_moe.step_ms(1))
    return (step_ms * steps + curve.b2 * steps * (steps - 1) / 2) / 1000


def alone(fleet: FleetSpec, profiles: Mapping[str, Profile], trace: Trace) -> Run:
    """Return each request as if it were alone, on the fastest engines, which hold all that was ever read before."""
    readers = [_made(spec, profiles) for spec in fleet if spec.role is not Role.DECODE]
    writers = [_made(spec, profiles) for spec in fleet if spec.role is not Role.PREFILL]
    is_regular = all(spec.role is Role.REGULAR for spec in fleet)
    seen = _Blocks(inf)
    run = start_run(fleet, trace)
    for number, request in enumerate(trace.requests):
        cached = _cached(request, seen, trace.block_tokens)
        seen.add(request.blocks)
        new = request.prompt_tokens - cached
        read_s = min(prompt_s(profile, ranks, new, cached) for profile, ranks in readers)
        write_s = min(answer_s(p, ranks, request.prompt_tokens, request.output_tokens) for p, ranks in writers)
        move_s = 0.0 if is_regular else min(p.transfer_ms(request.prompt_tokens) for p, _ in writers) / 1000
        run.answers.append(_answer(number, request, request.at_s + read_s + move_s, write_s, cached, 0, 0))
    return run


def clairvoyant(fleet: FleetSpec, profiles: Mapping[str, Profile], trace: Trace) -> Run:
    """Return the run of one queue with perfect knowledge.

    Raises: ValueError for a fleet of regular engines.
    """
    check_clairvoyant(fleet)
    return _Writers(fleet, profiles, trace).answer(sorted(_read(fleet, profiles, trace)))


def check_clairvoyant(fleet: FleetSpec) -> None:
    """Hold that a fleet has the clairvoyant's two sides. Raises: ValueError."""
    if any(spec.role is Role.REGULAR for spec in fleet):
        raise ValueError("clairvoyant needs a fleet of prefill and decode engines")


class _Read(NamedTuple):
    """A prompt that has been read."""

    at_s: float
    number: int
    cached_tokens: int
    place: int


def _read(fleet: FleetSpec, profiles: Mapping[str, Profile], trace: Trace) -> list[_Read]:
    """Return when each prompt is read: in the order of arrival, by the first rank that is free."""
    made = [(spec, *_made(spec, profiles)) for spec in fleet if spec.role is Role.PREFILL]
    ranks = [(profile, size) for spec, profile, size in made for _ in range(spec.endpoints * spec.ranks)]
    tokens = sum((spec.kv_capacity_tokens or p.kv_capacity_tokens) * spec.endpoints * spec.ranks for spec, p, _ in made)
    cache = _Blocks(tokens / trace.block_tokens)
    free = [(0.0, place) for place in range(len(ranks))]
    done: list[_Read] = []
    to_come: list[tuple[float, int]] = []  # prompts under way, whose blocks are there when they are read
    for number, request in enumerate(trace.requests):
        free_s, place = heappop(free)
        start_s = max(free_s, request.at_s)
        while to_come and to_come[0][0] <= start_s:
            cache.add(trace.requests[heappop(to_come)[1]].blocks)
        cached = _cached(request, cache, trace.block_tokens)
        profile, size = ranks[place]
        at_s = start_s + shared_prompt_s(profile, size, request.prompt_tokens - cached, cached)
        heappush(free, (at_s, place))
        heappush(to_come, (at_s, number))
        done.append(_Read(at_s, number, cached, place))
    return done


class _Writer:
    """A rank that writes answers: what it holds is known at every moment."""

    __slots__ = ("capacity_tokens", "curve", "profile", "rank", "requests", "site", "tokens")

    def __init__(self, site: Site, rank: int, profile: Profile) -> None:
        split = profile.dp_split
        self.site = site
        self.rank = rank
        self.curve = profile.decode if split is None else split.decode_local
        self.capacity_tokens = site.model.settings.kv_capacity_tokens
        self.profile = profile
        self.requests = 0
        self.tokens = 0

    def step_ms(self, tokens: int) -> float:
        """Return its step with one more answer, infinite where there is no room."""
        if self.tokens + tokens > self.capacity_tokens or self.requests >= self.profile.max_batch:
            return inf
        return self.curve.step_ms(self.requests + 1, self.tokens + tokens)


class _Leg(Job):
    """An answer under way."""

    __slots__ = ("first_s", "read", "writer")

    def __init__(self, request: Request, read: _Read, writer: _Writer) -> None:
        super().__init__(writer.rank, request.prompt_tokens, request.output_tokens, (), FIRST_AND_LAST)
        self.read = read
        self.writer = writer
        self.first_s = 0.0


class _Writers:
    """The decode engines, and whatever they write."""

    def __init__(self, fleet: FleetSpec, profiles: Mapping[str, Profile], trace: Trace) -> None:
        self._run = start_run(fleet, trace)
        self._requests = trace.requests
        self._agenda = Agenda(self._happened)
        self._ranks = [
            _Writer(site, rank, site.model.settings.profile)
            for spec, _, sites in build(fleet, profiles, trace.block_tokens)
            if spec.role is Role.DECODE
            for site in sites
            for rank in range(site.model.settings.dp_size)
        ]

    def answer(self, prompts: Sequence[_Read]) -> Run:
        """Return the run; prompts come in the order in which they were read."""
        agenda = self._agenda
        for read in prompts:
            agenda.run_until(read.at_s)
            self._start(read)
        agenda.run_until(inf)
        self._run.preemptions = sum({rank.site: rank.site.model.preemptions for rank in self._ranks}.values())
        return self._run

    def _start(self, read: _Read) -> None:
        request = self._requests[read.number]
        need = request.prompt_tokens + request.output_tokens
        steps_ms = [rank.step_ms(need) for rank in self._ranks]
        least_ms = min(steps_ms)
        if least_ms < inf:
            writer = self._ranks[steps_ms.index(least_ms)]
        else:
            writer = min(self._ranks, key=lambda rank: rank.tokens / rank.capacity_tokens)
        leg = _Leg(request, read, writer)
        if not writer.site.model.fits(leg):
            self._run.rejected[InvalidRequest.code] += 1
            return
        writer.requests += 1
        writer.tokens += need
        writer.site.model.submit(leg, read.at_s)
        self._agenda.advance(writer.site, read.at_s)

    def _happened(self, event: Event) -> None:
        leg, at_s = event.job, event.at_s
        assert isinstance(leg, _Leg)  # noqa: S101 (narrows the type)
        writer = leg.writer
        if event.kind is EventKind.RESERVED:
            writer.site.model.start_transfer(leg, at_s)
        elif event.kind is EventKind.PROGRESS:
            leg.first_s = at_s
        elif event.kind is EventKind.FINISHED:
            writer.requests -= 1
            writer.tokens -= leg.prompt_tokens + leg.output_tokens
            request, read = self._requests[leg.read.number], leg.read
            first_s = leg.first_s or at_s
            place = writer.site.place + writer.rank
            self._run.answers.append(
                _answer(read.number, request, first_s, at_s - first_s, read.cached_tokens, read.place, place)
            )


def _answer(
    number: int, request: Request, first_s: float, write_s: float, cached: int, reader: int, writer: int
) -> Answer:
    ttft_s = first_s - request.at_s
    return Answer(
        number,
        request.at_s,
        ttft_s,
        ttft_s + write_s,
        request.prompt_tokens,
        request.output_tokens,
        cached,
        reader,
        writer,
    )


def _cached(request: Request, cache: _Blocks, block_tokens: int) -> int:
    """Return the tokens in cache; one at least is always computed, else there were no logits."""
    most = (request.prompt_tokens - 1) // block_tokens
    return cache.count(request.blocks[:most]) * block_tokens


def _made(spec: EngineSpec, profiles: Mapping[str, Profile]) -> tuple[Profile, int]:
    return at_speed(profiles[spec.profile], spec.speed), spec.ranks
