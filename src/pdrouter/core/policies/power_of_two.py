"""``power_of_two``: the better of two drawn at random.

Units are never mixed: tokens are compared only if both have a fresh report, else the requests in flight of both.
Source: the SGLang router's policy of that name (0.3.2).
"""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.load import EndpointLoad
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question
from pdrouter.core.policies.measures import in_flight


class PowerOfTwo:
    """Two distinct candidates at random, the less loaded one wins."""

    name: ClassVar[str] = "power_of_two"

    def __init__(self, options: PolicyOptions) -> None:
        self._chance = options.chance

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:  # noqa: ARG002
        """Return the better of two."""
        if len(candidates) == 1:
            return Pick(0, Why(self.name, "the only one"))
        first = self._chance.randrange(len(candidates))
        second = self._chance.randrange(len(candidates) - 1)
        second += second >= first
        drawn = [candidates[first], candidates[second]]
        is_known = all(_is_reported(c) for c in drawn)
        if is_known:
            unit, values = "tokens", [c.comparable_tokens for c in drawn]
        else:
            unit, values = "requests in flight", [float(in_flight(c)) for c in drawn]
        index = first if values[0] <= values[1] else second
        return Pick(index, Why(self.name, f"fewer {unit} of two", drawn, values, not is_known))


def _is_reported(candidate: Candidate) -> bool:
    return candidate.is_reported if isinstance(candidate, EndpointLoad) else candidate.report is not None
