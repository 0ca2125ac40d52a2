"""``power_of_two``: the better of two drawn at random.

Units are never mixed: the tokens of the newest reports are compared if both have one that tells them, else the requests
that we hold on both. What was sent since a report is not in it: it is as old as it is.
Source: the SGLang router's policy of that name (0.3.2).
"""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question
from pdrouter.core.policies.measures import in_flight, reported_tokens


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
        unit, values = "reported tokens", [tokens for c in drawn if (tokens := reported_tokens(c)) is not None]
        is_known = len(values) == len(drawn)
        if not is_known:
            unit, values = "requests in flight", [float(in_flight(c)) for c in drawn]
        index = first if values[0] <= values[1] else second
        return Pick(index, Why(self.name, f"fewer {unit} of two", drawn, values, not is_known))
