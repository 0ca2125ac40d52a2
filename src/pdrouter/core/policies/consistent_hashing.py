"""``consistent_hashing``: a client's key leads to the same worker, and few keys move when workers come and go.

The key is the hash of the first of the headers ``X-SMG-Routing-Key``, ``Authorization``, ``X-Forwarded-For``,
``Cookie`` that a request carries; a ring has 150 points for each worker, and those of workers that are out are skipped.
Source: the SGLang router's policy of that name.

Cost: a look at whether the candidates are still the same; 150 hashes for each new one.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain
from operator import eq, itemgetter
from typing import ClassVar

from xxhash import xxh3_64_intdigest

from pdrouter.core.decision import Why
from pdrouter.core.ledger import RankKey
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question

POINTS = 150
"""Points of each worker. Source: the SGLang router."""

MAX_RINGS = 1024
"""Sets that are chosen from (I9)."""

Name = str | RankKey


class _Ring:
    """The points of the workers of one set, and the indexes of those that are candidates now."""

    __slots__ = ("_known", "_points", "indexes")

    def __init__(self) -> None:
        self.indexes: dict[Name, int] = {}
        self._known: set[Name] = set()
        self._points: list[tuple[int, Name]] = []

    def show(self, names: Sequence[Name]) -> None:
        """Let these be the candidates; a worker that is out for a while keeps its points."""
        if len(names) == len(self.indexes) and all(map(eq, names, self.indexes)):
            return
        self.indexes = {name: index for index, name in enumerate(names)}
        if len(self._known) > 2 * len(names):
            self._known &= self.indexes.keys()
            self._points = [point for point in self._points if point[1] in self._known]
        new = [name for name in names if name not in self._known]
        self._known.update(new)
        self._points += [(_hash(name, number), name) for name in new for number in range(POINTS)]
        self._points.sort(key=itemgetter(0))

    def owner(self, key: int) -> int:
        """Return the index of the candidate whose point comes next, after the end the first again."""
        points = self._points
        start = bisect_left(points, key, key=itemgetter(0))
        owners = (self.indexes.get(points[i][1]) for i in chain(range(start, len(points)), range(start)))
        return next(index for index in owners if index is not None)


class ConsistentHashing:
    """The worker whose point follows the key's on the ring; without a key any."""

    name: ClassVar[str] = "consistent_hashing"

    def __init__(self, options: PolicyOptions) -> None:
        self.evictions = 0
        self._chance = options.chance
        self._rings: dict[tuple[str, ...], _Ring] = {}

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the key's worker."""
        key = question.facts.client_key
        if key is None:
            return Pick(self._chance.randrange(len(candidates)), Why(self.name, "no key: uniform choice"))
        ring = self._rings.pop(question.scope, None) or _Ring()
        self._rings[question.scope] = ring
        if len(self._rings) > MAX_RINGS:  # I9
            del self._rings[next(iter(self._rings))]
            self.evictions += 1
        ring.show([candidate.key for candidate in candidates])
        return Pick(ring.owner(key), Why(self.name, "next on the ring after the client's key"))


def _hash(name: Name, number: int) -> int:
    return xxh3_64_intdigest(f"{name} {number}".encode())
