"""What each rank has still to do, in seconds, kept where time doesn't change it; and the ranks in that order.

For prefill the key is the moment at which the rank is free, for decode the load's share of the step time. Both are
brought up to date by what happens to a rank (reserved, prefill done, grown, settled, reported), never by time itself.
Ranks of one pool and one tier of speed stand in one heap, so that what differs between them is the key alone.
Who searches in here: ``policies/least_work.py``.
"""

from collections.abc import Iterable, Mapping

from pdrouter.core.cost import Profile, prefill_s, queue_s, transfer_s
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.heap import ChangingHeap, Entry
from pdrouter.core.ledger import LegKind, RankKey, Reservation
from pdrouter.core.load import EndpointLoad, RankLoad
from pdrouter.core.speed import Speed, class_factor

PoolKey = tuple[str, str, str]
"""Engine, KV transport and group: within one pool of a model, prefill and decode ranks may be paired (I6)."""

DomainKey = tuple[str | None, bool]
"""Model, and whether its endpoints are regular ones."""

_TELLING_TOKENS = 16
"""Shortest answer whose pace tells of a rank's steps; chosen."""

_TELLING_PROMPT_TOKENS = 2048
"""Fewest uncached tokens whose time tells of a rank's prefill and not of what stands around it; chosen."""

TierKey = tuple[Profile, int]
"""A profile and a class of learned speed."""


class Pace:
    """The times of ranks alike in profile and, to about 10 %, in learned speed."""

    __slots__ = ("factor", "profile", "ranks")

    def __init__(self, key: TierKey) -> None:
        self.profile, speed_class = key
        self.factor = class_factor(speed_class)
        self.ranks = 0

    def prefill_s(self, uncached_tokens: float, past_tokens: float) -> float:
        """Return the time to read a prompt."""
        return self.factor * prefill_s(self.profile, uncached_tokens, past_tokens)

    def step_s(self, share_s: float, kv_tokens: float) -> float:
        """Return a step's time where ranks have such a load, once a request with so much KV has joined."""
        p = self.profile
        return self.factor * (p.step_base_s + share_s + p.step_request_s + p.step_kv_token_s * kv_tokens)


class Tier:
    """The ranks of a pool that have one pace, by their key; without any it isn't kept."""

    __slots__ = ("heap", "key", "pace")

    def __init__(self, key: TierKey, pace: Pace) -> None:
        self.key = key
        self.pace = pace
        self.heap: ChangingHeap[Worker] = ChangingHeap()


class Worker:
    """One rank as a place of work.

    ``free_at_s``: when what is queued on it will have been read. ``queued_s``: the time that all of that takes,
    ``busy_since_s``: when it began with the first of it. ``share_s``: what its requests and their KV add to a step, at
    the speed of its profile.
    """

    __slots__ = (
        "busy_since_s",
        "decode",
        "decode_tier",
        "free_at_s",
        "load",
        "prefill",
        "prefill_tier",
        "queued_s",
        "share_s",
        "site",
    )

    def __init__(self, site: "Site", load: RankLoad) -> None:
        self.site = site
        self.load = load
        self.free_at_s = 0.0
        self.queued_s = 0.0
        self.busy_since_s = 0.0
        self.share_s = 0.0
        self.prefill: Entry[Worker] | None = None
        self.decode: Entry[Worker] | None = None
        self.prefill_tier: Tier | None = None
        self.decode_tier: Tier | None = None


class Site:
    """One endpoint as a place of work: its profile, what was learned of its speed, its ranks."""

    __slots__ = ("domain", "endpoint", "is_ready", "load", "pool", "profile", "speed", "workers")

    def __init__(self, load: EndpointLoad, pool: "Pool", domain: "Domain", profile: Profile) -> None:
        self.endpoint: Endpoint = load.endpoint
        self.load = load
        self.pool = pool
        self.domain = domain
        self.profile = profile
        self.speed = Speed(profile)
        self.workers = [Worker(self, rank) for rank in load.ranks]
        self.is_ready = False

    def inherit(self, known: "Site") -> None:
        """Go on where an earlier description of the endpoint stood: what is queued stays, and what was learned."""
        if known.profile == self.profile:
            self.speed = known.speed
        for worker, before in zip(self.workers, known.workers, strict=False):
            worker.queued_s = before.queued_s
            worker.busy_since_s = before.busy_since_s

    def slowest_share_s(self) -> float:
        """Return the largest share of its ranks: where they step together, all wait for it."""
        return max(worker.share_s for worker in self.workers)


class Pool:
    """Ranks that may work on one request together: one model, engine, KV transport and group."""

    __slots__ = ("decode", "decode_entry", "decode_paces", "key", "prefill", "prefill_entry", "prefill_paces", "sites")

    def __init__(self, key: PoolKey) -> None:
        self.key = key
        self.sites: dict[str, Site] = {}
        self.prefill: dict[TierKey, Tier] = {}
        self.decode: dict[TierKey, Tier] = {}
        self.prefill_paces: tuple[Pace, ...] = ()
        self.decode_paces: tuple[Pace, ...] = ()
        self.prefill_entry: Entry[Pool] | None = None
        self.decode_entry: Entry[Pool] | None = None

    def note_paces(self) -> None:
        """Remember which paces its ranks have now."""
        self.prefill_paces = tuple(tier.pace for tier in self.prefill.values())
        self.decode_paces = tuple(tier.pace for tier in self.decode.values())

    def first_free_s(self) -> float | None:
        """Return the earliest moment at which one of its ranks is free; ``None`` where there is none."""
        return min((tier.heap.top().key for tier in self.prefill.values()), default=None)

    def least_share_s(self) -> float | None:
        """Return the least part of a step that one of its ranks' load takes; ``None`` where there is none."""
        return min((tier.pace.factor * tier.heap.top().key for tier in self.decode.values()), default=None)


class Domain:
    """The pools of one model and kind (pairs, or regular endpoints), by the least of their ranks' keys.

    A pool that is alone isn't ranked.
    ``prefill_paces`` and ``decode_paces`` are those that any of its ranks has, for what the fastest would take.
    """

    __slots__ = ("by_free", "by_share", "decode_paces", "key", "pools", "prefill_paces")

    def __init__(self, key: "DomainKey") -> None:
        self.key = key
        self.pools: dict[PoolKey, Pool] = {}
        self.by_free: ChangingHeap[Pool] = ChangingHeap()
        self.by_share: ChangingHeap[Pool] = ChangingHeap()
        self.prefill_paces: dict[TierKey, Pace] = {}
        self.decode_paces: dict[TierKey, Pace] = {}


class WorkIndex:
    """All ranks that are ready, by what they have still to do."""

    def __init__(self, neutral: Profile, profiles: Mapping[str, Profile]) -> None:
        self.sites: dict[str, Site] = {}
        self.workers: dict[RankKey, Worker] = {}
        self._neutral = neutral
        self._profiles = profiles
        self._domains: dict[DomainKey, Domain] = {}

    def domains(self, model: str | None, *, regular: bool) -> Iterable[Domain]:
        """Return the domains that may serve a model; without one, all."""
        if model is not None:
            domain = self._domains.get((model, regular))
            return () if domain is None else (domain,)
        return [domain for (_, is_regular), domain in self._domains.items() if is_regular is regular]

    def add(self, load: EndpointLoad, now_s: float, *, is_ready: bool) -> None:
        """Take in an endpoint, or its new description; what was learned of its speed stays."""
        endpoint = load.endpoint
        known = self.sites.get(endpoint.address)
        if known is not None:
            self.remove(endpoint.address)
        profile = self._profiles.get(endpoint.profile or "", self._neutral)
        domain_key = (endpoint.model, endpoint.role is Role.REGULAR)
        domain = self._domains.setdefault(domain_key, Domain(domain_key))
        key = (endpoint.engine, endpoint.kv_transport, endpoint.group)
        pool = domain.pools.get(key)
        if pool is None:
            pool = domain.pools[key] = Pool(key)
            for other in domain.pools.values():
                self._rank_by_free(other, domain)
                self._rank_by_share(other, domain)
        site = self.sites[endpoint.address] = pool.sites[endpoint.address] = Site(load, pool, domain, profile)
        if known is not None:
            site.inherit(known)
        for worker in site.workers:
            self.workers[worker.load.key] = worker
        self.set_ready(endpoint.address, now_s, is_ready=is_ready)

    def remove(self, address: str) -> None:
        """Forget an endpoint."""
        site = self.sites.pop(address, None)
        if site is None:
            return
        self._take_out(site)
        for worker in site.workers:
            self.workers.pop(worker.load.key, None)
        del site.pool.sites[address]
        if not site.pool.sites:
            del site.domain.pools[site.pool.key]
            self._rank_by_free(site.pool, site.domain)
            self._rank_by_share(site.pool, site.domain)
        if not site.domain.pools:
            del self._domains[site.domain.key]

    def set_ready(self, address: str, now_s: float, *, is_ready: bool) -> None:
        """Let an endpoint's ranks be found, or not."""
        site = self.sites.get(address)
        if site is None:
            return
        site.is_ready = is_ready
        if is_ready:
            for worker in site.workers:
                self._project(worker, now_s)
        else:
            self._take_out(site)

    # What happens to a rank; nothing where its endpoint isn't kept here.

    def reserved(self, leg: Reservation, cached_tokens: int, now_s: float) -> None:
        """A leg was put on a rank."""
        worker = self.workers[leg.account.key]
        if leg.kind is not LegKind.DECODE:
            factor = worker.site.speed.prefill_factor
            leg.prefill_s = factor * prefill_s(worker.site.profile, leg.tokens, cached_tokens)
            if not worker.queued_s:
                worker.busy_since_s = now_s
            worker.queued_s += leg.prefill_s
            worker.free_at_s = max(worker.free_at_s, now_s) + leg.prefill_s
        self._place(worker)

    def grown(self, leg: Reservation) -> None:
        """An answer has grown on a rank."""
        worker = self.workers.get(leg.account.key)
        if worker is not None:
            self._place(worker)

    def prefill_ended(self, leg: Reservation, now_s: float) -> None:
        """A prompt was read: the rank turns to the next one."""
        worker = self.workers.get(leg.account.key)
        if worker is not None:
            worker.busy_since_s = now_s
            self._take_off(worker, leg, now_s)

    def settled(self, leg: Reservation, now_s: float) -> None:
        """A leg has ended, in whatever way; a prompt that wasn't read needn't be any more."""
        worker = self.workers.get(leg.account.key)
        if worker is None:
            return
        if leg.prefill_s:
            self._take_off(worker, leg, now_s)
        else:
            self._place(worker)

    def reported(self, address: str, now_s: float) -> None:
        """An endpoint has told its load."""
        site = self.sites.get(address)
        for worker in site.workers if site is not None else ():
            self._project(worker, now_s)

    def refreshed(self, key: RankKey, now_s: float) -> None:
        """A rank's report has lost its weight."""
        worker = self.workers.get(key)
        if worker is not None:
            self._project(worker, now_s)

    # What is learned of its speed.

    def learn_prefill(self, leg: Reservation, cached_tokens: int, now_s: float) -> None:
        """A first token came; it tells of the rank's speed if a long prompt had the rank to itself."""
        worker = self.workers.get(leg.account.key)
        if worker is None or leg.tokens < _TELLING_PROMPT_TOKENS:
            return
        if leg.was_alone and worker.load.account.requests == 1:
            seconds = now_s - leg.reserved_at_s - transfer_s(worker.site.profile, leg.held_tokens)
            worker.site.speed.saw_prefill(leg.tokens, cached_tokens, seconds)

    def learn_steps(self, leg: Reservation, tokens: int, seconds: float) -> None:
        """An answer of so many tokens took so long, under about the load that the rank has now."""
        worker = self.workers.get(leg.account.key)
        if worker is not None and tokens >= _TELLING_TOKENS:
            load = worker.load
            worker.site.speed.saw_step(load.comparable_requests, load.comparable_tokens, seconds / (tokens - 1))

    def _take_off(self, worker: Worker, leg: Reservation, now_s: float) -> None:
        worker.queued_s = max(0.0, worker.queued_s - leg.prefill_s) if worker.load.account.requests else 0.0
        leg.prefill_s = 0.0
        self._project(worker, now_s)

    def _project(self, worker: Worker, now_s: float) -> None:
        """Say anew when a rank is free, from what is queued on it: ours, and what a report tells of others'."""
        free_at_s = worker.busy_since_s
        if worker.queued_s:
            free_at_s = max(now_s, free_at_s + worker.queued_s)  # what was begun is partly done
        others_tokens = worker.load.comparable_tokens - worker.load.account.tokens
        if others_tokens > 0 and worker.site.endpoint.role is Role.PREFILL:
            others_s = worker.site.speed.prefill_factor * queue_s(worker.site.profile, others_tokens, 1.0)
            free_at_s = max(now_s, free_at_s) + others_s
        worker.free_at_s = free_at_s
        self._place(worker)

    # Places in the heaps.

    def _place(self, worker: Worker) -> None:
        site = worker.site
        if not site.is_ready:
            return
        role = site.endpoint.role
        if role is not Role.DECODE:
            self._place_prefill(worker, site)
        if role is not Role.PREFILL:
            self._place_decode(worker, site)

    def _place_prefill(self, worker: Worker, site: "Site") -> None:
        key = (site.profile, site.speed.prefill_class)
        tier = worker.prefill_tier
        if tier is None or tier.key != key:
            self._leave_prefill(worker, site)
            tier = worker.prefill_tier = _join(site.pool.prefill, site.domain.prefill_paces, key)
            site.pool.note_paces()
        old, heap = worker.prefill, tier.heap
        worker.prefill = heap.put(worker.free_at_s, worker) if old is None else heap.move(old, worker.free_at_s)
        if len(site.domain.pools) > 1:
            self._rank_by_free(site.pool, site.domain)

    def _place_decode(self, worker: Worker, site: "Site") -> None:
        profile = site.profile
        tokens, requests = worker.load.comparable()
        worker.share_s = profile.step_request_s * requests + profile.step_kv_token_s * tokens
        key = (profile, site.speed.decode_class)
        tier = worker.decode_tier
        if tier is None or tier.key != key:
            self._leave_decode(worker, site)
            tier = worker.decode_tier = _join(site.pool.decode, site.domain.decode_paces, key)
            site.pool.note_paces()
        old, heap = worker.decode, tier.heap
        worker.decode = heap.put(worker.share_s, worker) if old is None else heap.move(old, worker.share_s)
        if len(site.domain.pools) > 1:
            self._rank_by_share(site.pool, site.domain)

    def _leave_prefill(self, worker: Worker, site: "Site") -> None:
        if worker.prefill is not None and worker.prefill_tier is not None:
            worker.prefill_tier.heap.drop(worker.prefill)
            _leave(site.pool.prefill, site.domain.prefill_paces, worker.prefill_tier)
        worker.prefill = worker.prefill_tier = None

    def _leave_decode(self, worker: Worker, site: "Site") -> None:
        if worker.decode is not None and worker.decode_tier is not None:
            worker.decode_tier.heap.drop(worker.decode)
            _leave(site.pool.decode, site.domain.decode_paces, worker.decode_tier)
        worker.decode = worker.decode_tier = None

    def _take_out(self, site: "Site") -> None:
        for worker in site.workers:
            self._leave_prefill(worker, site)
            self._leave_decode(worker, site)
        site.pool.note_paces()
        if len(site.domain.pools) > 1:
            self._rank_by_free(site.pool, site.domain)
            self._rank_by_share(site.pool, site.domain)

    def _rank_by_free(self, pool: Pool, domain: Domain) -> None:
        pool.prefill_entry = _rank(domain.by_free, pool, pool.prefill_entry, pool.first_free_s())

    def _rank_by_share(self, pool: Pool, domain: Domain) -> None:
        pool.decode_entry = _rank(domain.by_share, pool, pool.decode_entry, pool.least_share_s())


def _rank(heap: ChangingHeap[Pool], pool: Pool, entry: Entry[Pool] | None, key: float | None) -> Entry[Pool] | None:
    """Put a pool where its key says; ``None``: nowhere."""
    if entry is not None:
        if entry.key == key:
            return entry
        heap.drop(entry)
    return None if key is None else heap.put(key, pool)


def _join(tiers: dict[TierKey, Tier], paces: dict[TierKey, Pace], key: TierKey) -> Tier:
    pace = paces.get(key)
    if pace is None:
        pace = paces[key] = Pace(key)
    pace.ranks += 1
    tier = tiers.get(key)
    if tier is None:
        tier = tiers[key] = Tier(key, pace)
    return tier


def _leave(tiers: dict[TierKey, Tier], paces: dict[TierKey, Pace], tier: Tier) -> None:
    tier.pace.ranks -= 1
    if not tier.pace.ranks:
        del paces[tier.key]
    if not len(tier.heap):
        del tiers[tier.key]
