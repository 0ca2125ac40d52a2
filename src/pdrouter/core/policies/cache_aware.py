"""``cache_aware``: the worker that holds enough of the prompt, the least loaded one where load is out of balance.

Load is requests that we have in flight. What workers hold is told by the prefix index, which is bounded for all
policies together; so the text trees that the SGLang router keeps for each worker aren't there.
Source: the SGLang router's policy of that name (0.3.2).

Cost: a scan over the ready endpoints of one role and model.
"""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question, Turns
from pdrouter.core.policies.measures import held_share, in_flight


class CacheAware:
    """Imbalance first, then a match above the threshold, then the fewest requests; ties take turns."""

    name: ClassVar[str] = "cache_aware"

    def __init__(self, options: PolicyOptions) -> None:
        self._threshold = options.ancestors.cache_threshold
        self._absolute = options.ancestors.balance_abs_threshold
        self._relative = options.ancestors.balance_rel_threshold
        self._turns = Turns()

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the candidate that the three rules choose, in their order."""
        counts = [float(in_flight(c)) for c in candidates]
        least, most = min(counts), max(counts)
        if most - least > self._absolute and most > self._relative * least:
            return self._fewest(question, "imbalance: fewest requests in flight", candidates, counts, is_notable=True)
        shares = [held_share(question, c) for c in candidates]
        best = max(shares)
        if best > self._threshold:
            holders = [i for i, share in enumerate(shares) if share == best]
            index = holders[self._turns.least(question.scope, [counts[i] for i in holders])]
            return Pick(index, Why(self.name, f"holds {best:.0%} of the prompt", candidates, counts))
        return self._fewest(question, "no match above the threshold: fewest requests in flight", candidates, counts)

    def _fewest(
        self,
        question: Question,
        rule: str,
        candidates: Sequence[Candidate],
        counts: Sequence[float],
        *,
        is_notable: bool = False,
    ) -> Pick:
        index = self._turns.least(question.scope, counts)
        return Pick(index, Why(self.name, rule, candidates, counts, is_notable))
