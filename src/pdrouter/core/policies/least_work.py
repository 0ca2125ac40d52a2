"""``least_work``: the pair of ranks with the least predicted time, chosen in O(matches + log n).

    ttft + expected output * step time
    ttft = wait until the prefill rank is free + prefill(uncached | cached) + transfer
    step = b0 + b1 * requests + b2 * KV tokens with this request; of the slowest rank where ranks step together

For all ranks that hold none of the prompt the prefill differs by tier alone, so the best of a pool is the first of
one of its heaps (``work.py``), or a rank that holds some of it. Pools are looked at in the order of their first free
rank until no later one can do better. The choice is the optimum over the keys and tiers in the index.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import ClassVar, NamedTuple

from pdrouter.core.cost import transfer_s
from pdrouter.core.decision import Why
from pdrouter.core.fleet import Role
from pdrouter.core.load import EndpointLoad
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question, Turns
from pdrouter.core.work import Domain, Pool, Tier, Worker, WorkIndex

_INFINITY = float("inf")

_FEW_POOLS = 128
"""Up to so many pools it is cheaper to bound each than to take them in order; see benchmarks/decide.py."""


class Offer(NamedTuple):
    """What a rank would take, and the seconds that it costs the request."""

    cost_s: float
    worker: Worker


class PairOffer(NamedTuple):
    """The least of what was looked at; ``prefill`` is ``None`` for a regular rank, which does both."""

    cost_s: float
    prefill: Offer | None
    decode: Offer
    seen: int


class LeastWork:
    """The pair with the least predicted time; one side, or one endpoint's ranks, by a scan with the same costs."""

    name: ClassVar[str] = "least_work"

    def __init__(self, options: PolicyOptions) -> None:
        self.index = options.work
        self._turns = Turns()

    def choose_pair(self, question: Question, model: str | None) -> PairOffer | None:
        """Return the best pair, ``None`` if there is none."""
        search = _PairSearch(question)
        for domain in self.index.domains(model, regular=False):
            search.matches(self.index, domain)
            search.pools(domain)
        return search.result()

    def choose_regular(self, question: Question, model: str | None) -> PairOffer | None:
        """Return the best regular rank, ``None`` if there is none."""
        search = _RegularSearch(question)
        for domain in self.index.domains(model, regular=True):
            search.look(self.index, domain)
        return search.result()

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the candidate with the least time on this side."""
        costs_s = [self._cost_s(question, candidate) for candidate in candidates]
        index = self._turns.least(question.scope, costs_s)
        return Pick(index, Why(self.name, "least predicted seconds on this side", candidates, costs_s))

    def _cost_s(self, question: Question, candidate: Candidate) -> float:
        if isinstance(candidate, EndpointLoad):
            return min(self._cost_s(question, rank) for rank in candidate.ranks)
        worker = self.index.workers.get(candidate.key)
        if worker is None:
            return _INFINITY
        cost_s = 0.0
        if question.role is not Role.DECODE:
            cost_s += prefill_cost_s(question, worker)
        if question.role is not Role.PREFILL:
            cost_s += decode_cost_s(question, worker)
        return cost_s


class _PairSearch:
    """One search for a pair."""

    def __init__(self, job: Question) -> None:
        self._job = job
        self._decodes: dict[int, Offer | None] = {}
        self._best_s = _INFINITY
        self._best: tuple[Offer, Offer] | None = None
        self._seen = 0

    def result(self) -> PairOffer | None:
        if self._best is None:
            return None
        return PairOffer(self._best_s, *self._best, self._seen)

    def matches(self, index: WorkIndex, domain: Domain) -> None:
        """Look at the ranks that hold some of the prompt."""
        for key in self._job.cached_tokens:
            worker = index.workers.get(key)
            if worker is not None and worker.prefill is not None and worker.site.domain is domain:
                self._consider(worker)

    def pools(self, domain: Domain) -> None:
        """Look at the pools of a domain, the most promising first; those that can't do better are left out."""
        if not domain.prefill_paces or not domain.decode_paces:
            return
        if len(domain.pools) == 1:
            for pool in domain.pools.values():
                self._consider_pool(pool)
            return
        job, n = self._job, self._job.prompt_tokens
        kv_tokens = n + job.output_tokens / 2
        reading_s = {p: p.prefill_s(n, 0) + transfer_s(p.profile, n) for p in domain.prefill_paces.values()}
        writing_s = {p: job.output_tokens * p.step_s(0.0, kv_tokens) for p in domain.decode_paces.values()}
        if len(domain.pools) > _FEW_POOLS:
            self._in_order_of_freedom(domain, min(reading_s.values()) + min(writing_s.values()))
            return
        now_s, output_tokens = job.now_s, job.output_tokens
        floors = [
            (
                (max(0.0, free.key - now_s) + output_tokens * share.key)
                + (reading_s[reads[0]] if len(reads) == 1 else min(reading_s[p] for p in reads))
                + (writing_s[writes[0]] if len(writes) == 1 else min(writing_s[p] for p in writes)),
                free.item,
            )
            for pool in domain.pools.values()
            if (free := pool.prefill_entry) is not None
            and (share := pool.decode_entry) is not None
            and (reads := pool.prefill_paces)
            and (writes := pool.decode_paces)
        ]
        if floors:
            _, promising = min(floors, key=itemgetter(0))
            self._consider_pool(promising)
            for floor_s, pool in floors:
                if floor_s < self._best_s and pool is not promising:
                    self._consider_pool(pool)

    def _in_order_of_freedom(self, domain: Domain, floor_s: float) -> None:
        """Stop at the first pool that would wait too long even with the least decode load of all."""
        job = self._job
        least_share_s = domain.by_share.top().key
        for entry in domain.by_free.in_order():
            wait_s = max(0.0, entry.key - job.now_s)
            if wait_s + floor_s + job.output_tokens * least_share_s >= self._best_s:
                break
            decode = entry.item.decode_entry
            if decode is not None and wait_s + floor_s + job.output_tokens * decode.key < self._best_s:
                self._consider_pool(entry.item)

    def _consider_pool(self, pool: Pool) -> None:
        for tier in pool.prefill.values():
            self._consider(tier.heap.top().item)

    def _consider(self, worker: Worker) -> None:
        pool = worker.site.pool
        decode = self._decodes.get(id(pool))
        if decode is None:
            decode = self._decodes[id(pool)] = best_decode(self._job, pool)
            if decode is None:
                return
        self._seen += 1
        prefill_s = prefill_cost_s(self._job, worker)
        if prefill_s + decode.cost_s < self._best_s:
            self._best_s = prefill_s + decode.cost_s
            self._best = (Offer(prefill_s, worker), decode)


class _RegularSearch:
    """One search for a rank that does both."""

    def __init__(self, job: Question) -> None:
        self._job = job
        self._best: Offer | None = None
        self._seen = 0

    def result(self) -> PairOffer | None:
        best = self._best
        return None if best is None else PairOffer(best.cost_s, None, best, self._seen)

    def look(self, index: WorkIndex, domain: Domain) -> None:
        """Look at matches and first free ranks, then by decode load until no later rank can do better."""
        job = self._job
        if not domain.prefill_paces:
            return
        for key in job.cached_tokens:
            worker = index.workers.get(key)
            if worker is not None and worker.decode is not None and worker.site.domain is domain:
                self._consider(worker)
        least_prefill_s = _least_prefill_s(job, domain)
        kv_tokens = job.prompt_tokens + job.output_tokens / 2
        for pool in domain.pools.values():
            for tier in pool.prefill.values():
                self._consider(tier.heap.top().item)
            for tier in pool.decode.values():
                for entry in tier.heap.in_order():
                    floor_s = least_prefill_s + job.output_tokens * tier.pace.step_s(entry.key, kv_tokens)
                    if self._best is not None and floor_s >= self._best.cost_s:
                        break
                    self._consider(entry.item)

    def _consider(self, worker: Worker) -> None:
        self._seen += 1
        cost_s = prefill_cost_s(self._job, worker) + decode_cost_s(self._job, worker)
        if self._best is None or cost_s < self._best.cost_s:
            self._best = Offer(cost_s, worker)


def prefill_cost_s(job: Question, worker: Worker) -> float:
    """Return a rank's predicted time to first token, KV transfer included."""
    tier = worker.prefill_tier
    if tier is None:
        return _INFINITY
    held = job.cached_tokens.get(worker.load.key, 0) if job.cached_tokens else 0
    wait_s = max(0.0, worker.free_at_s - job.now_s)
    return (
        wait_s + tier.pace.prefill_s(job.prompt_tokens - held, held) + transfer_s(tier.pace.profile, job.prompt_tokens)
    )


def decode_cost_s(job: Question, worker: Worker) -> float:
    """Return a rank's predicted time for the whole answer: the steps, and the wait until the KV fits."""
    tier = worker.decode_tier
    if tier is None:
        return _INFINITY
    profile, output = tier.pace.profile, job.output_tokens
    step_s = tier.pace.step_s(worker.share_s, job.prompt_tokens + output / 2)
    if profile.steps_together:
        others_s = tier.pace.factor * (profile.step_base_s + worker.site.slowest_share_s())
        step_s = max(step_s, others_s)
    return output * step_s + _wait_for_room_s(job, worker, tier, step_s)


def best_decode(job: Question, pool: Pool) -> Offer | None:
    """Return the decode rank of a pool that takes the least time."""
    best: Offer | None = None
    kv_tokens = job.prompt_tokens + job.output_tokens / 2
    for tier in pool.decode.values():
        first = tier.heap.top()
        cost_s = decode_cost_s(job, first.item)
        if best is None or cost_s < best.cost_s:
            best = Offer(cost_s, first.item)
        if cost_s <= job.output_tokens * tier.pace.step_s(first.key, kv_tokens):
            continue  # nothing stands in its way, so that no later one can do better
        for entry in tier.heap.in_order():
            if job.output_tokens * tier.pace.step_s(entry.key, kv_tokens) >= best.cost_s:
                break
            cost_s = decode_cost_s(job, entry.item)
            if cost_s < best.cost_s:
                best = Offer(cost_s, entry.item)
    return best


def _wait_for_room_s(job: Question, worker: Worker, tier: Tier, step_s: float) -> float:
    """Return the time until KV and a place in the batch are free.

    Source: chosen. What a rank holds turns over once in the time of an answer, so a part of it does in that part.
    """
    profile, load = tier.pace.profile, worker.load
    lacking = 0.0
    if profile.kv_capacity_tokens is not None:
        held = load.comparable_tokens
        missing = held + job.prompt_tokens + job.output_tokens - profile.kv_capacity_tokens
        if missing > 0:
            lacking = missing / max(held, 1.0)
    if profile.max_batch is not None and load.comparable_requests >= profile.max_batch:
        requests = load.comparable_requests
        lacking = max(lacking, (requests + 1 - profile.max_batch) / requests)
    return lacking * job.output_tokens * step_s


def _least_prefill_s(job: Question, domain: Domain) -> float:
    """Return what the fastest idle rank without a match would take to read the prompt."""
    n = job.prompt_tokens
    return min(pace.prefill_s(n, 0) + transfer_s(pace.profile, n) for pace in domain.prefill_paces.values())
