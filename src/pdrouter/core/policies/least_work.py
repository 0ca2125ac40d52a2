"""``least_work``: the pair of ranks with the least predicted time, chosen in O(matches + log n).

    ttft + expected output * step time
    ttft = wait until the prefill rank is free + prefill(uncached | cached) + transfer
    step = b0 + b1 * requests + b2 * KV tokens with this request; of the slowest rank where ranks step together

For all ranks that hold none of the prompt the prefill differs by tier alone, so the best of a pool is the first of
one of its heaps (``work.py``), or a rank that holds some of it. Pools are looked at until none that is left can do
better. The choice is the optimum over the keys and tiers in the index; of very many ranks that read in step, the best
of those that are free first. A name that only some endpoints of its model have (an adapter) is looked for among those.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import ClassVar

import msgspec

from pdrouter.core.cost import Profile, prefill_s, transfer_s
from pdrouter.core.decision import Why
from pdrouter.core.fleet import Role
from pdrouter.core.load import EndpointLoad
from pdrouter.core.places import Domain, Holding, Kind, Pool, Tier, Worker
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question, Turns
from pdrouter.core.prefix import window
from pdrouter.core.work import WorkIndex

_INFINITY = float("inf")

_COST_S = attrgetter("cost_s")

_NEGLIGIBLE_S = 1e-9
"""What isn't worth a look. Chosen: far above rounding errors, far below what any clock tells."""

_MOST_IN_STEP = 64
"""Ranks that read in step looked at in one tier, the first free first. Chosen: eight endpoints of eight."""

_MOST_HELD, _MOST_HELD_POOLS = 64, 8
"""Ranks of each side, and pools, that are looked at for a name that only some endpoints have. Chosen: of more, others
come each time, and the best of 64 is close to the best of all."""

_MOST_POOLS = 16
"""Pools with ranks that read in step looked at, the most promising first: bounds don't tell of neighbours. Chosen."""

AVOIDED_S = 2.0**20
"""What is put on top of the cost of a rank to avoid: more than any request takes, so that fewest of them are chosen."""


class Offer(msgspec.Struct, frozen=True, gc=False):
    """What a rank would take, and the seconds that it costs the request; ``AVOIDED_S`` more if it is to be avoided."""

    cost_s: float
    worker: Worker


class PairOffer(msgspec.Struct, frozen=True, gc=False):
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
        self._looks = 0

    def choose_pair(self, question: Question, model: str | None) -> PairOffer | None:
        """Return the best pair, ``None`` if there is none."""
        search = _PairSearch(question)
        if held := self._held(question, model, regular=False):
            search.held(held)
            return search.result()
        for domain in self.index.domains(model, regular=False):
            search.matches(self.index, domain)
            search.pools(domain)
        return search.result()

    def choose_regular(self, question: Question, model: str | None) -> PairOffer | None:
        """Return the best regular rank, ``None`` if there is none."""
        search = _RegularSearch(question)
        if held := self._held(question, model, regular=True):
            search.held(held)
            return search.result()
        for domain in self.index.domains(model, regular=True):
            search.look(self.index, domain)
        return search.result()

    def choose_decode(self, question: Question, model: str | None) -> PairOffer | None:
        """Return the best decode rank to read the prompt as well, ``None`` if there is none.

        Looked at: the least loaded pool's best, and the ranks that hold some of the prompt.
        """
        if held := self._held(question, model, regular=False):
            workers = [worker for holding in held for worker in holding.writers if worker.decode is not None]
        else:
            domains = self.index.domains(model, regular=False)
            workers = [worker for domain in domains for worker in _readers(question, self.index, domain)]
        best: Offer | None = None
        for worker in workers:
            cost_s = alone_cost_s(question, worker)
            if best is None or cost_s < best.cost_s:
                best = Offer(cost_s, worker)
        return None if best is None else PairOffer(best.cost_s, None, best, 1)

    def _held(self, job: Question, name: str | None, *, regular: bool) -> Sequence[Holding]:
        """Return the ranks to look at for a name that only some of its base model's have: all, or others each time."""
        holdings = self.index.holdings(name, regular=regular)
        if not holdings:
            return ()
        self._looks += 1
        pools = window(holdings, self._looks, _MOST_HELD_POOLS)
        return [self._some_of(holding, _MOST_HELD // len(pools), job, name) for holding in pools]

    def _some_of(self, holding: Holding, most: int, job: Question, name: str | None) -> Holding:
        """Return at most so many ranks of each side (I9), and beside them those that hold some of the prompt."""
        pool, readers, writers = holding
        if len(readers) <= most and len(writers) <= most:
            return holding
        known = [worker for key in job.cached_tokens if (worker := self.index.workers.get(key)) is not None]
        having = [worker.site for worker in known if worker.site.pool is pool and worker.site.endpoint.serves(name)]
        return Holding(
            pool,
            [*window(readers, self._looks, most), *(w for w in known if w.site in having and w.site.has_prefill)],
            [*window(writers, self._looks, most), *(w for w in known if w.site in having and w.site.has_decode)],
        )

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
        self._decodes: dict[Pool, Offer | None] = {}
        self._best_s = _INFINITY
        self._best: tuple[Offer, Offer] | None = None
        self._seen = 0

    def result(self) -> PairOffer | None:
        if self._best is None:
            return None
        return PairOffer(self._best_s, *self._best, self._seen)

    def held(self, holdings: Sequence[Holding]) -> None:
        """Look at the ranks of holdings one by one."""
        for holding in holdings:
            offers = [Offer(decode_cost_s(self._job, writer), writer) for writer in holding.writers]
            decode = min(offers, key=_COST_S, default=None)
            if decode is not None and decode.cost_s < _INFINITY:
                self._seen += len(holding.readers)
                for reader in holding.readers:
                    self._weigh(prefill_cost_s(self._job, reader), reader, decode)

    def matches(self, index: WorkIndex, domain: Domain) -> None:
        """Look at the ranks that hold some of the prompt; what ranks alike that hold as much take is told once."""
        job, workers = self._job, index.workers
        now_s, avoid = job.now_s, job.avoid
        tier, decode, held, read_s, move_s = None, None, -1, 0.0, 0.0
        for key, tokens in job.cached_tokens.items():
            worker = workers.get(key)
            if worker is None:
                continue
            if tokens != held or worker.prefill_tier is not tier:
                tier, held, decode = worker.prefill_tier, tokens, None
                if tier is not None and worker.site.domain is domain:
                    decode = self._decode(worker.site.pool)
                    read_s = tier.pace.prefill_s(job.prompt_tokens - held, held)
                    move_s = transfer_s(tier.pace.profile, job.prompt_tokens)
            if decode is None:
                continue
            together = worker.site.together
            own_s = read_s if together is None else max(read_s, together.read_s(job.prompt_tokens - held))
            prefill_s = (worker.free_at_s - now_s if worker.free_at_s > now_s else 0.0) + own_s + move_s
            if prefill_s + decode.cost_s <= self._best_s:
                if avoid and job.avoids(key):
                    prefill_s += AVOIDED_S
                self._seen += 1
                self._weigh(prefill_s, worker, decode)

    def pools(self, domain: Domain) -> None:
        """Look at the pools of a domain, the most promising first; those that can't do better are left out."""
        if len(domain.pools) == 1:
            for pool in domain.pools.values():
                self._consider_pool(pool)
            return
        least_s = {kind: _least_s(self._job, kind) for kind in domain.kinds}
        lightest = domain.by_share.top().item
        if lightest.free_s <= self._job.now_s:
            self._consider_pool(lightest)
            if not self._is_worse(self._job.output_tokens * lightest.share_s + min(least_s.values())):
                self._by_floor(domain, least_s)
        else:
            self._by_floor(domain, least_s)

    def _by_floor(self, domain: Domain, least_s: Mapping[Kind, float]) -> None:
        """Bound each pool: by what its first free rank, its least loaded rank and its fastest paces would make."""
        now_s, output_tokens = self._job.now_s, self._job.output_tokens
        floors_s: list[float] = []
        pools: list[Pool] = []
        for kind, alike in domain.kinds.items():
            rest_s = least_s[kind] - now_s
            floors_s += [
                (free_s if (free_s := pool.free_s) > now_s else now_s) + output_tokens * pool.share_s + rest_s
                for pool in alike
            ]
            pools += alike
        in_step = 0
        while not self._is_worse(floor_s := min(floors_s)) and in_step < _MOST_POOLS:  # I9
            place = floors_s.index(floor_s)
            floors_s[place] = _INFINITY
            self._consider_pool(pools[place])
            in_step += any(pace.profile.steps_together for pace in pools[place].kind.readers)

    def _is_worse(self, floor_s: float) -> bool:
        """Whether what takes at least so long can't do better than the best, but by rounding."""
        return floor_s >= self._best_s - _NEGLIGIBLE_S

    def _consider_pool(self, pool: Pool) -> None:
        decode = self._decode(pool)
        if decode is None:
            return
        for tier in pool.prefill.values():
            first = _first(self._job, tier)
            self._seen += 1
            self._weigh(prefill_cost_s(self._job, first), first, decode)
            if tier.pace.profile.steps_together:
                self._go_on(tier, first, decode)

    def _go_on(self, tier: Tier, first: Worker, decode: Offer) -> None:
        """Look at the first ranks of other endpoints, too: where one is free later, prompts may be less deep."""
        job, pace, n, seen = self._job, tier.pace, self._job.prompt_tokens, {first.site}
        rest_s = pace.prefill_s(n, 0) + transfer_s(pace.profile, n) + decode.cost_s
        for entry in islice(tier.heap.in_order(), _MOST_IN_STEP):  # I9
            worker = entry.item
            if self._is_worse(max(0.0, entry.key - job.now_s) + rest_s):
                break
            if worker.site not in seen or job.avoid:
                seen.add(worker.site)
                self._seen += 1
                self._weigh(prefill_cost_s(job, worker), worker, decode)

    def _decode(self, pool: Pool) -> Offer | None:
        """Return the best of a pool's other side, looked for once."""
        if pool not in self._decodes:
            self._decodes[pool] = best_decode(self._job, pool)
        return self._decodes[pool]

    def _weigh(self, prefill_s: float, worker: Worker, decode: Offer) -> None:
        """Keep a pair if it is better, or as good with a rank that is free for longer: no one gets it all."""
        cost_s = prefill_s + decode.cost_s
        if cost_s == self._best_s and self._best is not None:
            is_better = worker.free_at_s < self._best[0].worker.free_at_s
        else:
            is_better = cost_s < self._best_s
        if is_better:
            self._best_s, self._best = cost_s, (Offer(prefill_s, worker), decode)


class _RegularSearch:
    """One search for a rank that does both."""

    def __init__(self, job: Question) -> None:
        self._job = job
        self._best: Offer | None = None
        self._seen = 0

    def result(self) -> PairOffer | None:
        best = self._best
        return None if best is None else PairOffer(best.cost_s, None, best, self._seen)

    def held(self, holdings: Sequence[Holding]) -> None:
        """Look at the ranks of holdings one by one."""
        for holding in holdings:
            for worker in holding.readers:
                if worker.decode is not None:
                    self._consider(worker)

    def look(self, index: WorkIndex, domain: Domain) -> None:
        """Look at matches and first free ranks, then by decode load until no later rank can do better."""
        job = self._job
        for key in job.cached_tokens:
            worker = index.workers.get(key)
            if worker is not None and worker.decode is not None and worker.site.domain is domain:
                self._consider(worker)
        kv_tokens = job.prompt_tokens + job.output_tokens / 2
        for pool in domain.pools.values():
            for tier in pool.prefill.values():
                self._consider(tier.heap.top().item)
            least_prefill_s = _least_prefill_s(job, pool.kind)
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
    pace, prompt_tokens, cost_s = tier.pace, job.prompt_tokens, max(0.0, worker.free_at_s - job.now_s)
    if job.avoid and job.avoids(worker.load.key):
        cost_s += AVOIDED_S
    held = job.cached_tokens.get(worker.load.key, 0) if job.cached_tokens else 0
    read_s, together = pace.prefill_s(prompt_tokens - held, held), worker.site.together
    if together is not None:
        read_s = max(read_s, together.read_s(prompt_tokens - held))
    return cost_s + read_s + transfer_s(pace.profile, prompt_tokens)


def decode_cost_s(job: Question, worker: Worker) -> float:
    """Return a rank's predicted time for the whole answer: the steps, and the wait until the KV fits."""
    tier = worker.decode_tier
    if tier is None:
        return _INFINITY
    pace, output = tier.pace, job.output_tokens
    step_s = pace.step_s(worker.share_s, job.prompt_tokens + output / 2)
    cost_s = AVOIDED_S if job.avoid and job.avoids(worker.load.key) else 0.0
    if pace.is_plain:
        return cost_s + output * step_s
    if pace.profile.steps_together:
        others_s = pace.factor * (pace.profile.step_base_s + worker.site.slowest_share_s())
        step_s = max(step_s, others_s)
    return cost_s + output * step_s + _wait_for_room_s(job, worker, pace.profile, step_s)


def alone_cost_s(job: Question, worker: Worker) -> float:
    """Return what it takes a decode rank to read the prompt, too, and what that keeps the others on it from.

    Source: chosen. All that decode there wait while a prompt is read, each as long as the other.
    """
    site = worker.site
    held = job.cached_tokens.get(worker.load.key, 0) if job.cached_tokens else 0
    read_s = site.speed.prefill_factor * prefill_s(site.profile, job.prompt_tokens - held, held)
    wait_s = max(0.0, worker.free_at_s - job.now_s)
    return wait_s + read_s * (1 + worker.load.comparable_requests) + decode_cost_s(job, worker)


def _readers(job: Question, index: WorkIndex, domain: Domain) -> Iterator[Worker]:
    """Yield the decode ranks that could best read a prompt themselves."""
    for entry in domain.by_share.in_order():
        offer = best_decode(job, entry.item)
        if offer is not None:
            yield offer.worker
        if offer is None or not job.avoids(offer.worker.load.key):
            break
    for key in job.cached_tokens:
        worker = index.workers.get(key)
        if worker is not None and worker.decode is not None and worker.site.domain is domain:
            yield worker


def best_decode(job: Question, pool: Pool) -> Offer | None:
    """Return the decode rank of a pool that takes the least time."""
    best: Offer | None = None
    kv_tokens = job.prompt_tokens + job.output_tokens / 2
    for tier in pool.decode.values():
        worker = _first(job, tier)
        cost_s = decode_cost_s(job, worker)
        if best is None or cost_s < best.cost_s:
            best = Offer(cost_s, worker)
        if tier.pace.is_plain:
            continue
        for entry in tier.heap.in_order():
            if job.output_tokens * tier.pace.step_s(entry.key, kv_tokens) >= best.cost_s:
                break
            cost_s = decode_cost_s(job, entry.item)
            if cost_s < best.cost_s:
                best = Offer(cost_s, entry.item)
    return best


def _first(job: Question, tier: Tier) -> Worker:
    """Return the first rank of a tier, of those that needn't be avoided if there is one."""
    first = tier.heap.top().item
    if job.avoid and job.avoids(first.load.key):
        return next((e.item for e in tier.heap.in_order() if not job.avoids(e.item.load.key)), first)
    return first


def _wait_for_room_s(job: Question, worker: Worker, profile: Profile, step_s: float) -> float:
    """Return the time until KV and a place in the batch are free.

    Source: chosen. What a rank holds turns over once in the time of an answer, so a part of it does in that part.
    """
    held, requests = worker.load.comparable()
    lacking = 0.0
    if profile.kv_capacity_tokens is not None:
        missing = held + job.prompt_tokens + job.output_tokens - profile.kv_capacity_tokens
        if missing > 0:
            lacking = missing / max(held, 1.0)
    if profile.max_batch is not None and requests >= profile.max_batch:
        lacking = max(lacking, (requests + 1 - profile.max_batch) / requests)
    return lacking * job.output_tokens * step_s


def _least_prefill_s(job: Question, kind: Kind) -> float:
    """Return what the fastest idle rank without a match would take to read the prompt; infinity if there is none."""
    n = job.prompt_tokens
    return min([pace.prefill_s(n, 0) + transfer_s(pace.profile, n) for pace in kind.readers], default=_INFINITY)


def _least_s(job: Question, kind: Kind) -> float:
    """Return what the fastest idle ranks would take for it all; infinity where one side has none."""
    kv_tokens = job.prompt_tokens + job.output_tokens / 2
    steps_s = min([pace.step_s(0.0, kv_tokens) for pace in kind.writers], default=_INFINITY)
    return _least_prefill_s(job, kind) + job.output_tokens * steps_s
