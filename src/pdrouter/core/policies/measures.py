"""What several policies measure alike on a candidate, be it an endpoint or a rank."""

from collections.abc import Sequence

from pdrouter.core.load import EndpointLoad, RankLoad
from pdrouter.core.policies.base import Candidate, Question


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


def minima(values: Sequence[float]) -> list[int]:
    """Return the indexes of the least value."""
    least = min(values)
    return [i for i, value in enumerate(values) if value == least]
