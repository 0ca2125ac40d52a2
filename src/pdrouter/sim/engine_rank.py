"""One DP rank of an engine: its queues, its KV pool with prefix cache, its batch.

It says what the next step would hold and applies a step that is over; when steps begin and end is the
business of ``engine_model.py``. No clock and no I/O. Per step the work is O(1), per streamed chunk O(log n).

Simplified against SGLang 0.5 (scheduler.py, schedule_policy.py, disaggregation/): room for the whole answer
is reserved at admission, so nothing is ever retracted; a prompt's blocks enter the prefix cache with each
chunk that is read; answers are not cached; the queue is first come, first served.
"""

from collections import deque
from heapq import heappop, heappush
from itertools import count

from pdrouter.sim.job import Event, EventKind, Job, Phase, RankLoad, Role
from pdrouter.sim.profiles import DecodeCurve, PrefillCurve
from pdrouter.sim.radix import PrefixCache


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
    ) -> None:
        self.index = index
        self.capacity_tokens = capacity_tokens
        self.max_batch = max_batch
        self.chunk_tokens = chunk_tokens
        self.cache = PrefixCache(block_tokens)
        self.bootstrap: dict[Job, None] = {}
        self.waiting: deque[Job] = deque()
        self.prealloc: deque[Job] = deque()
        self.ready: deque[Job] = deque()
        self.transfer_count = 0
        self.inflight_count = 0
        self.batch: list[tuple[Job, int]] = []  # prefill chunks of the step under way: job, new tokens
        self.running_count = 0
        self.running_tokens = 0  # prompt and generated tokens of running jobs: what a step must read
        self.steps = 0
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
        self._queued_tokens += job.prompt_tokens
        if phase is Phase.PREALLOC:
            self.prealloc.append(job)
            return
        matched = self.cache.match(job.blocks, self._match_limit(job))
        job.waiting_tokens = job.prompt_tokens - matched * self.cache.block_tokens
        self._queued_uncached += job.waiting_tokens
        if phase is Phase.BOOTSTRAP:
            self.bootstrap[job] = None
        else:
            self.waiting.append(job)

    def leave_bootstrap(self, job: Job) -> None:
        """Let a job be prefilled: its decode side is known."""
        del self.bootstrap[job]
        job.phase = Phase.WAITING
        self.waiting.append(job)

    def remove(self, job: Job) -> None:
        """Take a job out, wherever it is, and free what it holds."""
        phase, job_queue = job.phase, None
        if phase in {Phase.BOOTSTRAP, Phase.WAITING, Phase.PREALLOC}:
            self._dequeued(job)
        if phase is Phase.BOOTSTRAP:
            del self.bootstrap[job]
        elif phase is Phase.WAITING:
            job_queue = self.waiting
            self._is_blocked = False
        elif phase is Phase.PREALLOC:
            job_queue = self.prealloc
        elif phase is Phase.READY:
            job_queue = self.ready
        elif phase is Phase.TRANSFER:
            self.transfer_count -= 1
        elif phase is Phase.INFLIGHT:
            self.inflight_count -= 1
        elif phase is Phase.PREFILLING and job is self._chunked:
            self._chunked = None
        elif phase is Phase.RUNNING:
            self._leave_batch(job)
        if job_queue is not None:
            job_queue.remove(job)
        self._free(job)

    @property
    def has_joiners(self) -> bool:
        """Whether somebody may join the batch at the next step."""
        return bool(self.ready) or (bool(self.waiting) and not self._is_blocked)

    def generated(self, job: Job) -> int:
        """Tokens of the answer so far."""
        return 1 + self.steps - job.joined_step if job.phase is Phase.RUNNING else 0

    # The KV pool.

    def _match_limit(self, job: Job) -> int:
        # One token at least is always computed, else there were no logits.
        return (job.prompt_tokens - 1) // self.cache.block_tokens

    def _take(self, tokens: int) -> bool:
        cache = self.cache
        free = self.capacity_tokens - self._reserved_tokens - cache.pinned_tokens - cache.idle_tokens
        if free + cache.idle_tokens < tokens:
            return False
        if free < tokens:
            cache.evict(tokens - free)
        self._reserved_tokens += tokens
        return True

    def _hold(self, job: Job, private_tokens: int, reserved_tokens: int) -> None:
        job.private_tokens = private_tokens
        job.reserved_tokens = reserved_tokens
        self._private_used += private_tokens

    def _free(self, job: Job) -> None:
        if job.pinned_blocks:
            self.cache.unpin(job.blocks[: job.pinned_blocks])
        self._reserved_tokens -= job.reserved_tokens
        self._private_used -= job.private_tokens
        job.pinned_blocks = job.private_tokens = job.reserved_tokens = 0
        job.phase = Phase.DONE
        self._is_blocked = False

    def _share(self, job: Job) -> None:
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
        self._queued_tokens -= job.prompt_tokens
        self._queued_uncached -= job.waiting_tokens

    # Decode: reserve, receive, join.

    def reserve(self, at_s: float, events: list[Event]) -> None:
        """Give slots and KV to jobs of the prealloc queue, in order, while there are any."""
        while self.prealloc:
            job = self.prealloc[0]
            taken = self.running_count + self.transfer_count + len(self.ready)
            need = job.prompt_tokens + job.output_tokens
            if taken >= self.max_batch or not self._take(need):
                return
            self.prealloc.popleft()
            self._dequeued(job)
            self._hold(job, job.prompt_tokens, need)
            job.phase = Phase.TRANSFER
            self.transfer_count += 1
            events.append(Event(EventKind.RESERVED, job, at_s, 0))

    def receive(self, job: Job) -> None:
        """Take note that the KV is here: the job joins the batch at the next step."""
        self.transfer_count -= 1
        job.phase = Phase.READY
        self.ready.append(job)

    def join_ready(self, at_s: float, events: list[Event]) -> None:
        """Take received jobs into the batch; their first token came with the KV."""
        while self.ready:
            self._join(self.ready.popleft(), at_s, events)

    def _join(self, job: Job, at_s: float, events: list[Event]) -> None:
        self.generated_tokens += 1
        if job.output_tokens == 1:
            self._free(job)
            events.append(Event(EventKind.FINISHED, job, at_s, 1))
            return
        job.phase = Phase.RUNNING
        job.joined_step = self.steps
        self.running_count += 1
        self.running_tokens += job.prompt_tokens + 1
        self._private_used += 1
        if job.interval:
            events.append(Event(EventKind.PROGRESS, job, at_s, 1))
        self._schedule(job, 1)

    def _schedule(self, job: Job, tokens: int) -> None:
        # SGLang shows the first token and then every ``interval``-th.
        due = job.output_tokens
        if job.interval:
            due = min(due, tokens + job.interval - (tokens - 1) % job.interval)
        heappush(self._due, (job.joined_step + due - 1, next(self._order), job))

    def _leave_batch(self, job: Job) -> None:
        tokens = self.generated(job)
        self.running_count -= 1
        self.running_tokens -= job.prompt_tokens + tokens
        self._private_used -= tokens

    # Steps.

    def plan_prefill(self) -> bool:
        """Fill the next prefill batch: the chunk under way first, then the queue while chunk and KV last."""
        budget = self.chunk_tokens
        batch = self.batch
        job = self._chunked
        while budget > 0:
            if job is None:
                job = self._admit(len(batch))
                if job is None:
                    break
            new_tokens = min(budget, job.prompt_tokens - job.done_tokens)
            batch.append((job, new_tokens))
            budget -= new_tokens
            self._chunked = job if job.done_tokens + new_tokens < job.prompt_tokens else None
            job = None
        return bool(batch)

    def _admit(self, batch_count: int) -> Job | None:
        if not self.waiting or self._is_blocked:
            return None
        job = self.waiting[0]
        is_regular = job.role is Role.REGULAR
        if is_regular and self.running_count + batch_count >= self.max_batch:
            return None
        pinned = self.cache.match(job.blocks, self._match_limit(job))
        cached = pinned * self.cache.block_tokens
        prefix = job.blocks[:pinned]
        self.cache.pin(prefix)
        answer = job.output_tokens if is_regular else 0
        need = job.prompt_tokens - cached + answer
        if not self._take(need):
            self.cache.unpin(prefix)
            self._is_blocked = True  # until something is freed
            return None
        self.waiting.popleft()
        self._dequeued(job)
        job.pinned_blocks = pinned
        self._hold(job, job.prompt_tokens - cached, need)
        job.phase = Phase.PREFILLING
        job.cached_tokens = job.done_tokens = cached
        self._prompt_tokens += job.prompt_tokens
        self._cached_tokens += cached
        return job

    def prefill_batch_ms(self, curve: PrefillCurve) -> float:
        """Time of the planned prefill batch on this rank alone."""
        return curve.a0 + sum(curve.chunk_ms(new, job.done_tokens) for job, new in self.batch)

    def decode_step_ms(self, curve: DecodeCurve) -> float:
        """Time of the next decode step on this rank alone."""
        return curve.step_ms(self.running_count, self.running_tokens)

    def steps_until_due(self) -> int:
        """Decode steps until a chunk is due or a job ends."""
        due = self._due
        while due[0][2].phase is not Phase.RUNNING:
            heappop(due)
        return due[0][0] - self.steps

    def finish_prefill(self, at_s: float, step_s: float, events: list[Event]) -> None:
        """Apply the prefill batch that is over."""
        batch, self.batch = self.batch, []
        self.prefill_busy_s += step_s
        for job, new_tokens in batch:
            if job.phase is not Phase.PREFILLING:
                continue
            self.prefill_uncached_tokens += new_tokens
            job.done_tokens += new_tokens
            self._share(job)
            if job.done_tokens < job.prompt_tokens:
                continue
            if job.role is Role.REGULAR:
                self._join(job, at_s, events)
            else:
                job.phase = Phase.INFLIGHT
                self.inflight_count += 1
                self.generated_tokens += 1
                events.append(Event(EventKind.PREFILLED, job, at_s, 1))

    def finish_decode(self, steps: int, at_s: float, step_s: float, events: list[Event]) -> None:
        """Apply decode steps that are over; none of them but the last may have made anything due."""
        self.steps += steps
        new_tokens = self.running_count * steps
        self.running_tokens += new_tokens
        self._private_used += new_tokens
        self.generated_tokens += new_tokens
        self.last_step_s = step_s
        due = self._due
        while due and due[0][0] <= self.steps:
            job = heappop(due)[2]
            if job.phase is not Phase.RUNNING:
                continue
            tokens = self.generated(job)
            if tokens < job.output_tokens:
                events.append(Event(EventKind.PROGRESS, job, at_s, tokens))
                self._schedule(job, tokens)
            else:
                self._leave_batch(job)
                self._free(job)
                events.append(Event(EventKind.FINISHED, job, at_s, tokens))

    def load(self) -> RankLoad:
        """Load now."""
        used = self.cache.pinned_tokens + self._private_used
        prefilling = {job for job, _ in self.batch if job.phase is Phase.PREFILLING}
        chunked = self._chunked
        left = 0
        if chunked is not None:
            prefilling.add(chunked)
            left = chunked.prompt_tokens - chunked.done_tokens
        rate = self.running_count / self.last_step_s if self.running_count and self.last_step_s else 0.0
        return RankLoad(
            rank=self.index,
            running=self.running_count + len(prefilling),
            waiting=len(self.waiting) + len(self.ready),
            bootstrap=len(self.bootstrap),
            inflight=self.inflight_count,
            prealloc=len(self.prealloc),
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
        )
