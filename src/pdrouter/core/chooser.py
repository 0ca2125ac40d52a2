"""Chooses endpoints and ranks for a request; reserves nothing, so that a second chooser may look on (``shadow.py``).

It reads fleet and load; all that it changes is whose turn it is in its own policies. Read next: ``policies/base.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter

import msgspec

from pdrouter.core.decision import Why
from pdrouter.core.fleet import ROLE_OF, Endpoint, Fleet, Role, Way
from pdrouter.core.ledger import UNASSIGNED, RankKey
from pdrouter.core.load import EndpointLoad, LoadView
from pdrouter.core.policies import ENGINE, RANK_POLICIES, pair_policy
from pdrouter.core.policies.base import Policy, PolicyOptions, Question
from pdrouter.core.policies.least_work import AVOIDED_S, LeastWork, Offer, PairOffer
from pdrouter.core.policies.pairs import PairPick, grouped
from pdrouter.core.reasons import why_no_rank
from pdrouter.core.request import PAIRED, Task
from pdrouter.errors import InvalidRank, NoReadyPair

_COST_S = attrgetter("cost_s")

PolicyTable = Mapping[str, Callable[[PolicyOptions], Policy]]
"""What makes a policy, by its name."""

_ONLY_ENDPOINT = Why("single", "the only endpoint")
_ONLY_RANK = Why("single", "the only rank")
_ONLY_READY_RANK = Why("single", "the only rank that is ready")
_CLIENTS_RANK = Why("client", "the client's own rank")
_WITH_THE_ENDPOINT = Why(LeastWork.name, "chosen with the endpoint")
_ENGINES_RANK = Why(ENGINE, "left to the engine")

_LEAST = "least predicted seconds"
_AGAIN = "least predicted seconds, though it failed there: no other is ready"


class Spot(msgspec.Struct, frozen=True, gc=False):
    """Where a leg is to run, and why; ``cached_tokens`` of the prompt needn't be read there."""

    load: EndpointLoad
    rank: int | None
    endpoint_why: Why
    rank_why: Why
    cached_tokens: int


class Choice(msgspec.Struct, frozen=True, gc=False):
    """Where a request is to run; ``prefill`` is ``None`` where one endpoint does both."""

    prefill: Spot | None
    decode: Spot
    prefix_tokens: int

    @property
    def spots(self) -> tuple[Spot, ...]:
        """The legs' places in the order in which the request passes them."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class Chooser:
    """The policies of both sides and of ranks, over one fleet and its load."""

    def __init__(
        self,
        fleet: Fleet,
        load: LoadView,
        names: Mapping[Role, str],
        rank_policy: str,
        table: PolicyTable,
        made: PolicyOptions,
    ) -> None:
        self._fleet = fleet
        self._loads = load.usable
        self._whole = load.endpoints
        self._policies: dict[Role, Policy] = {role: table[name](made) for role, name in names.items()}
        self._rank_policies: dict[Role, Policy] = (
            {} if rank_policy == ENGINE else {role: RANK_POLICIES[rank_policy](made) for role in Role}
        )
        self._pair_policy = pair_policy({names[Role.PREFILL], names[Role.DECODE]}, made)
        # The search for a pair takes endpoint and rank of both sides at once.
        least = LeastWork(made)
        has_ranks = rank_policy == LeastWork.name
        is_least = {role for role, name in names.items() if name == LeastWork.name and has_ranks}
        self._searches: dict[Way, Callable[[Question, str | None], PairOffer | None]] = {}
        if {Role.PREFILL, Role.DECODE} <= is_least:
            self._searches |= {Way.PAIR: least.choose_pair, Way.DECODE: least.choose_decode}
        if Role.REGULAR in is_least:
            self._searches[Way.REGULAR] = least.choose_regular

    def choose(self, question: Question, model: str | None, ways: Sequence[Way]) -> Choice:
        """Return where a request is to run; ``ways`` are those that are open, the question's role that of the first.

        Of several ways ``least_work`` takes the fastest, other policies the first.
        Raises: InvalidRank; NoReadyPair if the client's own rank is out.
        """
        facts = question.facts
        # The search looks at all endpoints; not all can count.
        is_free = facts.prefill_rank is None and facts.decode_rank is None and facts.task is not Task.COUNT
        offers = self._offers(question, model, ways) if is_free else ()
        choice = _offered(question, offers) if offers else self._by_policies(question, model, ways)
        decode = choice.decode.load.endpoint
        prefill = decode if choice.prefill is None else choice.prefill.load.endpoint
        self._fleet.check_pair(prefill, decode, model)  # I6
        if self._fleet.ranks_out:
            for spot in choice.spots:
                self._fleet.check_rank(_key(spot.load, spot.rank))
        return choice

    def _offers(self, question: Question, model: str | None, ways: Sequence[Way]) -> Sequence[PairOffer]:
        """Return the best of each way that the search for the least work finds; none where it isn't to search."""
        offers = []
        for way in ways:
            search = self._searches.get(way)
            if search is None:
                return ()
            offer = search(question, model)
            if offer is not None:
                offers.append(offer)
        return offers

    def _by_policies(self, question: Question, model: str | None, ways: Sequence[Way]) -> Choice:
        """Return what the policies choose in the first way; in another if only there no failed rank is repeated."""
        choice = self._in_way(question, model, ways[0])
        for way in ways[1:]:
            if not _repeats(question, choice):  # I8
                break
            asked = msgspec.structs.replace(question, role=ROLE_OF[way], scope=(ROLE_OF[way], model or ""))
            with suppress(InvalidRank, NoReadyPair):
                choice = min(choice, self._in_way(asked, model, way), key=partial(_repeats, question))
        return choice

    def _in_way(self, question: Question, model: str | None, way: Way) -> Choice:
        return self._pair(question, model) if way is Way.PAIR else self._alone(question, model)

    def _pair(self, question: Question, model: str | None) -> Choice:
        facts, cached = question.facts, question.cached_tokens
        prefills = self._with_rank(self._prefills(question, model), facts.prefill_rank, Role.PREFILL)
        if question.avoid:
            prefills = self._least_repeating(question, prefills, model)
        pair = (
            self._both(question, prefills, model) if facts.prefill_rank is None and facts.decode_rank is None else None
        )
        prefill, prefill_why = pair[:2] if pair else self._endpoint(question, prefills)
        prefill_rank, prefill_rank_why = self._rank(question, prefill, facts.prefill_rank)

        scope = (Role.DECODE, model or "", prefill.endpoint.group)
        tokens, output_tokens, now_s = question.prompt_tokens, question.output_tokens, question.now_s
        question = Question(scope, Role.DECODE, tokens, {}, output_tokens, now_s, facts, question.avoid)
        decodes = self._with_rank(self._fleet.partners(prefill.endpoint, model), facts.decode_rank, Role.DECODE)
        decodes = _allowed(question, decodes, facts.decode_rank)
        decode, decode_why = pair[2:] if pair else self._endpoint(question, decodes)
        decode_rank, decode_rank_why = self._rank(question, decode, facts.decode_rank)

        held = cached.get(_key(prefill, prefill_rank), 0)
        return Choice(
            Spot(self._whole[prefill.key], prefill_rank, prefill_why, prefill_rank_why, held),
            Spot(self._whole[decode.key], decode_rank, decode_why, decode_rank_why, 0),
            held,
        )

    def _prefills(self, question: Question, model: str | None) -> Sequence[Endpoint]:
        """Return those that may read the prompt: with a partner that has the decode rank asked for, if any does."""
        ready, rank = self._fleet.ready(Role.PREFILL, model), question.facts.decode_rank
        if rank is None:
            return ready
        loads = self._loads
        return [p for p in ready if any(_has(loads[d.address], rank) for d in self._fleet.partners(p, model))] or ready

    def _alone(self, question: Question, model: str | None) -> Choice:
        """Return one endpoint of the question's role that does it all."""
        facts, cached, role = question.facts, question.cached_tokens, question.role
        rank_wanted = facts.decode_rank if facts.decode_rank is not None else facts.prefill_rank
        workers = self._with_rank(self._fleet.able(role, model, facts.task), rank_wanted, role)
        workers = _allowed(question, workers, rank_wanted)
        worker, why = self._endpoint(question, workers)
        if facts.task in PAIRED and any(e.role is not Role.REGULAR for e in self._fleet):
            lacking = "can't be parted" if self._fleet.ready(Role.PREFILL, model) else "no ready pair"
            rule = f"{lacking}, a {role} endpoint serves: {why.rule}"
            why = msgspec.structs.replace(why, rule=rule, is_notable=True)
        rank, rank_why = self._rank(question, worker, rank_wanted)
        held = cached.get(_key(worker, rank), 0)
        return Choice(None, Spot(self._whole[worker.key], rank, why, rank_why, held), held)

    def _both(self, question: Question, prefills: Sequence[EndpointLoad], model: str | None) -> PairPick | None:
        """Return both endpoints where one policy chooses them together."""
        if self._pair_policy is None:
            return None
        groups = grouped(prefills, lambda p: _allowed(question, self._partners(p, model), None))
        return self._pair_policy.choose_pair(question, groups)

    def _partners(self, prefill: EndpointLoad, model: str | None) -> list[EndpointLoad]:
        return [self._loads[e.address] for e in self._fleet.partners(prefill.endpoint, model)]

    def _least_repeating(
        self, question: Question, prefills: Sequence[EndpointLoad], model: str | None
    ) -> list[EndpointLoad]:
        """Return those with which a pair repeats the fewest failed ranks (I8): their own, and their partners'."""
        mine, theirs = question.facts.prefill_rank, question.facts.decode_rank
        repeated = [
            _is_avoided(question, p, mine)
            + all(
                _is_avoided(question, d, theirs) for d in self._partners(p, model) if theirs is None or _has(d, theirs)
            )
            for p in prefills
        ]
        least = min(repeated)
        return [p for p, count in zip(prefills, repeated, strict=True) if count == least]

    def _endpoint(self, question: Question, candidates: Sequence[EndpointLoad]) -> tuple[EndpointLoad, Why]:
        if len(candidates) == 1:
            return candidates[0], _ONLY_ENDPOINT
        pick = self._policies[question.role].choose(question, candidates)
        return candidates[pick.index], pick.why.with_chosen(pick.index)

    def _rank(self, question: Question, load: EndpointLoad, wanted: int | None) -> tuple[int | None, Why]:
        if wanted is not None:
            return wanted, _CLIENTS_RANK
        if len(load.ranks) == 1:
            return load.ranks[0].key.rank, _ONLY_RANK if load.endpoint.dp_size == 1 else _ONLY_READY_RANK
        policy = self._rank_policies.get(question.role)
        if policy is None:
            return None, _ENGINES_RANK
        scoped = Question(
            (question.role, load.key),
            question.role,
            question.prompt_tokens,
            question.cached_tokens,
            question.output_tokens,
            question.now_s,
            question.facts,
        )
        ranks = load.ranks
        if question.avoid:
            ranks = [rank for rank in ranks if not question.avoids(rank.key)] or ranks
        pick = policy.choose(scoped, ranks)
        return ranks[pick.index].key.rank, pick.why.with_chosen(pick.index)

    def _with_rank(self, pool: Sequence[Endpoint], rank: int | None, role: Role) -> list[EndpointLoad]:
        loads = [self._loads[e.address] for e in pool]
        if rank is None:
            return loads
        having = [e for e in pool if 0 <= rank < e.dp_size]
        if not having:
            largest = max(e.dp_size for e in pool)
            raise InvalidRank(f"data-parallel rank {rank} isn't there: {role} endpoints have 0 to {largest - 1}")
        able = [load for load in loads if _has(load, rank)]
        if not able:
            raise NoReadyPair(why_no_rank(self._fleet, role, having, rank))
        return able


def _allowed(question: Question, candidates: list[EndpointLoad], rank: int | None) -> list[EndpointLoad]:
    """Return those that needn't be avoided; all if there are none (I8)."""
    if not question.avoid:
        return candidates
    return [load for load in candidates if not _is_avoided(question, load, rank)] or candidates


def _has(load: EndpointLoad, rank: int) -> bool:
    """Whether an endpoint has a rank that isn't out."""
    return any(own.key.rank == rank for own in load.ranks)


def _is_avoided(question: Question, load: EndpointLoad, rank: int | None) -> bool:
    """Whether an endpoint can be used only on a rank to avoid; ``rank``: the one that the client wants."""
    if rank is not None:
        return question.avoids(RankKey(load.key, rank))
    return all(question.avoids(own.key) for own in load.ranks)


def _repeats(question: Question, choice: Choice) -> int:
    """Return how many ranks to avoid were chosen."""
    return sum(question.avoids(_key(spot.load, spot.rank)) for spot in choice.spots) if question.avoid else 0


def _offered(question: Question, offers: Sequence[PairOffer]) -> Choice:
    """Return the fastest of what the search for the least work has found."""
    offer = offers[0] if len(offers) == 1 else min(offers, key=_COST_S)
    if offer.prefill is None:
        held = question.cached_tokens.get(offer.decode.worker.load.key, 0)
        spot = _spot(offer.decode, held)
        if len(offers) > 1:
            rule = f"read and answered in one place, {spot.endpoint_why.rule}"
            others = [other for other in offers if other is not offer]
            keys = (*spot.endpoint_why.keys, *("pair" if other.prefill else "another alone" for other in others))
            values = (*spot.endpoint_why.values, *(other.cost_s for other in others))
            why = msgspec.structs.replace(spot.endpoint_why, rule=rule, keys=keys, values=values)
            spot = msgspec.structs.replace(spot, endpoint_why=why)
        return Choice(None, spot, held)
    held = question.cached_tokens.get(offer.prefill.worker.load.key, 0)
    return Choice(_spot(offer.prefill, held), _spot(offer.decode, 0), held)


def _spot(offer: Offer, cached_tokens: int) -> Spot:
    worker, cost_s, rule, is_again = offer.worker, offer.cost_s, _LEAST, offer.cost_s >= AVOIDED_S
    if is_again:
        cost_s, rule = cost_s % AVOIDED_S, _AGAIN
    key = worker.load.key
    why = Why(LeastWork.name, rule, (), (cost_s,), is_again, 0, (key,))
    return Spot(worker.site.load, key.rank, why, _WITH_THE_ENDPOINT, cached_tokens)


def _key(load: EndpointLoad, rank: int | None) -> RankKey:
    return RankKey(load.key, UNASSIGNED if rank is None else rank)
