"""``random``: any candidate, all alike."""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question


class RandomChoice:
    """Uniform choice."""

    name: ClassVar[str] = "random"

    def __init__(self, options: PolicyOptions) -> None:
        self._chance = options.chance
        self._why = Why(self.name, "uniform choice")

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:  # noqa: ARG002
        """Return any candidate."""
        return Pick(self._chance.randrange(len(candidates)), self._why)
