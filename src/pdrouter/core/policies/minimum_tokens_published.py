"""``minimum_tokens`` as published: a table of tokens for each rank, raised by each choice, overwritten by each poll.

Source: sgl-project/sglang #13208. Nothing is taken back when a request ends, a poll erases what was sent since it was
taken, both legs are charged the prompt's bytes, and ties go to the lowest rank: it is here to be compared with.

Cost: a scan over the ranks of the ready endpoints of one role and model.
"""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.ledger import RankKey
from pdrouter.core.load import RankLoad, RankReport
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question
from pdrouter.core.policies.measures import ranks_of

MAX_ROWS = 65_536
"""Ranks in the table (I9); those known longest go first."""


class _Row:
    """What the table says of a rank, and the report that it said so after."""

    __slots__ = ("report", "tokens")

    def __init__(self) -> None:
        self.tokens = 0.0
        self.report: RankReport | None = None


class MinimumTokensPublished:
    """Fewest tokens in the table."""

    name: ClassVar[str] = "minimum_tokens"

    def __init__(self, options: PolicyOptions) -> None:  # noqa: ARG002
        self.evictions = 0
        self._rows: dict[RankKey, _Row] = {}

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:
        """Return the candidate with the least row, and raise that row by the prompt."""
        rows = [min(map(self._row, ranks_of(candidate)), key=_tokens) for candidate in candidates]
        tokens = [row.tokens for row in rows]
        index = tokens.index(min(tokens))
        rows[index].tokens += question.facts.prompt_bytes or question.prompt_tokens
        return Pick(index, Why(self.name, "fewest tokens in the published table", candidates, tokens))

    def _row(self, rank: RankLoad) -> _Row:
        """Return a rank's row; the newest report overwrites it, once."""
        row = self._rows.get(rank.key)
        if row is None:
            row = self._rows[rank.key] = _Row()
            if len(self._rows) > MAX_ROWS:  # I9
                del self._rows[next(iter(self._rows))]
                self.evictions += 1
        report = rank.report
        if report is not None and report is not row.report and report.tokens is not None:
            row.report, row.tokens = report, report.tokens
        return row


def _tokens(row: _Row) -> float:
    return row.tokens
