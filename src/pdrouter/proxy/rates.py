"""How many requests and tokens a client may ask for per minute, by its key: an API key or another header.

A key has a bucket that holds a minute's worth and fills steadily, so it may ask for that much at once, and for no more
than the rate in the long run. Source of the algorithm (GCRA) and its books: the package throttled-py.
"""

import math
from collections import Counter
from collections.abc import Mapping

import msgspec
import xxhash
from throttled import MemoryStore, RateLimiterType, per_min
from throttled.rate_limiter import BaseRateLimiter, RateLimiterRegistry

from pdrouter.core.request import RequestFacts
from pdrouter.errors import RateLimited
from pdrouter.proxy.credentials import identity

_MAX_KEYS = 65_536
"""Keys with a bucket; what was used longest ago is forgotten, and starts anew (I9)."""


class RateOptions(msgspec.Struct, frozen=True):
    """Settings; ``config.py`` says what they mean."""

    requests_per_min: int | None
    tokens_per_min: int | None
    key_header: bytes
    output_tokens: int


class Rates:
    """Refuses what goes beyond the rates; ``counts`` says how often."""

    def __init__(self, options: RateOptions) -> None:
        self.counts: Counter[str] = Counter()
        self._options = options
        self._requests = _bucket(options.requests_per_min)
        self._tokens = _bucket(options.tokens_per_min)

    def counters(self) -> Counter[str]:
        """Return the refusals since the start, by what there was too much of."""
        return self.counts

    def take(self, header: Mapping[bytes, bytes], facts: RequestFacts) -> None:
        """Charge a request to its key: one request, though it be refused, and prompt and longest answer in tokens.

        What costs more than a minute's worth needs a full bucket.
        Raises: RateLimited.
        """
        options = self._options
        key = f"{xxhash.xxh3_64_intdigest(identity(header, options.key_header)):x}"  # no secret is kept
        if options.requests_per_min is not None:
            self._charge("requests", self._requests, key, 1, options.requests_per_min)
        if options.tokens_per_min is not None:
            longest = options.output_tokens if facts.max_output_tokens is None else facts.max_output_tokens
            cost = facts.prompt_tokens + longest * facts.prompts
            self._charge("tokens", self._tokens, key, cost, options.tokens_per_min)

    def _charge(self, what: str, bucket: BaseRateLimiter, key: str, cost: int, per_minute: int) -> None:
        result = bucket.limit(key, min(cost, per_minute))
        if result.limited:  # I9
            self.counts[what] += 1
            after_s = max(1, math.ceil(result.state.retry_after))
            message = f"the key's rate of {per_minute} {what} per minute is reached; come again in {after_s} s"
            raise RateLimited(message, retry_after_s=after_s)


def _bucket(per_minute: int | None) -> BaseRateLimiter:
    quota = per_min(per_minute or 1, burst=per_minute or 1)
    store = MemoryStore(options={"MAX_SIZE": _MAX_KEYS})
    return RateLimiterRegistry.get(RateLimiterType.GCRA.value)(quota, store)
