"""The Policy protocol: choose one of the candidates that may serve a request.

A candidate is an endpoint or a rank; both show their load by the same names, so that one policy serves for either.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import msgspec

from pdrouter.core.decision import Why
from pdrouter.core.drains import DrainRates
from pdrouter.core.fleet import Role
from pdrouter.core.ledger import UNASSIGNED, RankKey
from pdrouter.core.load import EndpointLoad, RankLoad
from pdrouter.core.policies.books import Books
from pdrouter.core.request import RequestFacts
from pdrouter.core.work import WorkIndex

Candidate = EndpointLoad | RankLoad

MAX_SCOPES = 65_536
"""Scopes that a policy remembers whose turn it is in (I9)."""


class RandomSource(Protocol):
    """What policies need of a random generator."""

    def randrange(self, stop: int, /) -> int:
        """Return a number in [0, stop)."""
        ...


class Ancestors(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the policies that come from other routers; ``config.py`` says what they mean."""

    load_aware_generation: int
    minimum_tokens_published: bool
    cache_threshold: float
    balance_abs_threshold: float
    balance_rel_threshold: float
    max_idle_s: float
    assignment_mode: str
    bucket_adjust_interval_s: float
    llm_d_prefill_tokens_per_s: float


class PolicyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What policies are made of: their source of chance and their settings."""

    chance: RandomSource
    load_aware_spread_requests: float
    load_aware_sigma: float
    work: WorkIndex
    drains: DrainRates
    books: Books
    ancestors: Ancestors


class Question(msgspec.Struct, frozen=True):
    """What is to be placed.

    ``scope`` names the set that is chosen from (a role, an endpoint), so that turns are taken within it.
    ``prompt_tokens`` is the whole prompt, ``cached_tokens`` what ranks hold of it (prefill only), ``output_tokens`` the
    answer expected, ``facts`` what else is known of the request. ``avoid`` are ranks where it has failed.
    """

    scope: tuple[str, ...]
    role: Role
    prompt_tokens: int
    cached_tokens: Mapping[RankKey, int]
    output_tokens: float
    now_s: float
    facts: RequestFacts = RequestFacts(request_id="", prompt_tokens=0)
    avoid: frozenset[RankKey] = frozenset()

    def avoids(self, key: RankKey) -> bool:
        """Whether a rank had better not be chosen (I8): it, or its endpoint as a whole (``UNASSIGNED``)."""
        return key in self.avoid or RankKey(key.endpoint, UNASSIGNED) in self.avoid


class Pick(msgspec.Struct, frozen=True):
    """The index of the chosen candidate, and why."""

    index: int
    why: Why


class Policy(Protocol):
    """Chooses one of at least one candidates; it may keep turns, and load of its own only in a book (``books.py``)."""

    name: ClassVar[str]

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the pick."""
        ...


class Turns:
    """Whose turn it is within each scope, so that ties rotate; scopes not asked for longest are forgotten (I9)."""

    __slots__ = ("_next", "evictions")

    def __init__(self) -> None:
        self.evictions = 0
        self._next: dict[tuple[str, ...], int] = {}

    def take(self, scope: tuple[str, ...], size: int) -> int:
        """Return the next index in [0, size)."""
        turn = self._next.pop(scope, 0) % size
        self._pass_on(scope, turn)
        return turn

    def least(self, scope: tuple[str, ...], values: Sequence[float]) -> int:
        """Return the index of the least value; equal ones take turns."""
        start = self._next.pop(scope, 0)
        least = min(values)
        best = values.index(least)
        if best < start and least in values[start:]:
            best = values.index(least, start)
        self._pass_on(scope, best)
        return best

    def _pass_on(self, scope: tuple[str, ...], turn: int) -> None:
        self._next[scope] = turn + 1
        if len(self._next) > MAX_SCOPES:  # I9
            del self._next[next(iter(self._next))]
            self.evictions += 1
