"""``llm_d``: llm-d's endpoint picker as it is when nothing is configured: three scores of [0, 1], each with its weight.

    queue      (longest - waiting) / (longest - shortest), 1 if all are alike   weight 2
    KV         1 - share in use                                                 weight 2
    prefix     matched blocks / blocks                                          weight 3

The greatest sum wins; what is compared is what it lacks of 7, so that the lower value wins. Ties take turns. Queue and
KV are the newest report's, without what was sent since; an endpoint that doesn't tell one scores nothing by it.
Source: llm-d/llm-d-router ebab687, pkg/epp/framework/plugins/scheduling: scorer/queuedepth, scorer/kvcacheutilization,
scorer/prefix, picker/maxscore.

Cost: a scan over the ready endpoints of one role and model.
"""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.load import EndpointLoad
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question, Turns
from pdrouter.core.policies.llm_d_book import LlmDBook
from pdrouter.core.policies.measures import kv_use, waiting_requests

QUEUE_WEIGHT = 2.0
KV_WEIGHT = 2.0
PREFIX_WEIGHT = 3.0


class LlmD:
    """The greatest sum of queue, KV and prefix score."""

    name: ClassVar[str] = "llm_d"

    def __init__(self, options: PolicyOptions) -> None:
        self._book = options.books.of(LlmDBook)
        self._turns = Turns()

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the candidate with the greatest sum."""
        shares = self._book.shares(question.facts)
        queues = queue_scores([waiting_requests(candidate) for candidate in candidates])
        lacking = [
            QUEUE_WEIGHT * (1 - queue)
            + KV_WEIGHT * (1 - _kv_score(candidate))
            + PREFIX_WEIGHT * (1 - shares.get(address_of(candidate), 0.0))
            for candidate, queue in zip(candidates, queues, strict=True)
        ]
        index = self._turns.least(question.scope, lacking)
        return Pick(index, Why(self.name, "least lacking of queue, KV and prefix score", candidates, lacking))


def queue_scores(waiting: Sequence[float | None]) -> list[float]:
    """Return 1 for the shortest queue, 0 for the longest and for those that aren't told."""
    told = [count for count in waiting if count is not None]
    longest, shortest = max(told, default=0.0), min(told, default=0.0)
    spread = longest - shortest
    return [0.0 if count is None else (longest - count) / spread if spread else 1.0 for count in waiting]


def _kv_score(candidate: Candidate) -> float:
    use = kv_use(candidate)
    return 0.0 if use is None else 1 - use


def address_of(candidate: Candidate) -> str:
    """Return the endpoint's address: llm-d knows pods, not ranks."""
    return candidate.key if isinstance(candidate, EndpointLoad) else candidate.key.endpoint
