"""``minimum_tokens``: the rank with the least tokens; ties take turns.

Grew from the SGLang router's minimum-token choice of a data-parallel rank (sgl-project/sglang #13208). Here a rank's
tokens are its effective load and, for prefill, the part of this prompt that it doesn't hold in its cache; an endpoint
is worth its best rank, so that endpoint and rank are one choice over all ranks. ``minimum_tokens_published.py`` is the
original rule.

Cost: a scan over the ranks of the ready endpoints of one role and model.
"""

from collections.abc import Sequence
from typing import ClassVar, cast

from pdrouter.core.decision import Why
from pdrouter.core.load import EndpointLoad, RankLoad, comparable_tokens
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question, Turns


class MinimumTokens:
    """Fewest tokens once the request is there."""

    name: ClassVar[str] = "minimum_tokens"

    def __init__(self, options: PolicyOptions) -> None:  # noqa: ARG002
        self._turns = Turns()

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the candidate that has the least tokens with this request on it."""
        if isinstance(candidates[0], EndpointLoad):
            tokens = [_least(question, load) for load in cast("Sequence[EndpointLoad]", candidates)]
        else:
            tokens = _tokens(question, cast("Sequence[RankLoad]", candidates))
        index = self._turns.least(question.scope, tokens)
        return Pick(index, Why(self.name, "fewest tokens, less what it holds of this prompt", candidates, tokens))


def _tokens(question: Question, ranks: Sequence[RankLoad]) -> list[float]:
    """Return the tokens on each rank with this request, without the part of the prompt that it need not read.

    The prompt itself would be added to all alike, and is left out.
    """
    tokens, cached = comparable_tokens(ranks), question.cached_tokens
    if cached:
        return [on_rank - cached.get(rank.key, 0) for rank, on_rank in zip(ranks, tokens, strict=True)]
    return tokens


def _least(question: Question, load: EndpointLoad) -> float:
    return min(_tokens(question, load.ranks)) + load.unassigned.tokens / len(load.ranks)
