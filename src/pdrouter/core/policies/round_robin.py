"""``round_robin``: each candidate in turn."""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question, Turns


class RoundRobin:
    """Turns within each scope."""

    name: ClassVar[str] = "round_robin"

    def __init__(self, options: PolicyOptions) -> None:  # noqa: ARG002
        self._turns = Turns()
        self._why = Why(self.name, "its turn")

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the next candidate."""
        return Pick(self._turns.take(question.scope, len(candidates)), self._why)
