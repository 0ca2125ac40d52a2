"""What several policies measure alike on a candidate, be it an endpoint or a rank."""

from collections.abc import Callable, Sequence
from statistics import fmean

from pdrouter.core.load import EndpointLoad, RankLoad, RankReport
from pdrouter.core.policies.base import Candidate, Question

_MOST = 1e12
"""What is told beyond it isn't a load."""


def ranks_of(candidate: Candidate) -> Sequence[RankLoad]:
    """Return the candidate's ranks; a rank is its own only one."""
    return candidate.ranks if isinstance(candidate, EndpointLoad) else [candidate]


def in_flight(candidate: Candidate) -> int:
    """Return the requests that we hold on the candidate."""
    return candidate.ledger_requests if isinstance(candidate, EndpointLoad) else candidate.account.requests


def held_tokens(question: Question, candidate: Candidate) -> int:
    """Return how much of the prompt the candidate's best rank holds."""
    cached = question.cached_tokens
    if not cached:
        return 0
    held = max(cached.get(rank.key, 0) for rank in ranks_of(candidate))
    return max(held, cached.get(candidate.unassigned.key, 0)) if isinstance(candidate, EndpointLoad) else held


def held_share(question: Question, candidate: Candidate) -> float:
    """Return how much of the prompt the candidate holds, of 1."""
    return held_tokens(question, candidate) / max(1, question.prompt_tokens)


def told(candidate: Candidate, number: Callable[[RankReport], float | None]) -> list[float] | None:
    """Return a number of each rank's report, ``None`` unless all tell one that can be."""
    numbers = []
    for rank in ranks_of(candidate):
        value = None if rank.report is None else number(rank.report)
        if value is None or not 0 <= value <= _MOST:
            return None
        numbers.append(value)
    return numbers


def kv_use(candidate: Candidate) -> float | None:
    """Return the share of KV in use by the reports, ``None`` if that isn't told."""
    shares = told(candidate, lambda report: report.kv_use)
    return None if shares is None else min(1.0, fmean(shares))


def reported_tokens(candidate: Candidate) -> float | None:
    """Return the tokens by the reports, ``None`` if they aren't told."""
    counts = told(candidate, lambda report: report.tokens)
    return None if counts is None else sum(counts)


def waiting_requests(candidate: Candidate) -> float | None:
    """Return how many requests wait by the reports, ``None`` if that isn't told."""
    counts = told(candidate, lambda report: report.waiting_requests)
    return None if counts is None else sum(counts)


def minima(values: Sequence[float]) -> list[int]:
    """Return the indexes of the least value."""
    least = min(values)
    return [i for i, value in enumerate(values) if value == least]
