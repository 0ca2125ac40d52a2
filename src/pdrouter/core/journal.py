"""The last decisions, and what became of each: ``story`` puts a request's whole life into words.

While a request lives, its ``Decision`` is what is kept; when it has ended, a ``Life`` takes that one's place: names and
numbers only, so that no endpoint, load or prompt lives on in here. Nothing is put into words until somebody asks.
It must not know who asks, nor of clocks: moments come in as arguments. Read next: ``story.py``.
"""

from collections import deque
from collections.abc import Iterator

from pdrouter.core.decision import Decision
from pdrouter.core.request import RequestFacts
from pdrouter.core.story import Life, Story, life_of, story_of, turned_away
from pdrouter.errors import RouterError


class Journal:
    """The last ``limit`` decisions, and as many requests that couldn't be placed (I9); 0 keeps none."""

    __slots__ = ("_decided", "_last_number", "_limit", "_rejected", "_rejections")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._decided: list[Decision | Life | None] = [None] * limit  # a decision's place follows from its number
        self._rejected: deque[Life] = deque(maxlen=limit)
        self._last_number = 0
        self._rejections = 0

    @property
    def limit(self) -> int:
        """How many decisions are kept at most."""
        return self._limit

    @property
    def dropped(self) -> int:
        """How many had to go for newer ones."""
        return max(0, self._last_number - self._limit) + self._rejections - len(self._rejected) if self._limit else 0

    def decided(self, decision: Decision) -> None:
        """Take note of a placed request."""
        if self._limit:
            self._last_number = decision.number
            self._decided[decision.number % self._limit] = decision

    def rejected(self, facts: RequestFacts, error: RouterError, now_s: float) -> None:
        """Take note of a request that couldn't be placed."""
        if self._limit:
            self._rejections += 1
            self._rejected.append(turned_away(facts, error, now_s))

    def settled(self, decision: Decision, error: RouterError | None, now_s: float) -> None:
        """Take note of a request's end: with its failure, or answered."""
        if self._limit:
            place = decision.number % self._limit
            if self._decided[place] is decision:
                self._decided[place] = life_of(decision, error, now_s)

    def story(self, request_id: str, now_s: float) -> list[Story]:
        """Return the life of a request as it is known at ``now_s``; all of them, oldest first, where ids repeat.

        Cost: a look at each that is kept.
        """
        lives = [
            kept if isinstance(kept, Life) else life_of(kept, None, None)
            for kept in self._all()
            if (kept.request_id if isinstance(kept, Life) else kept.facts.request_id) == request_id
        ]
        return [story_of(life, now_s) for life in sorted(lives, key=lambda life: life.decided_at_s)]

    def _all(self) -> Iterator[Decision | Life]:
        yield from self._rejected
        yield from (kept for kept in self._decided if kept is not None)
