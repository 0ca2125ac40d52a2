"""How many tokens one streamed event carries: learned for each endpoint, because its engine's settings decide it.

vLLM and SGLang send several tokens in one event with ``--stream-interval``, with speculative decoding, and when their
HTTP server is behind.
"""

_STEP = 0.1
"""The weight of one answer; chosen."""

_MOST = 1024
"""A count beyond so many tokens in each event is a lie or another unit; chosen."""


class EventTokens:
    """A running mean for each endpoint; there are as many as the fleet has endpoints (I9)."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def of(self, address: str) -> float:
        """Return the tokens of one event of an endpoint's streams."""
        return self._mean.get(address, 1.0)

    def learn(self, address: str, events: int, completion_tokens: int) -> None:
        """Take in how many tokens a stream of ``events`` had; events without a token aren't counted in."""
        if 0 < events <= completion_tokens <= _MOST * events:
            mean = self.of(address)
            self._mean[address] = mean + _STEP * (completion_tokens / events - mean)

    def forget(self, address: str) -> None:
        """An endpoint is gone."""
        self._mean.pop(address, None)
