"""What an endpoint makes of its profile: observed time over predicted time, learned while running.

One factor for prefill and one for decode, each the median of the latest ratios, so that wild ones don't move it.
It knows neither ranks nor clocks: seconds come from outside. The predictions are those of ``cost.py``.
"""

from bisect import bisect_left, insort
from collections import deque
from math import exp, isfinite, log

from pdrouter.core.cost import Profile, prefill_s, step_s

WINDOW = 41
"""Ratios that are kept (I9). Chosen: a lasting change shows after 21 of them and is followed to a few percent after 30,
though one in ten is wild; ratios that scatter by 30 % leave 6 % of scatter in their median (1.25 * 30 % / sqrt(41))."""

PRIOR = 5
"""Ratios that are assumed beside those seen. Chosen: the first five can't overthrow the profile, the sixth can."""

MAX_FACTOR = 32.0
"""Bounds of a factor, up and down. Chosen: what lies beyond is another unit or another model, and no speed."""

CLASS_STEP = 1.1
"""Factor between neighbouring classes: "geometric steps of about 10 %", few enough for a heap each (73)."""

_CLASS_STEP_LOG = log(CLASS_STEP)

_KEPT_STEPS = 0.9
"""How far, in steps, a factor may be from its class before it gets another. Chosen: above one half, so that noise at a
border doesn't make it flap (0.8 steps, 8 %, between going and coming back), below 1, so that a class is within 10 %."""

_USUAL_PROMPT_TOKENS = 1024
"""Prompt that is assumed for totals before any was seen. Chosen: about the mean of the Azure conversations of 2023."""

_MIX_KEPT = 1 - 1 / WINDOW
"""What is kept of the mean prompt with each one seen. Chosen: it remembers about as long as a factor."""

_MIX_STEP = 3
"""One prompt in so many is looked at. Chosen: a look takes a microsecond, and means need no more."""


def class_factor(number: int) -> float:
    """Return the factor that a class stands for, within 10 % of the factors that are in it."""
    return CLASS_STEP**number


class _Factor:
    """Median of the latest ratios of observed to predicted time, with its class. O(WINDOW) time and memory.

    While few were seen, ``PRIOR`` more are assumed: the median of its ``peers``, or 1 where it has none.
    """

    __slots__ = ("_latest", "_peers", "_sorted", "number", "value")

    def __init__(self, peers: "_Factor | None" = None) -> None:
        self._latest: deque[float] = deque(maxlen=WINDOW)  # logarithms, so that half and double weigh the same
        self._sorted: list[float] = []
        self._peers = peers
        self.value = 1.0
        self.number = 0
        self.refresh()

    def add(self, observed_s: float, predicted_s: float) -> None:
        """Take in one observation; a ratio that isn't a positive number is none."""
        ratio = observed_s / predicted_s if predicted_s > 0 else 0.0
        if not (isfinite(ratio) and ratio > 0):
            return
        latest, ordered = self._latest, self._sorted
        if len(latest) == WINDOW:
            del ordered[bisect_left(ordered, latest[0])]
        ratio_log = log(min(max(ratio, 1 / MAX_FACTOR), MAX_FACTOR))
        latest.append(ratio_log)
        insort(ordered, ratio_log)
        if self._peers is not None:
            self._peers.add(observed_s, predicted_s)
        self.refresh()

    def refresh(self) -> None:
        """Judge anew by what was seen, and by what peers are like now."""
        seen = len(self._sorted)
        assumed = min(PRIOR, WINDOW - seen)
        if assumed:
            usual = 0.0 if self._peers is None else log(self._peers.value)
            start = bisect_left(self._sorted, usual)
            ordered = [*self._sorted[:start], *[usual] * assumed, *self._sorted[start:]]
        else:
            ordered = self._sorted
        count = seen + assumed
        median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
        self.value = exp(median)
        steps = median / _CLASS_STEP_LOG
        if abs(steps - self.number) > _KEPT_STEPS:
            self.number = round(steps)


class Peers:
    """What the endpoints of one profile have in common: one that nobody has tried is likely to be like the others.

    Without this, the first endpoint that turns out faster than a profile which is too slow for all would get all
    requests, as the others had no chance to show the same.
    """

    __slots__ = ("decode", "prefill")

    def __init__(self) -> None:
        self.prefill = _Factor()
        self.decode = _Factor()

    @property
    def classes(self) -> tuple[int, int]:
        """Class of each factor; when one changes, all that were learned from few observations change with it."""
        return self.prefill.number, self.decode.number


class Speed:
    """How much slower (above 1) or faster than its profile an endpoint is; one for all its ranks.

    Less than half of the observations being wild, a factor stays among the others. Nothing is learned from seconds
    that aren't a positive number.
    """

    __slots__ = ("_decode", "_mix", "_prefill", "_prompts", "_together", "_totals", "profile")

    def __init__(self, profile: Profile, peers: Peers | None = None) -> None:
        self.profile = profile
        self._prefill = _Factor(None if peers is None else peers.prefill)
        self._decode = _Factor(None if peers is None else peers.decode)
        self._together = _Factor()
        self._totals: tuple[float, float] | None = None
        self._prompts = 0
        # Of the prefills seen lately: how many, their uncached tokens, and their time without the fixed part.
        usual_s = prefill_s(profile, _USUAL_PROMPT_TOKENS, 0) - profile.prefill_base_s
        self._mix = (1.0, float(_USUAL_PROMPT_TOKENS), usual_s)

    @property
    def prefill_factor(self) -> float:
        """Observed over predicted prefill time."""
        return self._prefill.value

    @property
    def decode_factor(self) -> float:
        """Observed over predicted time of a decode step."""
        return self._decode.value

    @property
    def together_factor(self) -> float:
        """Observed over predicted time of a step in which ranks read together."""
        return self._together.value

    @property
    def prefill_class(self) -> int:
        """Class of the prefill factor, 0 for 1.0; it changes rarely (``class_factor``)."""
        return self._prefill.number

    @property
    def decode_class(self) -> int:
        """Class of the decode factor, 0 for 1.0; it changes rarely (``class_factor``)."""
        return self._decode.number

    @property
    def tells_totals(self) -> bool:
        """Whether the engine has told totals, so that prompts are worth noting."""
        return self._totals is not None

    def refresh(self) -> None:
        """Judge anew, after peers were."""
        self._prefill.refresh()
        self._decode.refresh()

    def saw_prefill(self, uncached_tokens: float, past_tokens: float, seconds: float) -> None:
        """Take in one prefill, timed from when its rank could start it."""
        if isfinite(uncached_tokens) and uncached_tokens >= 1 and isfinite(past_tokens):
            self._prefill.add(seconds, prefill_s(self.profile, uncached_tokens, past_tokens))

    def saw_together(self, counted_s: float, predicted_s: float) -> None:
        """Take in how long a prompt took by a clock that goes by ``together_factor``, and how long it should have."""
        self._together.add(counted_s * self._together.value, predicted_s)

    def saw_prompt(self, uncached_tokens: int, past_tokens: int) -> None:
        """Take note of what prompts are like: totals say nothing of that."""
        self._prompts += 1
        if self._prompts % _MIX_STEP:
            return
        count, tokens, work_s = self._mix
        predicted_s = prefill_s(self.profile, uncached_tokens, past_tokens)
        self._mix = (
            count * _MIX_KEPT + 1,
            tokens * _MIX_KEPT + uncached_tokens,
            work_s * _MIX_KEPT + predicted_s - self.profile.prefill_base_s,
        )

    def saw_prefill_totals(self, uncached_tokens: float, busy_s: float) -> None:
        """Take in an engine's running totals: tokens computed in prefills and the time that it took.

        They are compared with those of an earlier call, at least a chunk ago; totals that fell start anew. How many
        steps there were isn't told: at least one for each chunk, at most one for each prompt of the size seen lately.
        A factor that explains the time within these limits is confirmed, another is taken to the nearer one.
        Source: SGLang's ``total_prefill_uncached_tokens`` and ``total_prefill_busy_us``, summed over ranks.
        """
        if not (isfinite(uncached_tokens) and isfinite(busy_s) and uncached_tokens >= 0 and busy_s >= 0):
            return
        old_tokens, old_busy_s = self._totals or (uncached_tokens, busy_s)
        tokens, seconds = uncached_tokens - old_tokens, busy_s - old_busy_s
        is_anew = self._totals is None or tokens < 0 or seconds < 0
        if not is_anew and tokens < self.profile.chunk_tokens:
            return
        self._totals = (uncached_tokens, busy_s)
        if is_anew:
            return
        prompts_seen, tokens_seen, work_seen_s = self._mix
        work_s = tokens * work_seen_s / tokens_seen
        fewest_steps = tokens / self.profile.chunk_tokens
        most_steps = max(fewest_steps, tokens * prompts_seen / tokens_seen)
        least_s = work_s + fewest_steps * self.profile.prefill_base_s
        most_s = work_s + most_steps * self.profile.prefill_base_s
        predicted_s = min(max(seconds / self.prefill_factor, least_s), most_s)
        self._prefill.add(seconds, predicted_s)

    def saw_step(self, requests: float, kv_tokens: float, seconds: float) -> None:
        """Take in the time of one decode step of a rank that held so many requests and KV tokens."""
        self._decode.add(seconds, step_s(self.profile, requests, kv_tokens))
