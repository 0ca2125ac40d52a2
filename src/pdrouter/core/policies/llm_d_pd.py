"""``llm_d_pd``: llm-d's recommended profile for prefill and decode: sticky until saturated, then tokens; requests.

Prefill: if endpoints hold at least 0.8 of the prompt, only those stay, unless the least loaded of them would answer
more than 18 s later than the least loaded other. Of those that stay the least

    uncached prompt tokens in flight + those of this request, at most 4194304

wins. Time to first token is tokens in flight / ``llm_d_prefill_tokens_per_s``. Decode: the fewest requests in flight.
Ties take turns. A regular endpoint is chosen as for prefill.
Source: llm-d/llm-d #2072, llm-d/llm-d-router ebab687: prefix-cache-affinity-filter, token-load-scorer,
active-request-scorer (pkg/epp/framework/plugins/scheduling).

Cost: a scan over the ready endpoints of one role and model.
"""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.fleet import Role
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question, Turns
from pdrouter.core.policies.llm_d import address_of
from pdrouter.core.policies.llm_d_book import LlmDBook
from pdrouter.core.policies.measures import in_flight

STICKY_SHARE = 0.8
"""From this share of a prompt's blocks on, an endpoint is sticky. Source: affinityThreshold."""

MAX_PENALTY_S = 18.0
"""Stickiness may cost as much. Source: maxTTFTPenaltyMs."""

MOST_TOKENS = 4_194_304
"""Tokens from which on endpoints are alike. Source: queueThresholdTokens."""


class LlmDPd:
    """Prefill by prefix and tokens, decode by requests."""

    name: ClassVar[str] = "llm_d_pd"

    def __init__(self, options: PolicyOptions) -> None:
        self._book = options.books.of(LlmDBook)
        self._tokens_per_s = options.ancestors.llm_d_prefill_tokens_per_s
        self._turns = Turns()

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the candidate that the side's profile chooses."""
        if question.role is Role.DECODE:
            counts = [float(in_flight(candidate)) for candidate in candidates]
            index = self._turns.least(question.scope, counts)
            return Pick(index, Why(self.name, "fewest requests in flight", candidates, counts))
        loads = self._loads(question, candidates)
        stay, rule = self._sticky(question, candidates)
        index = stay[self._turns.least(question.scope, [min(loads[i], MOST_TOKENS) for i in stay])]
        return Pick(index, Why(self.name, f"{rule}: fewest uncached tokens with this request", candidates, loads))

    def _loads(self, question: Question, candidates: Sequence[Candidate]) -> list[float]:
        """Return the tokens in flight on each with this request there."""
        book, facts = self._book, question.facts
        matched = book.matched(facts)
        addresses = [address_of(candidate) for candidate in candidates]
        return [
            float(book.tokens[address] + facts.prompt_tokens - book.matched_tokens(facts, matched.get(address, 0)))
            for address in addresses
        ]

    def _sticky(self, question: Question, candidates: Sequence[Candidate]) -> tuple[Sequence[int], str]:
        """Return the indexes of those that stay, and why they do."""
        shares, tokens = self._book.shares(question.facts), self._book.tokens
        addresses = [address_of(candidate) for candidate in candidates]
        sticky = [i for i, address in enumerate(addresses) if shares.get(address, 0.0) >= STICKY_SHARE]
        others = [i for i, address in enumerate(addresses) if shares.get(address, 0.0) < STICKY_SHARE]
        if not sticky or not others:
            return range(len(addresses)), "no one sticky" if others else "all sticky"
        penalty = min(tokens[addresses[i]] for i in sticky) - min(tokens[addresses[i]] for i in others)
        if penalty > MAX_PENALTY_S * self._tokens_per_s:
            return range(len(addresses)), "sticky, but saturated"
        return sticky, "sticky"
