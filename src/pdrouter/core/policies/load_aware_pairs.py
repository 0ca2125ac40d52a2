"""``load_aware`` generation 2: AIBrix's choice of a pair, as it grew after #1601.

    1. prefill endpoints out of balance: one with the fewest requests; decode: the best of its group
    2. decode endpoints out of balance (requests, throughput, drain): the least; prefill: the best of its group
    3. the group with the least  prefill score / greatest + decode score / greatest

Source: vllm-project/aibrix, pkg/plugins/gateway/algorithms/pd_disaggregation.go (e3e10f9).

Cost: a scan over the ready endpoints of one model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

from pdrouter.core.decision import Why
from pdrouter.core.fleet import Role
from pdrouter.core.load import EndpointLoad, RankLoad
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question
from pdrouter.core.policies.measures import in_flight, minima, ranks_of
from pdrouter.core.policies.pairs import Group, PairPick
from pdrouter.core.policies.scores import (
    allowed_counts,
    decode_scores,
    prefill_scores,
    tells_requests,
    throughput,
)

C = TypeVar("C", bound=EndpointLoad | RankLoad)
_Scores = Mapping[object, float]

PREFILL_SPREAD = 16
"""Requests in flight by which prefill endpoints must differ more, to be out of balance."""

DECODE_SPREAD = 16
"""Requests by which decode endpoints must differ at least, to be out of balance."""

THROUGHPUT_SPREAD = 2048
"""Tokens per second by which decode endpoints must differ more, to be out of balance."""

DRAIN_RATIO = 1.5
"""How many times longer one decode endpoint must take to drain than another, to be out of balance."""

LEAST_DRAIN_PER_S = 0.1
"""A slower drain counts as this."""


class _Order(NamedTuple, Generic[C]):
    """Candidates by one number; the lowest wins."""

    rule: str
    candidates: Sequence[C]
    values: Sequence[float]
    is_notable: bool


class LoadAwarePairs:
    """Prefill imbalance, decode imbalance, then the scores of both sides together; ties by chance."""

    name: ClassVar[str] = "load_aware"

    def __init__(self, options: PolicyOptions) -> None:
        self._chance = options.chance
        self._sigma = options.load_aware_sigma
        self._drains = options.drains

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the best of one side alone."""
        if question.role is Role.DECODE:
            candidate, why = self._best(self._decode_order(candidates, question.now_s))
        else:
            order = _prefill_imbalance(candidates) or _order(candidates, self._prefill_scores(question, candidates))
            candidate, why = self._best(order)
        return Pick(candidates.index(candidate), why)

    def choose_pair(self, question: Question, groups: Sequence[Group]) -> PairPick:
        """Return the best pair of any group."""
        prefills = [load for group in groups for load in group.prefills]
        decodes = [load for group in groups for load in group.decodes]
        prefill_order = _prefill_imbalance(prefills)
        if prefill_order is not None:
            prefill = self._best(prefill_order)
            group = next(g for g in groups if prefill[0] in g.prefills)
            return PairPick(*prefill, *self._best(self._decode_order(group.decodes, question.now_s)))
        decode_order = self._decode_imbalance(decodes, question.now_s)
        if decode_order is not None:
            decode = self._best(decode_order)
            group = next(g for g in groups if decode[0] in g.decodes)
            scores = self._prefill_scores(question, group.prefills)
            return PairPick(*self._best(_order(group.prefills, scores)), *decode)
        return self._best_pair(groups, self._prefill_scores(question, prefills), _by_key(decodes, decode_scores))

    def _best_pair(self, groups: Sequence[Group], prefill_scores_: _Scores, decode_scores_: _Scores) -> PairPick:
        """Return the best pair of the group whose best scores, each as a share of the greatest, have the least sum."""
        orders = [
            (_order(group.prefills, prefill_scores_), _order(group.decodes, decode_scores_))
            for group in groups
            if any(prefill.key in prefill_scores_ for prefill in group.prefills)
        ]
        prefill_shares = _shares([min(prefills.values) for prefills, _ in orders])
        decode_shares = _shares([min(decodes.values) for _, decodes in orders])
        best = minima([p + d for p, d in zip(prefill_shares, decode_shares, strict=True)])
        prefills, decodes = orders[best[self._chance.randrange(len(best))]]
        return PairPick(*self._best(prefills), *self._best(decodes))

    def _best(self, order: _Order[C]) -> tuple[C, Why]:
        best = minima(order.values)
        index = best[self._chance.randrange(len(best))]
        why = Why(self.name, order.rule, order.candidates, order.values, order.is_notable)
        return order.candidates[index], why.with_chosen(index)

    def _prefill_scores(self, question: Question, candidates: Sequence[Candidate]) -> _Scores:
        """Return the scores of those that aren't overloaded."""
        counts = [float(in_flight(c)) for c in candidates]
        limit = allowed_counts(counts, self._sigma)
        scores = prefill_scores(question, candidates, counts)
        return {c.key: score for c, count, score in zip(candidates, counts, scores, strict=True) if count <= limit}

    def _decode_order(self, candidates: Sequence[C], now_s: float) -> _Order[C]:
        return self._decode_imbalance(candidates, now_s) or _order(candidates, _by_key(candidates, decode_scores))

    def _decode_imbalance(self, candidates: Sequence[C], now_s: float) -> _Order[C] | None:
        """Return the order in which decode endpoints are out of balance, by the first of three rules that fires."""
        telling = [c for c in candidates if tells_requests(c)]
        requests = [c.comparable_requests for c in telling]
        if _spread(requests) >= DECODE_SPREAD:
            return _Order("decode imbalance: fewest requests", telling, requests, is_notable=True)
        rates = [(c, rate) for c in candidates if (rate := throughput(c)) is not None]
        if _spread([rate for _, rate in rates]) > THROUGHPUT_SPREAD:
            rule = "decode imbalance: lowest throughput"
            return _Order(rule, [c for c, _ in rates], [rate for _, rate in rates], is_notable=True)
        drains = [self._drains.rate_per_s(ranks_of(c)[0].key.endpoint, now_s) for c in candidates]
        if min(drains) > 0:
            times_s = [
                c.comparable_requests / max(drain, LEAST_DRAIN_PER_S)
                for c, drain in zip(candidates, drains, strict=True)
            ]
            if max(times_s) > DRAIN_RATIO * min(times_s):
                return _Order("decode imbalance: soonest drained", candidates, times_s, is_notable=True)
        return None


def _prefill_imbalance(candidates: Sequence[C]) -> _Order[C] | None:
    counts = [float(in_flight(c)) for c in candidates]
    if _spread(counts) <= PREFILL_SPREAD:
        return None
    return _Order("prefill imbalance: fewest requests in flight", candidates, counts, is_notable=True)


def _order(candidates: Sequence[C], scores: _Scores) -> _Order[C]:
    """Return those candidates that have a score, by it."""
    scored = [c for c in candidates if c.key in scores]
    return _Order("least score", scored, [scores[c.key] for c in scored], is_notable=False)


def _by_key(candidates: Sequence[C], scores: Callable[[Sequence[C]], Sequence[float]]) -> _Scores:
    return dict(zip((c.key for c in candidates), scores(candidates), strict=True))


def _spread(values: Sequence[float]) -> float:
    return max(values, default=0.0) - min(values, default=0.0)


def _shares(values: Sequence[float]) -> list[float]:
    """Return each value as a share of the greatest."""
    most = max(values) or 1.0
    return [value / most for value in values]
