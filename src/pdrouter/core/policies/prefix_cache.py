"""``prefix_cache``: AIBrix's prefill score of that name: the prefix match, and the share of requests.

    (100 - match %) * 0.1 + requests / max(1, most requests)    lower wins; above mean + sigma deviations: passed over

Source: vllm-project/aibrix, pd_disaggregation.go (e3e10f9). One side alone, without its fast paths: see ``load_aware``
generation 2 for both.

Cost: a scan over the ready endpoints of one role and model (mean and deviation).
"""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question
from pdrouter.core.policies.measures import in_flight, minima
from pdrouter.core.policies.scores import allowed_counts, prefill_scores


class PrefixCache:
    """The least prefill score among those that aren't overloaded; ties by chance."""

    name: ClassVar[str] = "prefix_cache"

    def __init__(self, options: PolicyOptions) -> None:
        self._chance = options.chance
        self._sigma = options.load_aware_sigma

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the candidate with the least score."""
        counts = [float(in_flight(c)) for c in candidates]
        limit = allowed_counts(counts, self._sigma)
        scores = prefill_scores(question, candidates, counts)
        allowed = [i for i, count in enumerate(counts) if count <= limit]
        best = minima([scores[i] for i in allowed])
        index = allowed[best[self._chance.randrange(len(best))]]
        return Pick(index, Why(self.name, "least of unmatched prefix and share of requests", candidates, scores))
