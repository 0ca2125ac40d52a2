"""Chooses endpoints and ranks for a request; reserves nothing, so that a second chooser may look on (``shadow.py``).

It reads fleet and load; all that it changes is whose turn it is in its own policies. Read next: ``policies/base.py``.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from pdrouter.core.decision import Why
from pdrouter.core.fleet import Endpoint, Fleet, Role
from pdrouter.core.ledger import UNASSIGNED, RankKey
from pdrouter.core.load import EndpointLoad, LoadView
from pdrouter.core.policies import ENGINE, RANK_POLICIES, pair_policy
from pdrouter.core.policies.base import Policy, PolicyOptions, Question
from pdrouter.core.policies.least_work import LeastWork, Offer, PairOffer
from pdrouter.core.policies.pairs import PairPick, grouped
from pdrouter.errors import InvalidRank

PolicyTable = Mapping[str, Callable[[PolicyOptions], Policy]]
"""What makes a policy, by its name."""

_ONLY_ENDPOINT = Why("single", "the only endpoint")
_ONLY_RANK = Why("single", "the only rank")
_CLIENTS_RANK = Why("client", "the client's own rank")
_WITH_THE_ENDPOINT = Why(LeastWork.name, "chosen with the endpoint")
_ENGINES_RANK = Why(ENGINE, "left to the engine")


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
        self._loads = load.endpoints
        self._policies: dict[Role, Policy] = {role: table[name](made) for role, name in names.items()}
        self._rank_policies: dict[Role, Policy] = (
            {} if rank_policy == ENGINE else {role: RANK_POLICIES[rank_policy](made) for role in Role}
        )
        self._pair_policy = pair_policy({names[Role.PREFILL], names[Role.DECODE]}, made)
        # The search for a pair takes endpoint and rank of both sides at once.
        least = LeastWork(made)
        has_ranks = rank_policy == LeastWork.name
        is_least = {role for role, name in names.items() if name == LeastWork.name and has_ranks}
        self._pair_search = least if {Role.PREFILL, Role.DECODE} <= is_least else None
        self._regular_search = least if Role.REGULAR in is_least else None

    def choose(self, question: Question, model: str | None) -> Choice:
        """Return where a request is to run; the question's role says whether a pair or a regular endpoint is ready.

        Raises: InvalidRank.
        """
        facts = question.facts
        is_free = facts.prefill_rank is None and facts.decode_rank is None
        if question.role is Role.PREFILL:
            offer = self._pair_search.choose_pair(question, model) if self._pair_search and is_free else None
            choice = self._pair(question, model, is_free=is_free) if offer is None else _offered(question, offer)
        else:
            offer = self._regular_search.choose_regular(question, model) if self._regular_search and is_free else None
            choice = self._regular(question, model) if offer is None else _offered(question, offer)
        decode = choice.decode.load.endpoint
        self._fleet.check_pair(decode if choice.prefill is None else choice.prefill.load.endpoint, decode)  # I6
        return choice

    def _pair(self, question: Question, model: str | None, *, is_free: bool) -> Choice:
        facts, cached = question.facts, question.cached_tokens
        prefills = self._with_rank(self._prefills(question, model), facts.prefill_rank, Role.PREFILL)
        pair = self._both(question, prefills, model) if is_free else None
        prefill, prefill_why = pair[:2] if pair else self._endpoint(question, prefills)
        prefill_rank, prefill_rank_why = self._rank(question, prefill, facts.prefill_rank)

        scope = (Role.DECODE, model or "", prefill.endpoint.group)
        tokens, output_tokens, now_s = question.prompt_tokens, question.output_tokens, question.now_s
        question = Question(scope, Role.DECODE, tokens, {}, output_tokens, now_s, facts)
        decodes = self._with_rank(self._fleet.partners(prefill.endpoint, model), facts.decode_rank, Role.DECODE)
        decode, decode_why = pair[2:] if pair else self._endpoint(question, decodes)
        decode_rank, decode_rank_why = self._rank(question, decode, facts.decode_rank)

        held = cached.get(_key(prefill, prefill_rank), 0)
        return Choice(
            Spot(prefill, prefill_rank, prefill_why, prefill_rank_why, held),
            Spot(decode, decode_rank, decode_why, decode_rank_why, 0),
            held,
        )

    def _prefills(self, question: Question, model: str | None) -> Sequence[Endpoint]:
        """Return those that may read the prompt: with a partner that has the decode rank asked for, if any does."""
        ready, rank = self._fleet.ready(Role.PREFILL, model), question.facts.decode_rank
        if rank is None:
            return ready
        return [p for p in ready if any(rank < d.dp_size for d in self._fleet.partners(p, model))] or ready

    def _regular(self, question: Question, model: str | None) -> Choice:
        facts, cached = question.facts, question.cached_tokens
        rank_wanted = facts.decode_rank if facts.decode_rank is not None else facts.prefill_rank
        workers = self._with_rank(self._fleet.ready(Role.REGULAR, model), rank_wanted, Role.REGULAR)
        worker, why = self._endpoint(question, workers)
        if any(e.role is not Role.REGULAR for e in self._fleet):
            rule = f"no ready pair, a regular endpoint serves: {why.rule}"
            why = msgspec.structs.replace(why, rule=rule, is_notable=True)
        rank, rank_why = self._rank(question, worker, rank_wanted)
        return Choice(None, Spot(worker, rank, why, rank_why, 0), cached.get(_key(worker, rank), 0))

    def _both(self, question: Question, prefills: Sequence[EndpointLoad], model: str | None) -> PairPick | None:
        """Return both endpoints where one policy chooses them together."""
        if self._pair_policy is None:
            return None
        loads = self._loads
        groups = grouped(prefills, lambda p: [loads[d.address] for d in self._fleet.partners(p.endpoint, model)])
        return self._pair_policy.choose_pair(question, groups)

    def _endpoint(self, question: Question, candidates: Sequence[EndpointLoad]) -> tuple[EndpointLoad, Why]:
        if len(candidates) == 1:
            return candidates[0], _ONLY_ENDPOINT
        pick = self._policies[question.role].choose(question, candidates)
        return candidates[pick.index], pick.why.with_chosen(pick.index)

    def _rank(self, question: Question, load: EndpointLoad, wanted: int | None) -> tuple[int | None, Why]:
        if wanted is not None:
            return wanted, _CLIENTS_RANK
        if len(load.ranks) == 1:
            return 0, _ONLY_RANK
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
        pick = policy.choose(scoped, load.ranks)
        return pick.index, pick.why.with_chosen(pick.index)

    def _with_rank(self, pool: Sequence[Endpoint], rank: int | None, role: Role) -> list[EndpointLoad]:
        loads = self._loads
        if rank is None:
            return [loads[e.address] for e in pool]
        having = [loads[e.address] for e in pool if 0 <= rank < e.dp_size]
        if not having:
            largest = max(e.dp_size for e in pool)
            raise InvalidRank(f"data-parallel rank {rank} isn't there: {role} endpoints have 0 to {largest - 1}")
        return having


def _offered(question: Question, offer: PairOffer) -> Choice:
    """Return what the search for the least work has found."""
    if offer.prefill is None:
        held = question.cached_tokens.get(offer.decode.worker.load.key, 0)
        return Choice(None, _spot(offer.decode, held), held)
    held = question.cached_tokens.get(offer.prefill.worker.load.key, 0)
    return Choice(_spot(offer.prefill, held), _spot(offer.decode, 0), held)


def _spot(offer: Offer, cached_tokens: int) -> Spot:
    worker = offer.worker
    key = worker.load.key
    why = Why(LeastWork.name, "least predicted seconds", (), (offer.cost_s,), False, 0, (key,))
    return Spot(worker.site.load, key.rank, why, _WITH_THE_ENDPOINT, cached_tokens)


def _key(load: EndpointLoad, rank: int | None) -> RankKey:
    return RankKey(load.key, UNASSIGNED if rank is None else rank)
