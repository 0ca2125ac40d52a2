"""The clock of ranks that read in step (DP attention): at every step all of an endpoint's wait for the slowest.

What is queued on a rank is told in seconds of this clock, which neighbours don't change: those of reading tokens that
have none before them. How far the clock lags behind time is the same for all ranks of the endpoint, and is set by the
prompt that is read at the greatest depth. It knows no ranks; who does: ``places.py``.
"""

from pdrouter.core.cost import Profile

_NEGLIGIBLE_SHARE = 0.1
"""Changes of pace up to this share aren't worth telling all ranks. Chosen: as large as a class of speed."""


class Together:
    """One endpoint's clock; ``stretch`` is how many seconds one of its seconds takes."""

    __slots__ = ("_at_s", "_clock_s", "_deep_token_share", "stretch", "token_s")

    def __init__(self, profile: Profile) -> None:
        self.stretch = 1.0
        self.token_s = profile.prefill_token_s
        self._deep_token_share = profile.prefill_pair_s / profile.prefill_token_s
        self._clock_s = 0.0
        self._at_s = 0.0

    def clock_s(self, now_s: float) -> float:
        """Return what it shows; moments may not go back."""
        self._clock_s += (now_s - self._at_s) / self.stretch
        self._at_s = now_s
        return self._clock_s

    def keep_step(self, deepest_tokens: float, factor: float) -> bool:
        """From where it was last asked on, go as slowly as reading behind so many tokens makes it; say if that is new.

        Source: ``a1 + a2*p`` of ``cost.prefill_s`` is what a token behind p others takes, over ``a1``; ``factor`` is
        what is learned of the endpoint.
        """
        stretch = factor * (1.0 + self._deep_token_share * deepest_tokens)
        if abs(stretch - self.stretch) <= _NEGLIGIBLE_SHARE * self.stretch:
            return False
        self.stretch = stretch
        return True

    def read_s(self, uncached_tokens: float) -> float:
        """Return what it takes at least to read so many tokens at the pace of now."""
        return self.stretch * self.token_s * uncached_tokens
