"""How long answers are: a running mean for each model, which a request's own limit bounds."""

from pdrouter.core.request import RequestFacts

_KEPT = 0.98
"""What is kept of the mean with each answer: it runs over about fifty. Chosen."""


class OutputEstimator:
    """Expected output by model; at most ``max_models`` are kept (I9)."""

    def __init__(self, initial_tokens: float, max_models: int) -> None:
        self.overflows = 0
        self._initial_tokens = initial_tokens
        self._max_models = max_models
        self._mean: dict[str | None, float] = {}

    def expected_tokens(self, model: str | None, facts: RequestFacts) -> float:
        """Return how many tokens the answer is expected to have, all samples together; at least one."""
        mean = self._mean.get(model, self._initial_tokens)
        limit = facts.max_output_tokens
        return max(1.0, mean if limit is None else min(limit, mean)) * facts.prompts

    def learn(self, model: str | None, completion_tokens: int) -> None:
        """Take in the length of an answer."""
        if completion_tokens <= 0:
            return
        if model not in self._mean and len(self._mean) >= self._max_models:
            self.overflows += 1
            return
        mean = self._mean.get(model, self._initial_tokens)
        self._mean[model] = mean * _KEPT + completion_tokens * (1 - _KEPT)
