"""``load_aware``: AIBrix's load-aware choice of prefill and decode endpoints, as published.

Source: vllm-project/aibrix #1601, for RFC #1600. Requests are counted, not tokens. What the publication counted on the
decode side only is counted here on the endpoint that does the work. Generation 2
is ``load_aware_pairs.py``.

Cost: a scan over the ready endpoints of one role and model (mean and deviation).
"""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.fleet import Role
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question
from pdrouter.core.policies.measures import held_tokens, minima
from pdrouter.core.policies.scores import allowed_counts


class LoadAware:
    """Imbalance first, then the best prefix match that isn't overloaded, then any; decode: fewest requests."""

    name: ClassVar[str] = "load_aware"

    def __init__(self, options: PolicyOptions) -> None:
        self._chance = options.chance
        self._spread = options.load_aware_spread_requests
        self._sigma = options.load_aware_sigma

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the endpoint that the published rules choose."""
        counts = [c.comparable_requests for c in candidates]
        if question.role is Role.DECODE:
            return self._one_of(minima(counts), "fewest running requests", candidates, counts)
        if max(counts) - min(counts) > self._spread:
            rule = "prefill imbalance: fewest running requests"
            return self._one_of(minima(counts), rule, candidates, counts, is_notable=True)
        matched = [held_tokens(question, c) for c in candidates]
        if any(matched):
            index = self._best_match(matched, counts)
            if index is not None:
                return Pick(index, Why(self.name, "longest prefix match", candidates, counts))
        everybody = range(len(counts))
        if not any(matched):
            return self._one_of(everybody, "no prefix match: uniform choice", candidates, counts)
        rule = "every prefix match overloaded: uniform choice"
        return self._one_of(everybody, rule, candidates, counts, is_notable=True)

    def _best_match(self, matched: Sequence[int], counts: Sequence[float]) -> int | None:
        """Return the best match with at most mean + sigma * (sample) deviation requests."""
        limit = allowed_counts(counts, self._sigma)
        allowed = [i for i, count in enumerate(counts) if matched[i] and count <= limit]
        best = min(((-matched[i], counts[i]) for i in allowed), default=None)
        ties = [i for i in allowed if (-matched[i], counts[i]) == best]
        return ties[self._chance.randrange(len(ties))] if ties else None

    def _one_of(
        self,
        indexes: Sequence[int],
        rule: str,
        candidates: Sequence[Candidate],
        counts: Sequence[float],
        *,
        is_notable: bool = False,
    ) -> Pick:
        index = indexes[self._chance.randrange(len(indexes))]
        return Pick(index, Why(self.name, rule, candidates, counts, is_notable))
