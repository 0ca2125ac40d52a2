"""``least_request``: the candidate with the fewest requests; ties take turns."""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question, Turns


class LeastRequest:
    """Fewest requests."""

    name: ClassVar[str] = "least_request"

    def __init__(self, options: PolicyOptions) -> None:  # noqa: ARG002
        self._turns = Turns()

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the least loaded candidate."""
        counts = [c.comparable_requests for c in candidates]
        index = self._turns.least(question.scope, counts)
        return Pick(index, Why(self.name, "fewest requests", candidates, counts))
