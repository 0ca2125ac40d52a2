"""``dynamo``: the cost of Dynamo's KV router, over a book of its own.

    prefill leg   active prefill + prompt - overlap
    decode leg    active prompts + prompt
    regular       active prefill + prompt - overlap + active prompts + what the prompt adds to them

Dynamo counts blocks; here it is tokens, blocks times their size, which moves no choice. The lowest wins, ties by
chance. Source: ai-dynamo/dynamo 1.6.1, lib/kv-router/src/scheduling/selector/default.rs, with its defaults: overlap
credit 1 without decay, prefill load scale 1, no weight on active requests, temperature 0. Its decode router has
credit 0, assumes no reuse and tracks no prefill; its prefill router tracks no active blocks.

Cost: a scan over the ranks of the ready endpoints of one role and model.
"""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.fleet import Role
from pdrouter.core.ledger import RankKey
from pdrouter.core.load import EndpointLoad
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question
from pdrouter.core.policies.dynamo_book import DynamoBook
from pdrouter.core.policies.measures import minima


class Dynamo:
    """The rank with the least cost; an endpoint is worth its best rank."""

    name: ClassVar[str] = "dynamo"

    def __init__(self, options: PolicyOptions) -> None:
        self._book = options.books.of(DynamoBook)
        self._chance = options.chance

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the candidate with the least cost."""
        costs = [self._cost(question, candidate) for candidate in candidates]
        best = minima(costs)
        index = best[self._chance.randrange(len(best))]
        return Pick(index, Why(self.name, "least tokens to read and to hold", candidates, costs))

    def _cost(self, question: Question, candidate: Candidate) -> float:
        """Return the cost of a rank, or of an endpoint's best; what the engine placed itself is on all its ranks."""
        if not isinstance(candidate, EndpointLoad):
            return self._rank_cost(question, candidate.key, 0)
        book, unknown, ranks = self._book, candidate.unassigned.key, candidate.ranks
        if unknown not in book.known:
            return min([self._rank_cost(question, rank.key, 0) for rank in ranks])
        held = book.overlap_tokens(question.facts, unknown, question.now_s)
        least = min(self._rank_cost(question, rank.key, held) for rank in ranks)
        return least + self._load(question.role, unknown) / len(ranks)

    def _rank_cost(self, question: Question, rank: RankKey, held: int) -> int:
        """Return what a rank has and what the request adds to it; at least ``held`` tokens of the prompt are there."""
        book, facts, cost = self._book, question.facts, self._load(question.role, rank)
        if question.role is not Role.DECODE:
            cost += facts.prompt_tokens - max(held, book.overlap_tokens(facts, rank, question.now_s))
        return cost if question.role is Role.PREFILL else cost + book.added_tokens(facts, rank)

    def _load(self, role: Role, rank: RankKey) -> int:
        """Return what a rank has."""
        read = 0 if role is Role.DECODE else self._book.prefill_tokens.get(rank, 0)
        return read if role is Role.PREFILL else read + self._book.active_tokens.get(rank, 0)
