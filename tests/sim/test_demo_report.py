"""Figures of the demo: percentiles, verdict, imbalance."""

import pytest

from pdrouter.sim.demo_client import Answer
from pdrouter.sim.demo_loads import EndpointLoads, Imbalance, RankLoad, prefilled_imbalance
from pdrouter.sim.demo_report import RunResult, last_line, percentile, shown_s


def result(*answers: Answer, planned: int, ledger: float | None = 0) -> RunResult:
    """Run with these answers."""
    run = RunResult("title")
    run.planned, run.ledger = planned, ledger
    for answer in answers:
        run.add(answer)
    return run


RIGHT = Answer(ttft_s=0.5, token_s=0.01)
WRONG = Answer(problem="wrong text")


@pytest.mark.parametrize(
    ("runs", "line"),
    [
        ([result(RIGHT, planned=1)], "demo: ok requests=1 failed=0 ledger=0"),
        ([result(RIGHT, planned=1), result(RIGHT, RIGHT, planned=2)], "demo: ok requests=3 failed=0 ledger=0"),
        ([result(RIGHT, planned=1), result(WRONG, planned=1)], "demo: FAILED requests=2 failed=1 ledger=0"),
        ([result(RIGHT, planned=1, ledger=12.0)], "demo: FAILED requests=1 failed=0 ledger=12"),
        ([result(RIGHT, planned=1, ledger=0.3)], "demo: FAILED requests=1 failed=0 ledger=1"),
        ([result(RIGHT, planned=1, ledger=None)], "demo: FAILED requests=1 failed=0 ledger=unknown"),
        ([result(RIGHT, planned=2)], "demo: FAILED requests=2 failed=0 ledger=0"),
        ([result(planned=0)], "demo: FAILED requests=0 failed=0 ledger=0"),
    ],
)
def test_last_line(runs: list[RunResult], line: str) -> None:
    """It is ok if every answer came and was right and no ledger holds anything."""
    assert last_line(runs) == line


def test_giving_up() -> None:
    """Answers that never came have failed, and giving up is a failure even if all came."""
    run = result(RIGHT, planned=4)
    run.give_up("too late")
    assert run.failed == 3
    run = result(planned=0)
    run.give_up("no start")
    assert run.failed == 1


def test_percentile() -> None:
    """Nearest rank; nothing has none."""
    values = [float(i) for i in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99)] == [50, 90, 99]
    assert percentile([7.0], 0.99) == 7
    assert percentile([], 0.5) is None


def test_times_shown() -> None:
    """Times have three digits or so and a unit."""
    assert [shown_s(s) for s in (None, 0.0123, 0.345, 1.5)] == ["-", "12.3 ms", "345 ms", "1.50 s"]


def loads(role: str, *tokens: int) -> EndpointLoads:
    """Endpoint whose ranks hold, and have prefilled, these tokens."""
    ranks = [
        RankLoad(
            dp_rank=index,
            num_running_reqs=0,
            num_waiting_reqs=0,
            num_waiting_uncached_tokens=0,
            num_used_tokens=0,
            num_total_tokens=held,
            capacity_tokens=1000,
            total_prefill_uncached_tokens=held,
        )
        for index, held in enumerate(tokens)
    ]
    return EndpointLoads(role, role, ranks)


def test_imbalance() -> None:
    """Max over mean by role, over all endpoints of it, averaged over samples; nothing held is unknown."""
    imbalance = Imbalance()
    imbalance.add([loads("prefill", 10, 30), loads("prefill", 0, 0), loads("decode", 5, 5), loads("decode")])
    imbalance.add([loads("prefill", 0, 0), loads("prefill", 0, 40), loads("decode", 5, 5)])
    assert imbalance.of("prefill") == pytest.approx((30 + 40) / (10 + 10))
    assert imbalance.of("decode") == 1
    assert imbalance.of("regular") is None


def test_prefilled_imbalance() -> None:
    """Work done by the busiest prefill rank over that of the mean one."""
    assert prefilled_imbalance([loads("prefill", 10, 30), loads("prefill", 20, 20), loads("decode", 99)]) == 1.5
    assert prefilled_imbalance([loads("prefill", 0)]) is None
    assert prefilled_imbalance([]) is None
