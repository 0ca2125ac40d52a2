"""When a failed request may be tried again, and after how long; what to try, and where, isn't decided here.

A budget over all requests keeps retries from doubling an overload; the back-off spreads them in time.
"""

import msgspec

from pdrouter.core.allowance import Allowance


class RetryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of retries; ``config.py`` says what they mean.

    ``budget_share`` is retries earned by each request, ``budget_per_s`` those earned by time alone, ``budget_most``
    how many may be saved up. ``jitter`` is a share, from 0 to 1, by which a delay differs either way.
    """

    initial_backoff_s: float
    max_backoff_s: float
    backoff_multiplier: float
    jitter: float
    budget_share: float
    budget_per_s: float
    budget_most: float


class RetryBudget:
    """Retries of the whole router: a share of its requests, and a few each second for when there are few.

    Over any time there are at most ``budget_most + budget_share * requests + budget_per_s * seconds`` of them.
    Source: Finagle's RetryBudget (percentage of requests, minimum per second), as a token bucket.
    """

    __slots__ = ("_allowance", "_share", "refused", "spent")

    def __init__(self, options: RetryOptions) -> None:
        self.spent = 0
        self.refused = 0
        self.set_options(options)

    def set_options(self, options: RetryOptions) -> None:
        """Use other settings, from a full allowance on."""
        self._share = options.budget_share
        self._allowance = Allowance(options.budget_most, options.budget_per_s)

    def earn(self, now_s: float, requests: int) -> None:
        """Count requests, each at its first attempt only."""
        self._allowance.add(self._share * requests, now_s)

    def spend(self, now_s: float) -> bool:
        """Take one retry; ``False`` if there is none left (I9)."""
        if not self._allowance.take(now_s):  # I9
            self.refused += 1
            return False
        self.spent += 1
        return True


def backoff_s(options: RetryOptions, failures: int, chance: float) -> float:
    """Return the delay after so many failed attempts, at least one; ``chance`` is a random number in [0, 1].

    Source: ``min(max, initial * multiplier^(failures - 1)) * (1 - jitter .. 1 + jitter)``, as in sglang-router.
    """
    try:
        grown_s = options.initial_backoff_s * options.backoff_multiplier ** (failures - 1)
    except OverflowError:
        grown_s = options.max_backoff_s
    return min(options.max_backoff_s, grown_s) * (1 + options.jitter * (2 * chance - 1))
