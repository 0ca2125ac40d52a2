"""AIBrix's scores of prefill and decode endpoints, as they grew after #1601; the lower one wins.

Source: vllm-project/aibrix, pkg/plugins/gateway/algorithms/pd_disaggregation.go (e3e10f9). Scores are finite: nothing
is divided by zero, and what a candidate doesn't tell is taken to be the mean of those that do.
"""

from collections.abc import Sequence
from statistics import fmean, stdev

from pdrouter.core.policies.base import Candidate, Question
from pdrouter.core.policies.measures import held_share, in_flight, kv_use, told

_LEAST_FREE = 0.1
"""Per cent of KV that count as free where none is."""

_COLD_START = 1.0
"""What a candidate without a report scores beside its own requests, while others have one."""


def allowed_counts(counts: Sequence[float], sigma: float) -> float:
    """Return the mean plus ``sigma`` (sample) deviations: candidates above are passed over."""
    return fmean(counts) + sigma * (stdev(counts) if len(counts) > 1 else 0.0)


def prefill_scores(question: Question, candidates: Sequence[Candidate], counts: Sequence[float]) -> list[float]:
    """Return ``(100 - match %) * 0.1 + count / max(1, greatest count)`` of each."""
    most = max(1.0, *counts)
    return [
        (100 - 100 * held_share(question, candidate)) * 0.1 + count / most
        for candidate, count in zip(candidates, counts, strict=True)
    ]


def decode_scores(candidates: Sequence[Candidate]) -> list[float]:
    """Return ``(running / max + 1 - throughput / max) / (free KV / max)`` of each.

    One that has no metric, while others have, scores 1 and the requests that we hold on it: a cold start.
    """
    has_metric = [tells_requests(c) for c in candidates]
    running = [c.comparable_requests for c in candidates]
    throughputs = _filled([throughput(c) for c in candidates])
    free = [max(_LEAST_FREE, float(round(100 - 100 * use))) for use in _filled([kv_use(c) for c in candidates])]
    most_running, most_throughput, most_free = max(1.0, *running), max(throughputs) or 1.0, max(free)
    return [
        _COLD_START + in_flight(candidates[i])
        if any(has_metric) and not has_metric[i]
        else (running[i] / most_running + 1 - throughputs[i] / most_throughput) / (free[i] / most_free)
        for i in range(len(candidates))
    ]


def tells_requests(candidate: Candidate) -> bool:
    """Whether each rank has a fresh report of its requests."""
    return told(candidate, lambda report: report.requests) is not None


def throughput(candidate: Candidate) -> float | None:
    """Return the tokens generated per second, ``None`` if that isn't told."""
    rates = told(candidate, lambda report: report.throughput_tokens_per_s)
    return None if rates is None else sum(rates)


def _filled(values: Sequence[float | None]) -> list[float]:
    known = [value for value in values if value is not None]
    mean = fmean(known) if known else 0.0
    return [mean if value is None else value for value in values]
