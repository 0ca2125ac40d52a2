"""Figures of a run, and of several runs that differ by their seed alone: means with their confidence intervals.

Pure: values in, values out. How they look: ``report.py``.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import ceil, sqrt
from statistics import fmean, stdev

import msgspec

from pdrouter.sim.virtual.run import Answer, Run

SHARES = (0.5, 0.9, 0.99)
_SLOTS = 60

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z_975 = 1.96
"""97.5 % quantiles of Student's t for 1 to 10 degrees of freedom, and of the normal distribution beyond.
Source: standard tables."""


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must keep to be good: time to first token, and mean time of those behind it."""

    ttft_s: float = 2.0
    ttft_s_per_prompt_token: float = 0.001
    token_s: float = 0.05

    def is_met(self, answer: Answer) -> bool:
        """Whether an answer is good."""
        limit_s = self.ttft_s + self.ttft_s_per_prompt_token * answer.prompt_tokens
        return answer.ttft_s <= limit_s and answer.token_s <= self.token_s


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run. Units: seconds; shares of 1; goodput: good answers in a second of arrivals.

    ``slowdown`` is the time of a whole answer over that of the same request alone on the idle, warm fleet.
    ``*_imbalance`` is the busiest rank's tokens (computed for prompts, written for answers) over the mean rank's.
    ``None``: a live fleet doesn't tell it.
    """

    requests: int
    rejected: int
    preemptions: int | None
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    token_p50_s: float
    token_p90_s: float
    token_p99_s: float
    end_to_end_p50_s: float
    end_to_end_p90_s: float
    end_to_end_p99_s: float
    slowdown_p50: float | None
    slowdown_p90: float | None
    slowdown_p99: float | None
    attainment: float
    goodput_per_s: float
    hit_rate: float | None
    prefill_imbalance: float | None
    decode_imbalance: float | None


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """What a picture shows of one run.

    ``ttft_s`` and ``token_s`` are the 0th to the 100th percentile. ``prefill_work`` are uncached tokens of prompts by
    rank and slot of arrival, slots being equal parts of the arrivals' time; empty where no rank is known.
    """

    ttft_s: Sequence[float]
    token_s: Sequence[float]
    prefill_work: Sequence[Sequence[int]]
    slot_s: float


class Estimate(msgspec.Struct, frozen=True):
    """A mean over seeds, and half the width of its 95 % confidence interval; ``None`` from one seed alone."""

    mean: float
    half_width: float | None


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of the sorted ``values`` don't exceed (nearest rank); 0 of none."""
    return values[max(0, ceil(share * len(values)) - 1)] if values else 0.0


def figures_of(run: Run, alone_s: Sequence[float] | None, objective: Objective) -> Figures:
    """Return the figures of a run; ``alone_s`` is how long each request takes alone, if that is known."""
    answers = run.answers
    prompts = sum(answer.prompt_tokens for answer in answers)
    good = sum(map(objective.is_met, answers))
    percentiles: dict[str, float] = {}
    for name, values in (
        ("ttft_p{}_s", [answer.ttft_s for answer in answers]),
        ("token_p{}_s", [answer.token_s for answer in answers if answer.output_tokens > 1]),
        ("end_to_end_p{}_s", [answer.end_to_end_s for answer in answers]),
    ):
        values.sort()
        for share in SHARES:
            percentiles[name.format(round(share * 100))] = percentile(values, share)
    slowdowns = sorted(answer.end_to_end_s / alone_s[answer.number] for answer in answers) if alone_s else None
    slowdown = [None if slowdowns is None else percentile(slowdowns, share) for share in SHARES]
    return Figures(
        requests=run.planned,
        rejected=run.rejected.total(),
        preemptions=run.preemptions,
        ttft_mean_s=fmean([answer.ttft_s for answer in answers]) if answers else 0.0,
        slowdown_p50=slowdown[0],
        slowdown_p90=slowdown[1],
        slowdown_p99=slowdown[2],
        attainment=good / run.planned,
        goodput_per_s=good / run.span_s,
        hit_rate=sum(answer.cached_tokens for answer in answers) / prompts if prompts else 0.0,
        prefill_imbalance=_imbalance(
            run.prefill_places, ((a.prefill_place, a.prompt_tokens - a.cached_tokens) for a in answers)
        ),
        decode_imbalance=_imbalance(run.decode_places, ((a.decode_place, a.output_tokens) for a in answers)),
        **percentiles,
    )


def curves_of(run: Run) -> Curves:
    """Return what pictures show of a run."""
    slot_s = run.span_s / _SLOTS
    ranks = sorted({answer.prefill_place for answer in run.answers})
    row = {place: number for number, place in enumerate(ranks)}
    work = [[0] * _SLOTS for _ in range(run.prefill_places)]
    for answer in run.answers if run.prefill_places else ():
        slot = min(int(answer.at_s / slot_s), _SLOTS - 1)
        work[row[answer.prefill_place]][slot] += answer.prompt_tokens - answer.cached_tokens
    return Curves(
        ttft_s=_percentiles(sorted(answer.ttft_s for answer in run.answers)),
        token_s=_percentiles(sorted(answer.token_s for answer in run.answers if answer.output_tokens > 1)),
        prefill_work=work,
        slot_s=slot_s,
    )


def _percentiles(values: Sequence[float]) -> list[float]:
    return [percentile(values, share / 100) for share in range(101)]


def _imbalance(places: int, work: Iterable[tuple[int, int]]) -> float | None:
    if not places:
        return None
    total: dict[int, int] = defaultdict(int)
    for place, tokens in work:
        total[place] += tokens
    mean = sum(total.values()) / places
    return max(total.values()) / mean if mean else 1.0


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values and its 95 % confidence interval, by Student's t."""
    count = len(values)
    if count < 2:
        return Estimate(values[0], None)
    quantile = _T_975[count - 2] if count - 2 < len(_T_975) else _Z_975
    return Estimate(fmean(values), quantile * stdev(values) / sqrt(count))


def estimates(runs: Sequence[Figures]) -> dict[str, Estimate]:
    """Return every figure that is known of runs that differ by their seed alone."""
    known = {name: [getattr(run, name) for run in runs] for name in Figures.__struct_fields__}
    return {name: estimate([*map(float, values)]) for name, values in known.items() if None not in values}
