"""Timing and queues of an engine as a state machine in the engine's own time: no clock, no I/O, no asyncio.

The driver calls ``submit``, ``start_transfer`` and ``release`` when things happen outside,
``advance`` when ``next_event_s`` has come, and acts on the events it returns. Many decode steps between two
events are one arithmetic step: while a batch doesn't change, step ``i`` takes ``first + i * slope``.
Timing: ``profiles.py``; queues and KV: ``engine_rank.py``.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf, sqrt

import msgspec

from pdrouter.sim.engine_rank import Rank
from pdrouter.sim.full_kv import WhenFull
from pdrouter.sim.job import Event, EventKind, Job, Phase, RankLoad, Role
from pdrouter.sim.profiles import Profile

# Read as members of their enums they would cost a tenth of a microsecond each time.
_BOOTSTRAP, _PREALLOC, _RUNNING, _TRANSFER, _WAITING = (
    Phase.BOOTSTRAP,
    Phase.PREALLOC,
    Phase.RUNNING,
    Phase.TRANSFER,
    Phase.WAITING,
)
_DECODE, _PREFILL = Role.DECODE, Role.PREFILL
_TRANSFERRED = EventKind.TRANSFERRED


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is. ``waits_for_decode``: a prefill starts only when its decode side has reserved KV."""

    profile: Profile
    role: Role
    dp_size: int
    kv_capacity_tokens: int
    block_tokens: int
    when_full: WhenFull
    waits_for_decode: bool = False


class _Stretch:
    """Steps under way that can be told in advance: step ``i`` (from 0) takes ``first_s + i * slope_s``."""

    __slots__ = ("first_s", "over_s", "slope_s", "start_s", "steps")

    def __init__(self, start_s: float, steps: int, first_s: float, slope_s: float) -> None:
        self.start_s = start_s
        self.steps = steps
        self.first_s = first_s
        self.slope_s = slope_s
        self.over_s = self.end_s(steps) if steps > 1 else start_s + first_s

    def end_s(self, steps: int) -> float:
        return self.start_s + steps * self.first_s + self.slope_s * (steps * (steps - 1) / 2)

    def step_s(self, number: int) -> float:
        """Return the time of a step, counted from 1."""
        return self.first_s + (number - 1) * self.slope_s

    def steps_by(self, now_s: float) -> int:
        """Whole steps that are over at ``now_s``; never the last one, which only ``advance`` ends."""
        passed = now_s - self.start_s
        if passed < self.first_s:
            return 0
        half = self.first_s - self.slope_s / 2
        steps = int(2 * passed / (half + sqrt(half * half + 2 * self.slope_s * passed)))
        while steps > 0 and self.end_s(steps) > now_s:
            steps -= 1
        while self.end_s(steps + 1) <= now_s:
            steps += 1
        return min(steps, self.steps - 1)

    def drop(self, steps: int) -> None:
        self.start_s = self.end_s(steps)
        self.first_s += steps * self.slope_s
        self.steps -= steps

    def cut(self, steps: int) -> None:
        """Let there be no more steps than that, the one under way included."""
        if steps < self.steps:
            self.steps = steps
            self.over_s = self.end_s(steps)


class _Group:
    """Ranks that step together: one rank alone, or all ranks of an engine with DP attention.

    ``due_s`` is when it has something to do, infinite if it is idle.
    """

    def __init__(self, ranks: list[Rank], profile: Profile, *, is_split: bool) -> None:
        self.ranks = ranks
        self.due_s = inf
        self._first_index = ranks[0].index
        self._profile = profile
        self._split = profile.dp_split if is_split else None
        self._stretch: _Stretch | None = None
        self._moves: list[tuple[float, int, Job]] = []
        self._order = count()

    @property
    def step_s(self) -> float:
        return self._stretch.first_s if self._stretch else 0.0

    def move(self, job: Job, at_s: float) -> None:
        heappush(self._moves, (at_s, next(self._order), job))
        self._look_ahead()

    def advance(self, now_s: float, events: list[Event]) -> None:
        """Let time pass up to and including ``now_s``, so far as it causes events."""
        while self.due_s <= now_s:
            stretch, moves = self._stretch, self._moves
            if stretch is None or (moves and moves[0][0] <= stretch.over_s):
                move_s, _, job = heappop(moves)
                self._arrive(job, move_s, events)
            else:
                over_s = stretch.over_s
                self._apply(stretch.steps, over_s, stretch.step_s(stretch.steps), events)
                self._plan(over_s, events)
                self._look_ahead()

    def changed(self, at_s: float, events: list[Event], *, is_batch: bool) -> None:
        """Act on changed queues, and on a batch that lost a job: at once if idle, else when the step is over."""
        for rank in self.ranks:
            if rank.prealloc or rank.retracted:
                self._reserve(rank, at_s, events)
            is_batch = is_batch or rank.has_joiners
        if self._stretch is None:
            self._plan(at_s, events)
        elif is_batch and self._stretch.steps > 1:
            self.catch_up(at_s, events)
            self._stretch.cut(1)
        self._look_ahead()

    def catch_up(self, now_s: float, events: list[Event]) -> None:
        """Count the steps that are over in the middle of a stretch."""
        stretch = self._stretch
        if stretch is not None and stretch.steps > 1:
            steps = stretch.steps_by(now_s)
            if steps:
                at_s, step_s = stretch.end_s(steps), stretch.step_s(steps)
                stretch.drop(steps)
                self._apply(steps, at_s, step_s, events)

    def _reserve(self, rank: Rank, at_s: float, events: list[Event]) -> None:
        """Give KV to who waits for it; where it's tight what grew until now counts, and growth ends where it does."""
        stretch = self._stretch
        is_tight = stretch is not None and rank.is_tight(stretch.steps)
        if is_tight:
            self.catch_up(at_s, events)
        for job in rank.reserve(at_s, events, len(rank.running) if is_tight else 0):
            self.move(job, at_s + self._profile.transfer_ms(job.read_tokens) / 1000)
        if stretch is not None and is_tight and rank.running:
            stretch.cut(rank.steps_until_due())

    def _look_ahead(self) -> None:
        due_s = self._stretch.over_s if self._stretch else inf
        self.due_s = min(due_s, self._moves[0][0]) if self._moves else due_s

    def _arrive(self, job: Job, at_s: float, events: list[Event]) -> None:
        if job.phase is _TRANSFER:
            self.ranks[job.rank - self._first_index].receive(job)
            if not job.preemptions:
                events.append(Event(_TRANSFERRED, job, at_s, 0))
            self.changed(at_s, events, is_batch=True)
        else:
            self._look_ahead()

    def _apply(self, steps: int, at_s: float, step_s: float, events: list[Event]) -> None:
        for rank in self.ranks:
            if rank.batch:
                rank.finish_prefill(at_s, step_s, events)
            elif rank.running:
                rank.finish_decode(steps, at_s, step_s, events)

    def _plan(self, at_s: float, events: list[Event]) -> None:
        self._stretch = None
        prefilling, decoding, has_preempted = [], [], False
        for rank in self.ranks:
            if rank.ready:
                rank.join_ready(at_s, events)
            if rank.prealloc or rank.retracted:
                self._reserve(rank, at_s, events)
            if rank.plan_prefill():
                prefilling.append(rank)
            elif rank.running:
                has_preempted = rank.make_room() or has_preempted
                if rank.running:
                    decoding.append(rank)
        if prefilling:
            step_ms = self._prefill_step_ms(prefilling, decoding)
            self._stretch = _Stretch(at_s, 1, step_ms / 1000, 0.0)
        elif decoding:
            self._stretch = self._decode_stretch(at_s, decoding)
            if has_preempted:  # there may be room for others at the next step
                self._stretch.cut(1)

    def _prefill_step_ms(self, prefilling: list[Rank], decoding: list[Rank]) -> float:
        # Where some ranks prefill and others decode, the slowest local part leads, and the experts see all.
        split = self._split
        if split is None:
            return prefilling[0].prefill_batch_ms(self._profile.prefill)
        local_ms = max(
            [rank.prefill_batch_ms(split.prefill_local) for rank in prefilling]
            + [rank.decode_step_ms(split.decode_local) for rank in decoding]
        )
        tokens = sum(new for rank in prefilling for _, new in rank.batch)
        return local_ms + split.prefill_moe.step_ms(tokens + sum(len(rank.running) for rank in decoding))

    def _decode_stretch(self, at_s: float, decoding: list[Rank]) -> _Stretch:
        """Return the steps up to the first that changes a batch, or that another rank is the slowest in."""
        split = self._split
        curve = self._profile.decode if split is None else split.decode_local
        if len(decoding) == 1 or split is None:
            rank = decoding[0]
            first_ms, slope_ms, steps = (
                rank.decode_step_ms(curve),
                curve.b2 * len(rank.running),
                rank.steps_until_due(),
            )
        else:
            first_ms, slope_ms = max((r.decode_step_ms(curve), curve.b2 * len(r.running)) for r in decoding)
            steps = min(rank.steps_until_due() for rank in decoding)
            for rank in decoding:
                gain_ms = curve.b2 * len(rank.running) - slope_ms
                if gain_ms > 0:
                    steps = min(steps, 1 + int((first_ms - rank.decode_step_ms(curve)) / gain_ms))
        if split is not None:
            first_ms += split.decode_moe.step_ms(sum(len(rank.running) for rank in decoding))
        return _Stretch(at_s, steps, first_ms / 1000, slope_ms / 1000)


class EngineModel:
    """One engine of ``dp_size`` ranks. Units: seconds of the engine's time, which must never go back."""

    def __init__(self, settings: ModelSettings) -> None:
        profile = settings.profile
        self.settings = settings
        self._events: list[Event] = []
        ranks = [
            Rank(
                index,
                capacity_tokens=settings.kv_capacity_tokens,
                max_batch=profile.max_batch,
                chunk_tokens=profile.prefill_chunk_tokens,
                block_tokens=settings.block_tokens,
                when_full=settings.when_full,
            )
            for index in range(settings.dp_size)
        ]
        is_split = profile.dp_split is not None and settings.dp_size > 1
        members = [ranks] if is_split else [[rank] for rank in ranks]
        self._ranks = ranks
        self._groups = [_Group(group, profile, is_split=is_split) for group in members]
        self._only = self._groups[0] if len(self._groups) == 1 else None
        self._group_of = [group for group in self._groups for _ in group.ranks]

    @property
    def next_event_s(self) -> float:
        """When ``advance`` has something to do: in the past if events are waiting, infinite if idle."""
        if self._events:
            return -inf
        only = self._only
        return min([group.due_s for group in self._groups]) if only is None else only.due_s

    def fits(self, job: Job) -> bool:
        """Whether the job can ever run here."""
        answer = 0 if (job.role or self.settings.role) is _PREFILL else job.output_tokens
        return job.prompt_tokens + answer <= self.settings.kv_capacity_tokens

    def submit(self, job: Job, now_s: float) -> None:
        """Take in a job at the rank it names."""
        group = self._group_of[job.rank]
        if group.due_s <= now_s:
            group.advance(now_s, self._events)
        phase = _WAITING
        if job.role is None:
            job.role = self.settings.role
        if job.role is _DECODE:
            phase = _PREALLOC
        elif job.role is _PREFILL and self.settings.waits_for_decode:
            phase = _BOOTSTRAP
        self._ranks[job.rank].enqueue(job, phase)
        if phase is not _BOOTSTRAP:
            group.changed(now_s, self._events, is_batch=False)

    def meet(self, job: Job, now_s: float) -> None:
        """Prefill: the decode side of this job has reserved its KV."""
        if job.phase is _BOOTSTRAP:
            group = self._at(job, now_s)
            self._ranks[job.rank].leave_bootstrap(job)
            group.changed(now_s, self._events, is_batch=False)

    def start_transfer(self, job: Job, now_s: float) -> None:
        """Decode: the prefill side has the KV; it begins to move."""
        if job.phase is _TRANSFER:
            transfer_s = self.settings.profile.transfer_ms(job.prompt_tokens) / 1000
            self._group_of[job.rank].move(job, now_s + transfer_s)

    def release(self, job: Job, now_s: float) -> None:
        """Free all that the job holds: its KV is needed no more, or its caller has gone."""
        group = self._at(job, now_s)
        if job.is_live:
            is_batch = job.phase is _RUNNING
            self._ranks[job.rank].remove(job)
            group.changed(now_s, self._events, is_batch=is_batch)

    def advance(self, now_s: float) -> list[Event]:
        """Let time pass; returns what happened since the last call, in order per group of ranks."""
        for group in self._groups:
            if group.due_s <= now_s:
                group.advance(now_s, self._events)
        events, self._events = self._events, []
        return events

    @property
    def preemptions(self) -> int:
        """How often a running job was preempted."""
        return sum(rank.preemptions for rank in self._ranks)

    def generated(self, job: Job, now_s: float) -> int:
        """Tokens of a running job's answer."""
        self._at(job, now_s)
        return self._ranks[job.rank].generated(job)

    @property
    def step_s(self) -> float:
        """Time of the step under way, of the first that is; 0 if idle."""
        return next((group.step_s for group in self._groups if group.step_s), 0.0)

    def catch_up(self, now_s: float) -> None:
        """Count all steps that are over."""
        for group in self._groups:
            group.advance(now_s, self._events)
            group.catch_up(now_s, self._events)

    def generated_by(self, jobs: Sequence[Job], now_s: float) -> list[int]:
        """Tokens of the answers of running jobs, as ``generated`` tells them one by one."""
        self.catch_up(now_s)
        ranks = self._ranks
        return [ranks[job.rank].generated(job) for job in jobs]

    def loads(self, now_s: float) -> list[RankLoad]:
        """Load of each rank."""
        self.catch_up(now_s)
        return [rank.load() for rank in self._ranks]

    def flush(self) -> None:
        """Empty the prefix caches."""
        for rank in self._ranks:
            rank.cache.clear()

    def _at(self, job: Job, now_s: float) -> _Group:
        group = self._group_of[job.rank]
        group.advance(now_s, self._events)
        group.catch_up(now_s, self._events)
        return group
