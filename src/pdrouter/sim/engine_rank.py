"""One DP rank of an engine: its queues, its KV pool with prefix cache, its batch.

It says what the next step would hold and applies a step that is over; when steps begin and end is the
business of ``engine_model.py``. No clock and no I/O. Per step the work is O(1), per streamed chunk O(log n).

Simplified against SGLang 0.5 (scheduler.py, schedule_policy.py, disaggregation/): KV is counted in tokens, not in
pages; a prompt's blocks enter the prefix cache with each chunk that is read; answers are not cached; the queue is
first come, first served. What happens when KV runs out: ``full_kv.py``.
"""

from collections import deque
from heapq import heappop, heappush
from itertools import count

from pdrouter.sim.full_kv import RESERVED_ANSWER_TOKENS, AnswerShare, WhenFull
from pdrouter.sim.job import Event, EventKind, Job, Phase, RankLoad, Role
from pdrouter.sim.profiles import DecodeCurve, PrefillCurve
from pdrouter.sim.radix import PrefixCache

# Read as members of their enums they would cost a tenth of a microsecond each time.
_BOOTSTRAP, _DONE, _INFLIGHT, _PREALLOC, _PREFILLING, _READY, _RUNNING, _TRANSFER, _WAITING = (
    Phase.BOOTSTRAP,
    Phase.DONE,
    Phase.INFLIGHT,
    Phase.PREALLOC,
    Phase.PREFILLING,
    Phase.READY,
    Phase.RUNNING,
    Phase.TRANSFER,
    Phase.WAITING,
)
_DECODE, _REGULAR = Role.DECODE, Role.REGULAR
_FINISHED, _PREFILLED, _PROGRESS, _RESERVED = (
    EventKind.FINISHED,
    EventKind.PREFILLED,
    EventKind.PROGRESS,
    EventKind.RESERVED,
)


class Rank:
    """Queues, KV and batch of one rank; capacities in tokens and requests."""

    def __init__(
        self,
        index: int,
        *,
        capacity_tokens: int,
        max_batch: int,
        chunk_tokens: int,
        block_tokens: int,
        when_full: WhenFull,
    ) -> None:
        self.index = index
        self.capacity_tokens = capacity_tokens
        self.max_batch = max_batch
        self.chunk_tokens = chunk_tokens
        self.cache = PrefixCache(block_tokens)
        self.bootstrap: dict[Job, None] = {}
        self.waiting: deque[Job] = deque()
        self.prealloc: deque[Job] = deque()
        self.retracted: deque[Job] = deque()  # their KV is in the host's memory
        self.ready: deque[Job] = deque()
        self.transfer_count = 0
        self.inflight_count = 0
        self.batch: list[tuple[Job, int]] = []  # prefill chunks of the step under way: job, new tokens
        self.running: dict[Job, None] = {}  # in the order in which they joined
        self.running_tokens = 0  # prompt and generated tokens of running jobs: what a step must read
        self.steps = 0
        self.preemptions = 0
        self.grows = when_full is not WhenFull.KEEP
        self._retracts = when_full is WhenFull.RETRACT
        self._share = AnswerShare()
        self._chunked: Job | None = None
        self._is_blocked = False
        self._due: list[tuple[int, int, Job]] = []
        self._order = count()
        self._reserved_tokens = 0
        self._private_used = 0
        self._queued_tokens = 0
        self._queued_uncached = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self.prefill_uncached_tokens = 0
        self.prefill_busy_s = 0.0
        self.generated_tokens = 0
        self.last_step_s = 0.0

    # Entering and leaving.

    def enqueue(self, job: Job, phase: Phase) -> None:
        """Put a new job into the queue of ``phase``: bootstrap, waiting or prealloc."""
        job.phase = phase
        if phase is _PREALLOC:
            self._queued_tokens += job.read_tokens
            self.prealloc.append(job)
            return
        self._wait(job)
        if phase is _BOOTSTRAP:
            self.bootstrap[job] = None
        else:
            self.waiting.append(job)

    def _wait(self, job: Job) -> None:
        matched = self.cache.match(job.blocks, self._match_limit(job))
        job.waiting_tokens = job.read_tokens - matched * self.cache.block_tokens
        self._queued_tokens += job.read_tokens
        self._queued_uncached += job.waiting_tokens

    def leave_bootstrap(self, job: Job) -> None:
        """Let a job be prefilled: its decode side is known."""
        del self.bootstrap[job]
        job.phase = _WAITING
        self.waiting.append(job)

    def remove(self, job: Job) -> None:
        """Take a job out, wherever it is, and free what it holds."""
        phase = job.phase
        if phase is _RUNNING:
            self._leave_batch(job)
        elif phase is _INFLIGHT:
            self.inflight_count -= 1
        elif phase is _TRANSFER:
            self.transfer_count -= 1
        elif phase is _READY:
            self.ready.remove(job)
        elif phase is _PREFILLING:
            if job is self._chunked:
                self._chunked = None
        else:
            self._dequeued(job)
            if phase is _BOOTSTRAP:
                del self.bootstrap[job]
            elif phase is _WAITING:
                self.waiting.remove(job)
            elif job.preemptions:
                self.retracted.remove(job)
            else:
                self.prealloc.remove(job)
        self._free(job)

    @property
    def has_joiners(self) -> bool:
        """Whether somebody may join the batch at the next step."""
        return bool(self.ready) or (bool(self.waiting) and not self._is_blocked)

    def generated(self, job: Job) -> int:
        """Tokens of the answer so far."""
        return 1 + self.steps - job.joined_step if job.phase is _RUNNING else 0

    # The KV pool.

    def _match_limit(self, job: Job) -> int:
        # One token at least is always computed, else there were no logits.
        return (job.read_tokens - 1) // self.cache.block_tokens

    @property
    def room_tokens(self) -> int:
        """KV that is free, or held for reuse only."""
        return self.capacity_tokens - self._reserved_tokens - self.cache.pinned_tokens

    def _take(self, job: Job, private_tokens: int, growth_tokens: int, *, answers: bool) -> bool:
        """Give a job KV for what is read of it, and for its answer: all of that, or for one token to begin with."""
        tokens, spare = private_tokens, growth_tokens
        if answers:
            tokens += 1 if self.grows else job.output_tokens
            if self._retracts:
                spare += self._spare_tokens(job)
        if self.room_tokens < tokens + spare:
            return False
        self._reserved_tokens += tokens
        self._evict()
        job.private_tokens = private_tokens
        job.reserved_tokens = tokens
        self._private_used += private_tokens
        return True

    def _spare_tokens(self, job: Job) -> int:
        """Return what SGLang wants to be free beside the first token, for this answer and those under way."""
        left = job.left_tokens
        if job.role is _REGULAR:
            behind = sum([mate.left_tokens for mate, _ in self.batch if mate.role is _REGULAR])
            ahead = sum([mate.output_tokens - self.generated(mate) for mate in self.running])
            return left - 1 + behind + int(self._share.at(self.steps) * ahead)
        taken = len(self.running) + self.transfer_count + len(self.ready)
        # All that run can be retracted, so that alone it has room to the end.
        return RESERVED_ANSWER_TOKENS * taken + max(min(RESERVED_ANSWER_TOKENS, left), left - self.running_tokens) - 1

    def _evict(self) -> None:
        idle_tokens = self.cache.idle_tokens
        if idle_tokens and (room_tokens := self.room_tokens) < idle_tokens:
            self.cache.evict(idle_tokens - room_tokens)

    def _free(self, job: Job) -> None:
        if job.pinned_blocks:
            self.cache.unpin(job.blocks[: job.pinned_blocks])
        self._reserved_tokens -= job.reserved_tokens
        self._private_used -= job.private_tokens
        job.pinned_blocks = job.private_tokens = job.reserved_tokens = 0
        job.phase = _DONE
        self._is_blocked = False

    def _enter_cache(self, job: Job) -> None:
        # The full blocks that were read become shared; copies computed twice are dropped.
        count = min(len(job.blocks), job.done_tokens // self.cache.block_tokens)
        moved = (count - job.pinned_blocks) * self.cache.block_tokens
        self.cache.pin(job.blocks[job.pinned_blocks : count])
        job.pinned_blocks = count
        job.private_tokens -= moved
        job.reserved_tokens -= moved
        self._private_used -= moved
        self._reserved_tokens -= moved
        self._is_blocked = False

    def _dequeued(self, job: Job) -> None:
        self._queued_tokens -= job.read_tokens
        self._queued_uncached -= job.waiting_tokens

    # Decode: reserve, receive, join.

    def is_tight(self, steps: int) -> bool:
        """Whether who waits for KV, and all that answers grow by in so many steps, could be more than there is."""
        if not self.grows or self.batch:
            return False
        if len(self.prealloc) + len(self.retracted) > 1:
            return True
        job, running = (self.retracted or self.prealloc)[0], len(self.running)
        others = running + self.transfer_count + len(self.ready)
        most_tokens = job.prompt_tokens + job.output_tokens + RESERVED_ANSWER_TOKENS * others
        return self.room_tokens < most_tokens + steps * running

    def reserve(self, at_s: float, events: list[Event], growth_tokens: int) -> list[Job]:
        """Give slots and KV to jobs of the prealloc queue, in order, while there are any.

        Jobs that were retracted come first, and are returned: their KV is to come back. ``growth_tokens``: what the
        step under way adds to answers.
        """
        back: list[Job] = []
        while queue := self.retracted or self.prealloc:
            job = queue[0]
            taken = len(self.running) + self.transfer_count + len(self.ready)
            if taken >= self.max_batch or not self._take(job, job.read_tokens, growth_tokens, answers=True):
                break
            queue.popleft()
            self._dequeued(job)
            job.phase = _TRANSFER
            self.transfer_count += 1
            if job.preemptions:
                back.append(job)
            else:
                events.append(Event(_RESERVED, job, at_s, 0))
        return back

    def receive(self, job: Job) -> None:
        """Take note that the KV is here: the job joins the batch at the next step."""
        self.transfer_count -= 1
        job.phase = _READY
        self.ready.append(job)

    def join_ready(self, at_s: float, events: list[Event]) -> None:
        """Take received jobs into the batch; their first token came with the KV, or was told before."""
        while self.ready:
            job = self.ready.popleft()
            self._join(job, at_s, events, is_told=job.preemptions > 0)

    def _join(self, job: Job, at_s: float, events: list[Event], *, is_told: bool) -> None:
        tokens = 1 + job.read_tokens - job.prompt_tokens
        if not is_told:
            self.generated_tokens += 1
        if job.output_tokens == tokens:
            self._free(job)
            events.append(Event(_FINISHED, job, at_s, tokens))
            return
        if not self.running:
            self._share.begin(self.steps)
        job.phase = _RUNNING
        job.joined_step = self.steps + 1 - tokens
        self.running[job] = None
        self.running_tokens += job.read_tokens + 1
        self._private_used += 1
        if job.interval and not is_told and not (tokens - 1) % job.interval:
            events.append(Event(_PROGRESS, job, at_s, tokens))
        self._schedule(job, tokens)

    def _schedule(self, job: Job, tokens: int) -> None:
        # SGLang shows the first token and then every ``interval``-th.
        due = job.output_tokens
        if job.interval:
            due = min(due, tokens + job.interval - (tokens - 1) % job.interval)
        job.due_step = job.joined_step + due - 1
        heappush(self._due, (job.due_step, next(self._order), job))

    def _leave_batch(self, job: Job) -> None:
        grown = self.generated(job) + job.prompt_tokens - job.read_tokens
        job.due_step = 0
        del self.running[job]
        self.running_tokens -= job.read_tokens + grown
        self._private_used -= grown
        if self.grows:
            self._reserved_tokens -= grown - 1

    # Where KV is full.

    def make_room(self) -> bool:
        """Preempt running jobs until the next step's tokens fit; return whether there were any."""
        if not self.grows or self.room_tokens >= len(self.running):
            return False
        while self.running and self.room_tokens < len(self.running):
            self._preempt()
        if self._retracts and self.running:
            tokens = sum(map(self.generated, self.running))
            most_tokens = sum(job.output_tokens for job in self.running)
            self._share.learn(self.steps, len(self.running), tokens, most_tokens)
        return True

    def _preempt(self) -> None:
        """Take the job out of the batch that goes first, and put it where it waits for its return."""
        if self._retracts:
            job = min(self.running, key=lambda job: (self.generated(job), -job.prompt_tokens))
        else:
            job = next(reversed(self.running))
        tokens = self.generated(job)
        self._leave_batch(job)
        self._free(job)
        job.preemptions += 1
        self.preemptions += 1
        if self._retracts and job.role is _DECODE:
            job.phase = _PREALLOC
            job.read_tokens = job.prompt_tokens + tokens - 1  # the KV of the last token is that of the next step
            job.waiting_tokens = 0
            self._queued_tokens += job.read_tokens
            self.retracted.append(job)
            return
        job.role = _REGULAR  # from here on it is read here
        job.phase = _WAITING
        job.read_tokens = job.prompt_tokens + tokens
        self._wait(job)
        if self._retracts:
            self.waiting.append(job)
        else:
            self.waiting.appendleft(job)

    # Steps.

    def plan_prefill(self) -> bool:
        """Fill the next prefill batch: the chunk under way first, then the queue while chunk and KV last."""
        job = self._chunked
        if job is None and (not self.waiting or self._is_blocked):
            return False
        budget = self.chunk_tokens
        batch = self.batch
        while budget > 0:
            if job is None:
                job = self._admit(len(batch))
                if job is None:
                    break
            new_tokens = min(budget, job.read_tokens - job.done_tokens)
            batch.append((job, new_tokens))
            budget -= new_tokens
            self._chunked = job if job.done_tokens + new_tokens < job.read_tokens else None
            job = None
        return bool(batch)

    def _admit(self, batch_count: int) -> Job | None:
        if not self.waiting or self._is_blocked:
            return None
        job = self.waiting[0]
        is_regular = job.role is _REGULAR
        if is_regular and len(self.running) + batch_count >= self.max_batch:
            return None
        pinned = self.cache.match(job.blocks, self._match_limit(job))
        cached = pinned * self.cache.block_tokens
        prefix = job.blocks[:pinned]
        self.cache.pin(prefix)
        if not self._take(job, job.read_tokens - cached, 0, answers=is_regular):
            self.cache.unpin(prefix)
            self._is_blocked = True  # until something is freed
            return None
        self.waiting.popleft()
        self._dequeued(job)
        job.pinned_blocks = pinned
        job.phase = _PREFILLING
        job.done_tokens = cached
        if not job.preemptions:
            job.cached_tokens = cached
            self._prompt_tokens += job.prompt_tokens
            self._cached_tokens += cached
        return job

    def prefill_batch_ms(self, curve: PrefillCurve) -> float:
        """Time of the planned prefill batch on this rank alone."""
        return curve.a0 + sum(curve.chunk_ms(new, job.done_tokens) for job, new in self.batch)

    def decode_step_ms(self, curve: DecodeCurve) -> float:
        """Time of the next decode step on this rank alone."""
        return curve.step_ms(len(self.running), self.running_tokens)

    def steps_until_due(self) -> int:
        """Decode steps until a chunk is due, a job ends or KV runs out."""
        due = self._due
        while due[0][0] != due[0][2].due_step:
            heappop(due)
        steps = due[0][0] - self.steps
        return min(steps, self.room_tokens // len(self.running)) if self.grows else steps

    def finish_prefill(self, at_s: float, step_s: float, events: list[Event]) -> None:
        """Apply the prefill batch that is over."""
        batch, self.batch = self.batch, []
        self.prefill_busy_s += step_s
        for job, new_tokens in batch:
            if job.phase is not _PREFILLING:
                continue
            self.prefill_uncached_tokens += new_tokens
            job.done_tokens += new_tokens
            self._enter_cache(job)
            if job.done_tokens < job.read_tokens:
                continue
            if job.role is _REGULAR:
                self._join(job, at_s, events, is_told=False)
            else:
                job.phase = _INFLIGHT
                self.inflight_count += 1
                self.generated_tokens += 1
                events.append(Event(_PREFILLED, job, at_s, 1))

    def finish_decode(self, steps: int, at_s: float, step_s: float, events: list[Event]) -> None:
        """Apply decode steps that are over; none of them but the last may have made anything due."""
        self.steps += steps
        new_tokens = len(self.running) * steps
        self.running_tokens += new_tokens
        self._private_used += new_tokens
        self.generated_tokens += new_tokens
        self.last_step_s = step_s
        if self.grows:
            self._reserved_tokens += new_tokens
            self._evict()
        due = self._due
        while due and due[0][0] <= self.steps:
            due_step, _, job = heappop(due)
            if due_step != job.due_step:
                continue
            tokens = self.generated(job)
            if tokens < job.output_tokens:
                events.append(Event(_PROGRESS, job, at_s, tokens))
                self._schedule(job, tokens)
            else:
                self._leave_batch(job)
                self._free(job)
                events.append(Event(_FINISHED, job, at_s, tokens))

    def load(self) -> RankLoad:
        """Load now."""
        used = self.cache.pinned_tokens + self._private_used
        prefilling = {job for job, _ in self.batch if job.phase is _PREFILLING}
        chunked = self._chunked
        left = 0
        if chunked is not None:
            prefilling.add(chunked)
            left = chunked.read_tokens - chunked.done_tokens
        rate = len(self.running) / self.last_step_s if self.running and self.last_step_s else 0.0
        return RankLoad(
            rank=self.index,
            running=len(self.running) + len(prefilling),
            waiting=len(self.waiting) + len(self.ready),
            bootstrap=len(self.bootstrap),
            inflight=self.inflight_count,
            prealloc=len(self.prealloc),
            retracted=len(self.retracted),
            transfer=self.transfer_count,
            used_tokens=used,
            reserved_tokens=self._reserved_tokens + self.cache.pinned_tokens,
            total_tokens=used + self._queued_tokens,
            waiting_uncached_tokens=self._queued_uncached + left,
            cached_idle_tokens=self.cache.idle_tokens,
            capacity_tokens=self.capacity_tokens,
            max_running=self.max_batch,
            gen_tokens_per_s=rate,
            cache_hit_rate=self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
            prefill_uncached_tokens=self.prefill_uncached_tokens,
            prefill_busy_s=self.prefill_busy_s,
            generated_tokens=self.generated_tokens,
            preemptions=self.preemptions,
        )
