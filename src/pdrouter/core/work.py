"""What each rank has still to do, in seconds, kept where time doesn't change it; and the ranks in that order.

For prefill the key is the moment at which the rank is free, for decode the load's share of the step time. Both are
brought up to date by what happens to a rank (reserved, prefill done, grown, settled, reported), never by time itself.
Ranks of one pool and one tier of speed stand in one heap, so that what differs between them is the key alone.
Who searches in here: ``policies/least_work.py``.
"""

from collections.abc import Collection, Iterable, Sequence

from pdrouter.core.cost import Profile, queue_s, transfer_s
from pdrouter.core.fleet import Role
from pdrouter.core.heap import Entry
from pdrouter.core.ledger import LegKind, RankKey, Reservation
from pdrouter.core.load import EndpointLoad
from pdrouter.core.names import Names
from pdrouter.core.places import Domain, DomainKey, Holding, Pace, Pool, Site, Tier, Worker
from pdrouter.core.profiles import Profiles
from pdrouter.core.speed import Peers

_TELLING_TOKENS = 16
"""Shortest answer whose pace tells of a rank's steps; chosen."""

_TELLING_PROMPT_TOKENS = 2048
"""Fewest uncached tokens whose time tells of a rank's prefill and not of what stands around it; chosen."""


class WorkIndex:
    """All ranks that are ready, by what they have still to do."""

    def __init__(self, profiles: Profiles, names: Names) -> None:
        self.sites: dict[str, Site] = {}
        self.workers: dict[RankKey, Worker] = {}
        self._profiles = profiles
        self._names = names
        self._holdings: dict[tuple[str, bool], Sequence[Holding]] = {}  # of names that are asked for
        self._domains: dict[DomainKey, Domain] = {}
        self._peers: dict[Profile, Peers] = {}
        self._paces: dict[tuple[Profile, int], Pace] = {}  # no more than profiles times classes of speed (I9)

    def domains(self, model: str | None, *, regular: bool) -> Iterable[Domain]:
        """Return the domains that may serve a model; without one, all."""
        if model is not None:
            domain = self._domains.get((model, regular))
            return () if domain is None else (domain,)
        return [domain for (_, is_regular), domain in self._domains.items() if is_regular is regular]

    def holdings(self, name: str | None, *, regular: bool) -> Sequence[Holding]:
        """Return, by pool, the ranks that have a name which others of their base model don't; none if all have it."""
        if name is None:
            return ()
        found = self._holdings.get((name, regular))
        if found is None:
            found = self._holdings[name, regular] = self._find_holdings(name, regular=regular)
        return found

    def _find_holdings(self, name: str, *, regular: bool) -> Sequence[Holding]:
        pools: dict[Pool, tuple[list[Worker], list[Worker]]] = {}
        for address in self._names.partial_holders(name):
            site = self.sites.get(address)
            if site is not None and (site.endpoint.role is Role.REGULAR) is regular:
                readers, writers = pools.setdefault(site.pool, ([], []))
                readers += site.workers if site.has_prefill else ()
                writers += site.workers if site.has_decode else ()
        return [Holding(pool, *workers) for pool, workers in pools.items()]

    def add(self, load: EndpointLoad, now_s: float) -> None:
        """Take in an endpoint, not ready yet, or its new description; what was learned of its speed stays."""
        endpoint = load.endpoint
        known = self.sites.get(endpoint.address)
        if known is not None:
            self.remove(endpoint.address)
        profile = self._profiles.of(endpoint)
        domain_key = (endpoint.model, endpoint.role is Role.REGULAR)
        domain = self._domains.setdefault(domain_key, Domain(domain_key))
        key = (endpoint.engine, endpoint.kv_transport, endpoint.group)
        pool = domain.pool(key)
        peers = self._peers.setdefault(profile, Peers())
        site = self.sites[endpoint.address] = pool.sites[endpoint.address] = Site(load, pool, domain, profile, peers)
        if known is not None:
            site.inherit(known, now_s)
        for worker in site.workers:
            self.workers[worker.load.key] = worker
        self._holdings.clear()

    def remove(self, address: str) -> None:
        """Forget an endpoint."""
        site = self.sites.pop(address, None)
        if site is None:
            return
        self._holdings.clear()
        self._take_out(site, site.workers)
        for worker in site.workers:
            self.workers.pop(worker.load.key, None)
        del site.pool.sites[address]
        if not site.pool.sites:
            site.domain.forget(site.pool)
        if not site.domain.pools:
            del self._domains[site.domain.key]

    def set_ready(self, address: str, now_s: float, *, is_ready: bool, ranks_out: Collection[int]) -> None:
        """Let an endpoint's ranks be found, but those that are out, or none."""
        site = self.sites.get(address)
        if site is None:
            return
        for worker in site.workers:
            worker.is_ready = is_ready and worker.load.key.rank not in ranks_out
        self._take_out(site, [worker for worker in site.workers if not worker.is_ready])
        for worker in site.workers:
            self._project(worker, now_s)

    # What happens to a rank; nothing where its endpoint isn't kept here.

    def reserved(self, leg: Reservation, cached_tokens: int, now_s: float) -> None:
        """A leg was put on a rank."""
        worker = self.workers[leg.account.key]
        if leg.kind is not LegKind.DECODE:
            site = worker.site
            leg.prefill_s = site.reading_s(leg.held_tokens - cached_tokens, cached_tokens)
            if not worker.legs:
                worker.busy_since_s = site.clock_s(now_s)
            worker.legs[leg] = cached_tokens
            worker.queued_s += leg.prefill_s
            if site.together is not None:
                self._project_changed(worker, now_s)
                return
            worker.free_at_s = max(max(worker.free_at_s, now_s) + leg.prefill_s, now_s + _behind_s(worker))
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
            self._learn_together(worker, leg, now_s)
            self._take_off(worker, leg, now_s)

    def settled(self, leg: Reservation, now_s: float) -> None:
        """A leg has ended, in whatever way; a prompt that wasn't read needn't be any more."""
        worker = self.workers.get(leg.account.key)
        if worker is None:
            return
        if leg in worker.legs:
            self._take_off(worker, leg, now_s)
        else:
            self._place(worker)

    def reported(self, address: str, now_s: float) -> None:
        """An endpoint has told its load."""
        site = self.sites.get(address)
        if site is None:
            return
        if site.together is not None:
            site.keep_step(site.together, now_s)
        for worker in site.workers:
            self._project(worker, now_s)

    def refreshed(self, key: RankKey, now_s: float) -> None:
        """A rank's report has lost its weight."""
        worker = self.workers.get(key)
        if worker is not None:
            self._project(worker, now_s)

    # What is learned of its speed.

    def prefill_seen(self, leg: Reservation, cached_tokens: int, now_s: float) -> float | None:
        """A first token came; return how long the prompt took if it had the rank to itself."""
        worker = self.workers.get(leg.account.key)
        if worker is None:
            return None
        if worker.site.speed.tells_totals:
            worker.site.speed.saw_prompt(leg.held_tokens - cached_tokens, cached_tokens)
        if not leg.was_alone or worker.load.account.requests != 1 or leg.held_tokens < _TELLING_PROMPT_TOKENS:
            return None
        return now_s - leg.reserved_at_s - transfer_s(worker.site.profile, leg.held_tokens)

    def learn_prefill(self, leg: Reservation, uncached_tokens: int, cached_tokens: int, seconds: float) -> None:
        """A prompt that had the rank to itself took so long; a long one tells of the rank's speed."""
        worker = self.workers.get(leg.account.key)
        if worker is not None and uncached_tokens >= _TELLING_PROMPT_TOKENS:
            classes = worker.site.peers.classes
            worker.site.speed.saw_prefill(uncached_tokens, cached_tokens, seconds)
            self._judge_peers(worker.site.peers, classes)

    def learn_totals(self, address: str, uncached_tokens: float, busy_s: float) -> None:
        """An endpoint has told what its ranks have read in all, and for how long they were busy with it."""
        site = self.sites.get(address)
        if site is not None:
            classes = site.peers.classes
            site.speed.saw_prefill_totals(uncached_tokens, busy_s)
            self._judge_peers(site.peers, classes)

    def learn_steps(self, leg: Reservation, tokens: int, seconds: float) -> None:
        """An answer of so many tokens took so long, under about the load that the rank has now."""
        worker = self.workers.get(leg.account.key)
        if worker is not None and tokens >= _TELLING_TOKENS:
            load, classes = worker.load, worker.site.peers.classes
            worker.site.speed.saw_step(load.comparable_requests, load.comparable_tokens, seconds / (tokens - 1))
            self._judge_peers(worker.site.peers, classes)

    def _learn_together(self, worker: Worker, leg: Reservation, now_s: float) -> None:
        """The first of a rank's prompts was read: a long one tells how far its site's clock is right."""
        together = worker.site.together
        if together is None or next(iter(worker.legs), None) is not leg:
            return
        if leg.prefill_s >= _TELLING_PROMPT_TOKENS * together.token_s:
            worker.site.speed.saw_together(together.clock_s(now_s) - worker.busy_since_s, leg.prefill_s)

    def _judge_peers(self, peers: Peers, classes: tuple[int, int]) -> None:
        """When the class of a profile's endpoints changes, judge all of them anew: O(fleet), and rare."""
        if peers.classes == classes:
            return
        for site in self.sites.values():
            if site.peers is peers:
                site.speed.refresh()
                for worker in site.workers:
                    self._place(worker)

    def _take_off(self, worker: Worker, leg: Reservation, now_s: float) -> None:
        if leg in worker.legs:
            if next(iter(worker.legs)) is leg:
                worker.busy_since_s = worker.site.clock_s(now_s)
            del worker.legs[leg]
            worker.queued_s = max(0.0, worker.queued_s - leg.prefill_s) if worker.legs else 0.0
            leg.prefill_s = 0.0
            if not worker.legs:
                worker.free_at_s = now_s
        self._project_changed(worker, now_s)

    def _project_changed(self, worker: Worker, now_s: float) -> None:
        """Say anew when a rank is free on which something has changed, and its neighbours if they read in step."""
        site = worker.site
        if site.together is not None and site.keep_step(site.together, now_s):
            for other in site.workers:
                if other.legs and other is not worker:
                    self._project(other, now_s)
        self._project(worker, now_s)

    def _project(self, worker: Worker, now_s: float) -> None:
        """Say anew when a rank is free, from what is queued on it: ours, and what a report tells of others'."""
        together = worker.site.together
        free_at_s = worker.busy_since_s if together is None else min(worker.free_at_s, now_s)
        if worker.legs and together is None:
            free_at_s = max(free_at_s + worker.queued_s, now_s + _behind_s(worker))
        elif worker.legs and together is not None:
            left_s = worker.busy_since_s + worker.queued_s - together.clock_s(now_s)
            free_at_s = now_s + together.stretch * max(left_s, _behind_s(worker))
        others_tokens = worker.load.comparable()[0] - worker.load.account.tokens
        if others_tokens > 0 and not worker.site.has_decode:
            others_s = worker.site.speed.prefill_factor * queue_s(worker.site.profile, others_tokens, 1.0)
            free_at_s = max(now_s, free_at_s) + others_s
        worker.free_at_s = free_at_s
        self._place(worker)

    # Places in the heaps.

    def _place(self, worker: Worker) -> None:
        site = worker.site
        if site.has_prefill and worker.is_ready:
            self._place_prefill(worker, site)
        if site.has_decode:
            self._place_decode(worker, site)

    def _place_prefill(self, worker: Worker, site: Site) -> None:
        tier = worker.prefill_tier
        if tier is None or worker.prefill is None or tier.pace.speed_class != site.speed.prefill_class:
            self._leave_prefill(worker, site)
            tier = worker.prefill_tier = self._tier(site, site.pool.prefill, site.speed.prefill_class)
            worker.prefill = tier.heap.put(worker.free_at_s, worker)
            site.domain.sort_in(site.pool)
        else:
            tier.heap.move(worker.prefill, worker.free_at_s)
        site.domain.rank_by_free(site.pool)

    def _place_decode(self, worker: Worker, site: Site) -> None:
        profile = site.profile
        tokens, requests = worker.load.comparable()
        worker.share_s = profile.step_request_s * requests + profile.step_kv_token_s * tokens
        if not worker.is_ready:  # those beside it may step together with it
            return
        tier = worker.decode_tier
        if tier is None or worker.decode is None or tier.pace.speed_class != site.speed.decode_class:
            self._leave_decode(worker, site)
            tier = worker.decode_tier = self._tier(site, site.pool.decode, site.speed.decode_class)
            worker.decode = tier.heap.put(worker.share_s, worker)
            site.domain.sort_in(site.pool)
        else:
            tier.heap.move(worker.decode, worker.share_s)
        site.domain.rank_by_share(site.pool)

    def _tier(self, site: Site, tiers: dict[Pace, Tier], speed_class: int) -> Tier:
        key = (site.profile, speed_class)
        pace = self._paces.get(key)
        if pace is None:
            pace = self._paces[key] = Pace(*key)
        tier = tiers.get(pace)
        if tier is None:
            tier = tiers[pace] = Tier(pace)
        return tier

    def _leave_prefill(self, worker: Worker, site: Site) -> None:
        if worker.prefill is not None and worker.prefill_tier is not None:
            _leave(site.pool.prefill, worker.prefill_tier, worker.prefill)
        worker.prefill = worker.prefill_tier = None

    def _leave_decode(self, worker: Worker, site: Site) -> None:
        if worker.decode is not None and worker.decode_tier is not None:
            _leave(site.pool.decode, worker.decode_tier, worker.decode)
        worker.decode = worker.decode_tier = None

    def _take_out(self, site: Site, workers: Iterable[Worker]) -> None:
        for worker in workers:
            self._leave_prefill(worker, site)
            self._leave_decode(worker, site)
        site.domain.sort_in(site.pool)
        site.domain.rank_by_free(site.pool)
        site.domain.rank_by_share(site.pool)


def _behind_s(worker: Worker) -> float:
    """Return what stands behind the prompt that is being read: none of that is done, however late it is."""
    return worker.queued_s - next(iter(worker.legs)).prefill_s


def _leave(tiers: dict[Pace, Tier], tier: Tier, entry: Entry[Worker]) -> None:
    tier.heap.drop(entry)
    if not len(tier.heap):
        del tiers[tier.pace]
