"""``manual``: what carries the same ``X-SMG-Routing-Key`` goes to the same worker; a new key is assigned by mode.

A key keeps up to two workers: the first of them that is a candidate gets the request. Keys that aren't used for
``max_idle_s`` are forgotten. Source: the SGLang router's policy of that name.

Cost: a look for the key's workers among the candidates; a new key's assignment is a scan, but for mode random.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.ledger import RankKey
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question
from pdrouter.core.policies.measures import in_flight, minima

MAX_KEYS = 262_144
"""Keys that are remembered (I9); those not used longest go first."""

KEPT = 2
"""Workers kept for a key. Source: the SGLang router."""

Name = str | RankKey
Assign = Callable[[Sequence[Candidate]], int]


class _Sticky:
    """A key's workers, the first one preferred, and when it was last used."""

    __slots__ = ("kept", "used_s")

    def __init__(self, used_s: float) -> None:
        self.kept: list[Name] = []
        self.used_s = used_s


class Manual:
    """The key's worker; without a key any."""

    name: ClassVar[str] = "manual"

    def __init__(self, options: PolicyOptions) -> None:
        modes: Mapping[str, Assign] = {
            "random": self._any,
            "min_load": self._least_loaded,
            "min_group": self._fewest_keys,
        }
        self.evictions = 0
        self._chance = options.chance
        self._max_idle_s = options.ancestors.max_idle_s
        self._mode = options.ancestors.assignment_mode
        self._assign = modes[self._mode]
        self._keys: dict[tuple[tuple[str, ...], int], _Sticky] = {}  # the one used longest ago first
        self._keys_on: Counter[Name] = Counter()

    def __len__(self) -> int:
        return len(self._keys)

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the key's worker."""
        key, now_s = question.facts.routing_key, question.now_s
        if key is None:
            return Pick(self._any(candidates), Why(self.name, "no routing key: uniform choice"))
        self._forget_idle(now_s)
        sticky = self._keys.pop((question.scope, key), None) or _Sticky(now_s)
        sticky.used_s = now_s
        self._keys[question.scope, key] = sticky
        if len(self._keys) > MAX_KEYS:  # I9
            self._forget_oldest()
            self.evictions += 1
        names = [candidate.key for candidate in candidates]
        for kept in sticky.kept:
            if kept in names:
                return Pick(names.index(kept), Why(self.name, "the routing key's worker"))
        index = self._assign(candidates)
        self._keep(sticky, names[index])
        return Pick(index, Why(self.name, f"new for the routing key: {self._mode}"))

    def _keep(self, sticky: _Sticky, name: Name) -> None:
        sticky.kept.append(name)
        self._keys_on[name] += 1
        if len(sticky.kept) > KEPT:
            self._let_go(sticky.kept.pop(0))

    def _forget_idle(self, now_s: float) -> None:
        while self._keys and next(iter(self._keys.values())).used_s < now_s - self._max_idle_s:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        for name in self._keys.pop(next(iter(self._keys))).kept:
            self._let_go(name)

    def _let_go(self, name: Name) -> None:
        self._keys_on[name] -= 1
        if not self._keys_on[name]:
            del self._keys_on[name]

    def _any(self, candidates: Sequence[Candidate]) -> int:
        return self._chance.randrange(len(candidates))

    def _least_loaded(self, candidates: Sequence[Candidate]) -> int:
        return self._one_of(minima([in_flight(c) for c in candidates]))

    def _fewest_keys(self, candidates: Sequence[Candidate]) -> int:
        return self._one_of(minima([self._keys_on[c.key] for c in candidates]))

    def _one_of(self, indexes: Sequence[int]) -> int:
        return indexes[self._chance.randrange(len(indexes))]
