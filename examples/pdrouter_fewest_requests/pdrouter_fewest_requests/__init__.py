"""``fewest_requests``: the candidate with the fewest requests; the first by name among equals.

    pip install ./examples/pdrouter_fewest_requests
    pdrouter serve --policy fewest_requests ...

The entry point in ``pyproject.toml`` gives the policy its name. It may be tried first without acting:
``pdrouter serve --shadow-policy fewest_requests ...``.
"""

from collections.abc import Sequence
from typing import ClassVar

from pdrouter.core.decision import Why
from pdrouter.core.policies.base import Candidate, Pick, PolicyOptions, Question


class FewestRequests:
    """Fewest requests, then lexicographic. Unlike ``least_request`` it takes no turns, so it depends on load alone."""

    name: ClassVar[str] = "fewest_requests"

    def __init__(self, options: PolicyOptions) -> None:
        """Take the settings and the source of chance that policies share; this one needs neither."""

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Pick:  # noqa: ARG002
        """Return the candidate with the fewest requests."""
        counts = [candidate.comparable_requests for candidate in candidates]
        index = min(range(len(counts)), key=lambda i: (counts[i], candidates[i].key))
        return Pick(index, Why(self.name, "fewest requests, then by name", candidates, counts))
