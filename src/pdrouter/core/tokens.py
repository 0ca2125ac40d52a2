"""How many tokens a text has: a rate of bytes per token, learned for each model from what engines count.

The rate is a running mean weighted by tokens, so that long prompts, which matter most, are right.
"""

_MEMORY_TOKENS = 200_000.0
"""Tokens over which the mean runs; chosen so that a change of language shows within some tens of prompts."""

_PRIOR_TOKENS = 64.0
"""What the setting weighs beside what is seen, so that one short prompt doesn't make the rate; chosen."""

_RATE_BOUNDS = (0.25, 64.0)
"""Bytes per token that a usage report may claim; anything beyond is a lie or another unit."""


class TokenEstimator:
    """Bytes per token and tokens per streamed event, by model; at most ``max_models`` are kept (I9)."""

    def __init__(self, bytes_per_token: float, max_models: int) -> None:
        self._prior = (bytes_per_token * _PRIOR_TOKENS, _PRIOR_TOKENS)
        self._max_models = max_models
        self._seen: dict[str | None, tuple[float, float]] = {}
        self._event_tokens: dict[str | None, float] = {}

    def bytes_per_token(self, model: str | None) -> float:
        """Return the rate for a model."""
        prompt_bytes, tokens = self._seen.get(model, self._prior)
        return prompt_bytes / tokens

    def estimate(self, model: str | None, prompt_bytes: int) -> int:
        """Return the tokens of a prompt, at least 1."""
        return max(1, round(prompt_bytes / self.bytes_per_token(model)))

    def learn(self, model: str | None, prompt_bytes: int, prompt_tokens: int) -> None:
        """Take in what an engine counted."""
        if prompt_tokens <= 0 or not _RATE_BOUNDS[0] <= prompt_bytes / prompt_tokens <= _RATE_BOUNDS[1]:
            return
        if model not in self._seen and len(self._seen) >= self._max_models:
            return
        known_bytes, known_tokens = self._seen.get(model, self._prior)
        keep = max(0.0, 1.0 - prompt_tokens / _MEMORY_TOKENS)
        self._seen[model] = (known_bytes * keep + prompt_bytes, known_tokens * keep + prompt_tokens)

    def event_tokens(self, model: str | None) -> float:
        """Return how many tokens one streamed event carries (engines may send several at once)."""
        return self._event_tokens.get(model, 1.0)

    def learn_event_tokens(self, model: str | None, events: int, completion_tokens: int) -> None:
        """Take in how many tokens a stream of ``events`` had."""
        if events <= 0 or completion_tokens < events:
            return
        if model not in self._event_tokens and len(self._event_tokens) >= self._max_models:
            return
        known = self.event_tokens(model)
        self._event_tokens[model] = known + 0.1 * (completion_tokens / events - known)
