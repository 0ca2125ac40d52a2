"""[5] Further attempts: whether there may be one, and when; from the pure rules of ``core/retry.py``."""

import asyncio
from collections.abc import Callable

from pdrouter.core.retry import RetryBudget, RetryOptions, backoff_s


class Retries:
    """The retries of all requests together."""

    def __init__(self, options: RetryOptions, chance: Callable[[], float], clock: Callable[[], float]) -> None:
        """Begin with an empty count; ``chance`` gives random numbers from 0 to 1."""
        self._options = options
        self._budget = RetryBudget(options)
        self._began = 0
        self._chance = chance
        self._clock = clock

    def set_options(self, options: RetryOptions) -> None:
        """Use other settings for what fails from now on."""
        if options != self._options:
            self._options = options
            self._budget.set_options(options)

    def counters(self) -> dict[str, int]:
        """Return how many were made, and how many there was no budget for."""
        return {"made": self._budget.spent, "refused": self._budget.refused}

    def began(self) -> None:
        """Count a request at its first attempt; what it earns is reckoned when a retry is wanted."""
        self._began += 1

    def later(self, failures: int, due_s: float, call: Callable[[], None]) -> asyncio.TimerHandle | None:
        """Call after the back-off that follows so many failures.

        ``None`` if that would be after ``due_s``, or if there is no budget for another attempt.
        """
        now_s = self._clock()
        delay_s = backoff_s(self._options, failures, self._chance())
        if now_s + delay_s >= due_s:  # I8
            return None
        self._budget.earn(now_s, self._began)
        self._began = 0
        if not self._budget.spend(now_s):
            return None
        return asyncio.get_running_loop().call_later(delay_s, call)
