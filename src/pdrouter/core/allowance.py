"""An allowance that refills with time: so many at once, so many a second. For rates of requests, and for retries.

The moment is an argument. Source: the token bucket of RFC 2697, section 3, with one bucket.
"""

_ALMOST_ONE = 1 - 1e-9
"""What counts as one, so that rounding can't keep it away for ever."""


class Allowance:
    """At most ``most`` at once, ``per_s`` more each second; it starts full."""

    __slots__ = ("_left", "_most", "_per_s", "_until_s")

    def __init__(self, most: float, per_s: float) -> None:
        self._most = most
        self._per_s = per_s
        self._left = most
        self._until_s = float("-inf")

    def left(self, now_s: float) -> float:
        """Return how much may be taken now; never negative, never above ``most``."""
        if now_s > self._until_s:
            if self._per_s:
                self._left = min(self._most, self._left + self._per_s * (now_s - self._until_s))
            self._until_s = now_s
        return self._left

    def take(self, now_s: float) -> bool:
        """Take one, if one is left: at each moment that ``ready_at_s`` names."""
        if self.ready_at_s(now_s) > now_s:
            return False
        self._left = max(0.0, self._left - 1)
        return True

    def add(self, share: float, now_s: float) -> None:
        """Earn a share of one."""
        self._left = min(self._most, self.left(now_s) + share)

    def ready_at_s(self, now_s: float) -> float:
        """Return the moment at which one may be taken; infinity if time alone doesn't bring it."""
        left = self.left(now_s)
        if left >= _ALMOST_ONE:
            return now_s
        return now_s + (1 - left) / self._per_s if self._per_s and self._most >= 1 else float("inf")
