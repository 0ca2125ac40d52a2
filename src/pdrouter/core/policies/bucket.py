"""``bucket``: each worker gets the prompts of one range of lengths; the ranges move so that each carries the same work.

At the end of an interval the bounds are set so that the prompts of that interval would have been shared out evenly, by
tokens. A length at which several ranges meet takes turns among their workers. Source: the SGLang router's policy of
that name.

Cost: a search among the bounds; once in an interval a sort of its lengths.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question, Turns

MAX_LENGTHS = 8192
"""Lengths of an interval that are remembered (I9), the newest ones."""

MAX_BOOKS = 256
"""Sets that are chosen from (I9)."""


class _Book:
    """The lengths seen in one set, and the bounds between its workers' ranges."""

    __slots__ = ("_bounds", "_now", "_past", "_since_s", "_workers")

    def __init__(self, since_s: float) -> None:
        self._since_s = since_s
        self._now: deque[int] = deque(maxlen=MAX_LENGTHS)
        self._past: Sequence[int] = ()
        self._bounds: Sequence[int] = ()
        self._workers = 0

    def see(self, length: int, now_s: float, interval_s: float) -> bool:
        """Take in a prompt's length, at an interval's end its lessons, too; ``False`` if another had to go for it."""
        if now_s - self._since_s >= interval_s:
            self._since_s = now_s
            self._past = sorted(self._now)
            self._now.clear()
            self._workers = 0
        is_full = len(self._now) == MAX_LENGTHS
        self._now.append(length)
        return not is_full

    def bounds(self, workers: int) -> Sequence[int]:
        """Return the longest prompt of each worker's range but the last's, nothing while no interval has ended."""
        if workers != self._workers:
            self._workers = workers
            self._bounds = _even_bounds(self._past, workers)
        return self._bounds


class Bucket:
    """The worker of the prompt's length."""

    name: ClassVar[str] = "bucket"

    def __init__(self, options: PolicyOptions) -> None:
        self.evictions = 0
        self._interval_s = options.ancestors.bucket_adjust_interval_s
        self._turns = Turns()
        self._books: dict[tuple[str, ...], _Book] = {}

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the worker whose range the prompt falls into."""
        length, scope = question.prompt_tokens, question.scope
        book = self._books.pop(scope, None) or _Book(question.now_s)
        self._books[scope] = book
        if len(self._books) > MAX_BOOKS:  # I9
            del self._books[next(iter(self._books))]
            self.evictions += 1
        self.evictions += not book.see(length, question.now_s, self._interval_s)
        bounds = book.bounds(len(candidates))
        if not bounds:
            return Pick(self._turns.take(scope, len(candidates)), Why(self.name, "no lengths known yet: in turn"))
        first, last = bisect_left(bounds, length), bisect_right(bounds, length)
        index = first + self._turns.take((*scope, str(first)), last - first + 1)
        return Pick(index, Why(self.name, f"range {index + 1} of {len(candidates)} by prompt length"))


def _even_bounds(lengths: Sequence[int], workers: int) -> Sequence[int]:
    """Return bounds that give each worker the same sum of these (sorted) lengths."""
    if not lengths:
        return ()
    sums = list(accumulate(lengths))
    return [lengths[bisect_left(sums, sums[-1] * part / workers)] for part in range(1, workers)]
