"""Where prompts and answers can be placed, as ``least_work`` sees it: ranks in tiers, tiers in pools, pools in domains.

It keeps them in order by keys that it is told, and knows neither requests nor moments. Who tells: ``work.py``.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from pdrouter.core.cost import Profile, prefill_s
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.heap import ChangingHeap, Entry
from pdrouter.core.ledger import Reservation
from pdrouter.core.load import EndpointLoad, RankLoad
from pdrouter.core.speed import Peers, Speed, class_factor
from pdrouter.core.together import Together

PoolKey = tuple[str, str, str]
"""Engine, KV transport and group: within one pool of a model, prefill and decode ranks may be paired (I6)."""

DomainKey = tuple[str | None, bool]
"""Model, and whether its endpoints are regular ones."""

_NEVER = float("inf")

_FEWEST_RANKED = 2
"""Pools of a domain from which on they are kept in order."""


class Pace:
    """The times of ranks alike in profile and, to about 10 %, in learned speed; one object for all of them."""

    __slots__ = ("factor", "is_plain", "profile", "speed_class")

    def __init__(self, profile: Profile, speed_class: int) -> None:
        self.profile = profile
        self.speed_class = speed_class
        self.factor = class_factor(speed_class)
        # Whether nothing but its load stands in a request's way, so that the least loaded rank is the best.
        self.is_plain = not profile.steps_together and profile.kv_capacity_tokens is None and profile.max_batch is None

    def prefill_s(self, uncached_tokens: float, past_tokens: float) -> float:
        """Return the time to read a prompt."""
        return self.factor * prefill_s(self.profile, uncached_tokens, past_tokens)

    def step_s(self, share_s: float, kv_tokens: float) -> float:
        """Return a step's time where ranks have such a load, once a request with so much KV has joined."""
        p = self.profile
        return self.factor * (p.step_base_s + share_s + p.step_request_s + p.step_kv_token_s * kv_tokens)


class Tier:
    """The ranks of a pool that have one pace, by their key; without any it isn't kept."""

    __slots__ = ("heap", "pace")

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.heap: ChangingHeap[Worker] = ChangingHeap()


class Kind(NamedTuple):
    """The fastest paces of a pool on both sides: what its ranks take at least."""

    readers: tuple[Pace, ...]
    writers: tuple[Pace, ...]


class Worker:
    """One rank as a place of work.

    ``free_at_s``: when what is queued on it will have been read. ``legs``: the prompts that are, the one that is being
    read first, and how many tokens of each are cached; ``queued_s``: the time that all of them take, ``busy_since_s``:
    when it began with the first, both by its site's clock. ``share_s``: what its requests and their KV add to a step,
    at the speed of its profile. Only one that ``is_ready`` stands in heaps.
    """

    __slots__ = (
        "busy_since_s",
        "decode",
        "decode_tier",
        "free_at_s",
        "is_ready",
        "legs",
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
        self.legs: dict[Reservation, int] = {}
        self.queued_s = 0.0
        self.busy_since_s = 0.0
        self.share_s = 0.0
        self.is_ready = False
        self.prefill: Entry[Worker] | None = None
        self.decode: Entry[Worker] | None = None
        self.prefill_tier: Tier | None = None
        self.decode_tier: Tier | None = None


class Holding(NamedTuple):
    """The ranks of one pool that have a name which others of their base model don't, by what they do."""

    pool: "Pool"
    readers: Sequence[Worker]
    writers: Sequence[Worker]


class Site:
    """One endpoint as a place of work: its profile, what was learned of its speed, its ranks.

    ``has_prefill`` and ``has_decode`` say which heaps its ranks stand in: both for a regular one. ``together`` is the
    clock of ranks that read in step, ``None`` where each reads for itself.
    """

    __slots__ = (
        "domain",
        "endpoint",
        "has_decode",
        "has_prefill",
        "load",
        "peers",
        "pool",
        "profile",
        "speed",
        "together",
        "workers",
    )

    def __init__(self, load: EndpointLoad, pool: "Pool", domain: "Domain", profile: Profile, peers: Peers) -> None:
        self.endpoint: Endpoint = load.endpoint
        self.load = load
        self.pool = pool
        self.domain = domain
        self.profile = profile
        self.peers = peers
        self.speed = Speed(profile, peers)
        self.workers = [Worker(self, rank) for rank in load.ranks]
        self.has_prefill = load.endpoint.role is not Role.DECODE
        self.has_decode = load.endpoint.role is not Role.PREFILL
        self.together = Together(profile) if profile.steps_together and profile.prefill_token_s else None

    def inherit(self, known: "Site", now_s: float) -> None:
        """Go on where an earlier description of the endpoint stood: what is queued stays, and what was learned."""
        if known.profile == self.profile:
            self.speed = known.speed
        if self.together is not None and known.together is not None and self.together.token_s == known.together.token_s:
            self.together = known.together
        for worker, before in zip(self.workers, known.workers, strict=False):
            worker.legs = before.legs
            worker.queued_s = before.queued_s
            worker.busy_since_s = before.busy_since_s
            if known.together is not self.together:
                self._begin_anew(worker, now_s)

    def _begin_anew(self, worker: Worker, now_s: float) -> None:
        """Tell what is queued on a rank by this clock instead of another."""
        for leg, cached_tokens in worker.legs.items():
            leg.prefill_s = self.reading_s(leg.held_tokens - cached_tokens, cached_tokens)
        worker.queued_s = sum(leg.prefill_s for leg in worker.legs)
        worker.busy_since_s = self.clock_s(now_s)

    def clock_s(self, now_s: float) -> float:
        """Return the moment by its clock."""
        return now_s if self.together is None else self.together.clock_s(now_s)

    def reading_s(self, uncached_tokens: int, past_tokens: int) -> float:
        """Return the time to read a prompt, by its clock."""
        if self.together is not None:
            return self.together.token_s * uncached_tokens
        return self.speed.prefill_factor * prefill_s(self.profile, uncached_tokens, past_tokens)

    def keep_step(self, together: Together, now_s: float) -> bool:
        """See which of the prompts that are being read is the deepest, as all wait for it; say if the pace is new."""
        clock_s, deepest = together.clock_s(now_s), 0.0
        for worker in self.workers:
            for leg, cached_tokens in worker.legs.items():
                read_s = min(leg.prefill_s, clock_s - worker.busy_since_s)
                deepest = max(deepest, cached_tokens + read_s / together.token_s)
                break
        return together.keep_step(deepest, self.speed.together_factor)

    def slowest_share_s(self) -> float:
        """Return the largest share of its ranks: where they step together, all wait for it."""
        return max(worker.share_s for worker in self.workers)


class Pool:
    """Ranks that may work on one request together: one model, engine, KV transport and group.

    ``free_s``: when its first rank is free; ``share_s``: the least part of a step that the load of one of its ranks
    takes. Both are infinite where it has no such rank, and not kept while there is no other pool to compare it with.
    """

    __slots__ = ("by_free", "by_share", "decode", "free_s", "key", "kind", "prefill", "share_s", "sites")

    def __init__(self, key: PoolKey, domain: "Domain") -> None:
        self.key = key
        self.sites: dict[str, Site] = {}
        self.prefill: dict[Pace, Tier] = {}
        self.decode: dict[Pace, Tier] = {}
        self.free_s = _NEVER
        self.share_s = _NEVER
        self.by_free = domain.by_free.put(_NEVER, self)
        self.by_share = domain.by_share.put(_NEVER, self)
        self.kind = Kind((), ())

    def first_free_s(self) -> float | None:
        """Return the earliest moment at which one of its ranks is free; ``None`` where there is none."""
        return min([tier.heap.top().key for tier in self.prefill.values()], default=None)

    def least_share_s(self) -> float | None:
        """Return the least part of a step that one of its ranks' load takes; ``None`` where there is none."""
        return min([tier.pace.factor * tier.heap.top().key for tier in self.decode.values()], default=None)


class Domain:
    """The pools of one model and kind (pairs, or regular endpoints): by the least of their ranks' keys, and by paces.

    A pool that is alone isn't ranked.
    """

    __slots__ = ("by_free", "by_share", "key", "kinds", "pools")

    def __init__(self, key: "DomainKey") -> None:
        self.key = key
        self.pools: dict[PoolKey, Pool] = {}
        self.by_free: ChangingHeap[Pool] = ChangingHeap()
        self.by_share: ChangingHeap[Pool] = ChangingHeap()
        self.kinds: dict[Kind, dict[Pool, None]] = {}

    def pool(self, key: PoolKey) -> Pool:
        """Return a pool, a new one if there is none."""
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = Pool(key, self)
            self.kinds.setdefault(pool.kind, {})[pool] = None
            for other in self.pools.values() if len(self.pools) == _FEWEST_RANKED else ():
                self.rank_by_free(other)
                self.rank_by_share(other)
        return pool

    def forget(self, pool: Pool) -> None:
        """Let a pool go that has no ranks any more."""
        del self.pools[pool.key]
        self.by_free.drop(pool.by_free)
        self.by_share.drop(pool.by_share)
        self._leave_kind(pool)

    def sort_in(self, pool: Pool) -> None:
        """See which paces a pool's ranks have now."""
        kind = Kind(_fastest(pool.prefill), _fastest(pool.decode))
        if kind != pool.kind:
            self._leave_kind(pool)
            pool.kind = kind
            self.kinds.setdefault(kind, {})[pool] = None

    def rank_by_free(self, pool: Pool) -> None:
        """See when the first rank of a pool is free now."""
        if len(self.pools) >= _FEWEST_RANKED:
            first_s = pool.first_free_s()
            free_s = _NEVER if first_s is None else first_s
            if free_s != pool.free_s:
                pool.free_s = free_s
                self.by_free.move(pool.by_free, free_s)

    def rank_by_share(self, pool: Pool) -> None:
        """See what the least loaded rank of a pool carries now."""
        if len(self.pools) >= _FEWEST_RANKED:
            least_s = pool.least_share_s()
            share_s = _NEVER if least_s is None else least_s
            if share_s != pool.share_s:
                pool.share_s = share_s
                self.by_share.move(pool.by_share, share_s)

    def _leave_kind(self, pool: Pool) -> None:
        alike = self.kinds[pool.kind]
        del alike[pool]
        if not alike:
            del self.kinds[pool.kind]


def _fastest(paces: Iterable[Pace]) -> tuple[Pace, ...]:
    """Return the fastest pace of each profile."""
    fastest = {pace.profile: pace for pace in sorted(paces, key=attrgetter("speed_class"), reverse=True)}
    return tuple(fastest.values())
