"""Figures of runs, worked out by hand."""

import pytest

from pdrouter.sim.virtual.figures import Objective, estimate, estimates, figures_of, percentile
from pdrouter.sim.virtual.run import Answer, Run


def make_run() -> Run:
    """Return a run of three answers and a rejection, on two prefill ranks (0, 1) and two decode ranks (2, 3)."""
    run = Run(4, 10.0, 2, 2)
    run.rejected["queue_full"] = 1
    run.answers = [
        Answer(0, 0.0, 1.0, 3.0, 1000, 41, 0, 0, 2),
        Answer(2, 1.0, 4.0, 9.0, 1500, 101, 500, 1, 2),
        Answer(1, 2.0, 2.0, 2.0, 500, 1, 0, 0, 3),
    ]
    return run


def test_figures() -> None:
    """Percentiles, good answers, hits and imbalance."""
    figures = figures_of(make_run(), [1.5, 2.0, 3.0, 1.0], Objective(ttft_s=1.0, ttft_s_per_prompt_token=0.001))
    assert (figures.requests, figures.rejected) == (4, 1)
    assert (figures.ttft_p50_s, figures.ttft_p90_s) == (2.0, 4.0)
    assert figures.ttft_mean_s == pytest.approx(7 / 3)
    assert (figures.token_p50_s, figures.token_p99_s) == (0.05, 0.05)
    assert (figures.end_to_end_p50_s, figures.end_to_end_p99_s) == (3.0, 9.0)
    assert (figures.slowdown_p50, figures.slowdown_p99) == (2.0, 3.0)
    # The first is good, the second is late (4 > 2.5), the third too (2 > 1.5), the fourth was rejected.
    assert figures.attainment == 0.25
    assert figures.goodput_per_s == pytest.approx(0.1)
    assert figures.hit_rate == pytest.approx(500 / 3000)
    assert figures.prefill_imbalance == pytest.approx(1500 / 1250)
    assert figures.decode_imbalance == pytest.approx(142 / 71.5)


def test_an_objective_has_two_sides() -> None:
    """A late first token or slow others make an answer bad."""
    answer = make_run().answers[0]
    assert Objective(ttft_s=0.0, ttft_s_per_prompt_token=0.001, token_s=0.05).is_met(answer)
    assert not Objective(ttft_s=0.0, ttft_s_per_prompt_token=0.0009, token_s=0.05).is_met(answer)
    assert not Objective(token_s=0.049).is_met(answer)


def test_a_run_without_answers_has_figures() -> None:
    """All rejected: nothing is good, nothing is divided by zero."""
    run = Run(2, 10.0, 1, 1)
    run.rejected["queue_full"] = 2
    figures = figures_of(run, [1.0, 1.0], Objective())
    assert (figures.attainment, figures.ttft_p99_s, figures.hit_rate, figures.prefill_imbalance) == (0, 0, 0, 1)


def test_percentiles_are_nearest_ranks() -> None:
    """Of ten values the fifth, ninth and tenth."""
    values = [float(i) for i in range(1, 11)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99)] == [5, 9, 10]
    assert percentile([], 0.5) == 0


def test_intervals_are_students() -> None:
    """Five values around 10 with a deviation of 1: 2.776 / sqrt(5); one value alone says nothing of its error."""
    values = [10.0 + delta for delta in (-1.264911064, -0.632455532, 0.0, 0.632455532, 1.264911064)]
    found = estimate(values)
    assert found.mean == pytest.approx(10)
    assert found.half_width == pytest.approx(2.776 / 5**0.5, rel=1e-6)
    assert estimate([3.0]).half_width is None
    many = estimate([float(i % 2) for i in range(100)])
    assert many.half_width == pytest.approx(1.96 * 0.5025 / 10, rel=1e-3)


def test_estimates_are_over_seeds() -> None:
    """Every figure has one."""
    alone_s = [1.0] * 4
    found = estimates([figures_of(make_run(), alone_s, Objective()) for _ in range(3)])
    assert found["ttft_p90_s"] == estimate([4.0, 4.0, 4.0])
    assert found["rejected"].mean == 1
