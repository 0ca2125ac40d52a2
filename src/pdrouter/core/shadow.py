"""A second chooser that looks on: it decides on the same inputs, before the real reservation, and never acts.

It has policies and chance of its own and reserves nothing, so no real decision is different for it. How often it would
have chosen otherwise is counted; what it would have chosen goes to the journal with the decision.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from pdrouter.core.chooser import Choice, Chooser
from pdrouter.core.fleet import Way
from pdrouter.core.policies.base import Question, RandomSource
from pdrouter.errors import FOREIGN_FAULTS


class ShadowOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The policies that look on, and their chance."""

    policy: str
    rank_policy: str
    chance: RandomSource


class Result(StrEnum):
    """How a shadow's choice compares with the real one; ``NONE``: it found no place."""

    SAME = "same"
    OTHER_ENDPOINT = "other_endpoint"
    OTHER_RANK = "other_rank"
    NONE = "none"


class Shadowed(msgspec.Struct, frozen=True, gc=False):
    """What the shadow would have chosen for one request; ``failure`` says why it chose nothing."""

    policy: str
    result: Result
    choice: Choice | None
    failure: str | None


class Shadow:
    """Asks its chooser what the router's was asked, and counts."""

    def __init__(self, policy: str, chooser: Chooser) -> None:
        self._policy = policy
        self._chooser = chooser
        self._counts = dict.fromkeys(Result, 0)

    @property
    def counts(self) -> Mapping[Result, int]:
        """Decisions by result."""
        return self._counts

    def look_on(self, question: Question, model: str | None, ways: Sequence[Way], real: Choice) -> Shadowed:
        """Return what the shadow chooses where ``real`` was chosen."""
        choice, failure = None, None
        try:
            choice = self._chooser.choose(question, model, ways)
        except FOREIGN_FAULTS as error:  # a policy on trial; the request isn't its business
            failure = f"{type(error).__name__}: {error}"
        result = Result.NONE if choice is None else _compared(choice, real)
        self._counts[result] += 1
        return Shadowed(self._policy, result, choice, failure)


def _compared(choice: Choice, real: Choice) -> Result:
    ours, theirs = choice.spots, real.spots
    if [spot.load.key for spot in ours] != [spot.load.key for spot in theirs]:
        return Result.OTHER_ENDPOINT
    return Result.SAME if [spot.rank for spot in ours] == [spot.rank for spot in theirs] else Result.OTHER_RANK
