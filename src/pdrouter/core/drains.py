"""How many answers ended lately on each endpoint: the rate at which it drains, from our own settlements.

Counted by seconds over the last minute, as in AIBrix's decode choice (``policies/load_aware_pairs.py``).
"""

from collections import deque

WINDOW_S = 60
"""Source: AIBrix's ``drain_rate_1m``."""


class _Seconds:
    """Counts of the last minute, one for each second in which any ended (I9: at most ``WINDOW_S``)."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts: deque[list[int]] = deque()
        self._total = 0

    def add(self, second: int) -> None:
        """Count one."""
        if not self._counts or self._counts[-1][0] != second:
            self._counts.append([second, 0])
        self._counts[-1][1] += 1
        self._total += 1

    def total(self, second: int) -> int:
        """Return how many there were in the minute that ends with ``second``."""
        while self._counts and self._counts[0][0] <= second - WINDOW_S:
            self._total -= self._counts.popleft()[1]
        return self._total


class DrainRates:
    """Answers ended per second, by endpoint; unknown endpoints have none."""

    def __init__(self) -> None:
        self._endpoints: dict[str, _Seconds] = {}

    def add(self, address: str) -> None:
        """Count for an endpoint from now on."""
        self._endpoints.setdefault(address, _Seconds())

    def remove(self, address: str) -> None:
        """Forget an endpoint."""
        self._endpoints.pop(address, None)

    def ended(self, address: str, now_s: float) -> None:
        """Count an answer that ended."""
        seconds = self._endpoints.get(address)
        if seconds is not None:
            seconds.total(int(now_s))
            seconds.add(int(now_s))

    def rate_per_s(self, address: str, now_s: float) -> float:
        """Return the rate over the last minute."""
        seconds = self._endpoints.get(address)
        return 0.0 if seconds is None else seconds.total(int(now_s)) / WINDOW_S
