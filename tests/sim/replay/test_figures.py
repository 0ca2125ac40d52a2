"""From what a client saw to figures, notes and lines."""

import csv
from pathlib import Path
from typing import Any

from pdrouter.sim.replay.caller import Seen
from pdrouter.sim.replay.figures import Measure, Places, notes_of, result_of, write_requests
from pdrouter.sim.replay.player import Played, Sent
from pdrouter.sim.virtual.figures import Objective
from pdrouter.sim.virtual.trace import Request, Trace

START_S = 1000.0
PLACES = Places(["p:1; rank=0", "p:1; rank=1"], ["d:1; rank=0"])
MEASURE = Measure("5/s", "live", 0, 1.0, Objective())


def sent(number: int, first_s: float = 0.5, token_s: float = 0.01, late_s: float = 0.0, **changes: Any) -> Sent:
    """Return a request due so many seconds after the start, whose answer has eleven tokens."""
    seen = Seen()
    request = Request(float(number), 100, 10)
    due_s = START_S + number
    fields: dict[str, Any] = {
        "first_s": due_s + first_s, "last_s": due_s + first_s + 10 * token_s, "prompt_tokens": 110,
        "output_tokens": 11, "cached_tokens": 55, "prefill": "p:1; rank=1", "decode": "d:1; rank=0",
    }  # fmt: skip
    for name, value in (fields | changes).items():
        setattr(seen, name, value)
    return Sent(number, request, due_s, due_s + late_s, seen)


def played(*all_sent: Sent, **changes: Any) -> Played:
    """Return a replay."""
    fields: dict[str, Any] = {"held": 0, "cut": 0, "lags_s": [0.001]} | changes
    return Played(all_sent, START_S, **fields)


def trace(count: int) -> Trace:
    """Return a trace of one request a second."""
    return Trace(requests=[Request(float(n), 100, 10) for n in range(count)], span_s=float(count), block_tokens=64)


def test_figures_are_those_of_a_simulation() -> None:
    """Times from when requests were due, lengths as the endpoint counts them, ranks by the router's words."""
    result = result_of(played(*[sent(n, late_s=0.3) for n in range(10)]), trace(10), PLACES, MEASURE)
    figures = result.figures
    assert (result.title, result.policy, result.rate_per_s) == ("5/s", "live", 1.0)
    assert (figures.requests, figures.rejected, figures.attainment, figures.goodput_per_s) == (10, 0, 1.0, 1.0)
    assert (round(figures.ttft_p50_s, 6), round(figures.token_p99_s, 6)) == (0.5, 0.01)
    assert round(figures.end_to_end_p50_s, 6) == 0.6
    assert (figures.hit_rate, figures.prefill_imbalance, figures.decode_imbalance) == (0.5, 2.0, 1.0)
    assert figures.slowdown_p50 is figures.preemptions is None
    assert result.curves is not None
    assert sorted(map(sum, result.curves.prefill_work)) == [0, 550]


def test_times_are_the_engines_own() -> None:
    """Of emulated engines that are faster than life."""
    figures = result_of(played(sent(0)), trace(1), PLACES, MEASURE._replace(speed=4.0)).figures
    assert (round(figures.ttft_p50_s, 6), round(figures.token_p50_s, 6)) == (2.0, 0.04)


def test_failures_are_no_answers() -> None:
    """They count against the objective and are told by cause; so is what came late or was held back."""
    some = played(sent(0), sent(1, problem="429 queue_full"), sent(2, problem="timeout"), sent(3, problem="timeout"),
                  held=7, cut=2)  # fmt: skip
    figures = result_of(some, trace(10), PLACES, MEASURE).figures
    assert (figures.requests, figures.rejected, figures.attainment) == (4, 3, 0.25)
    notes = "\n".join(notes_of(some, 10))
    for words in ("4 of 10 requests ended", "7 requests were held back", "stopped: 2 requests", "failed: 2 x timeout"):
        assert words in notes
    assert "prompts 1.100, answers 1.100" in notes


def test_lateness_is_told() -> None:
    """How late the client was, which is not the endpoint's doing."""
    (first, *_) = notes_of(played(*[sent(n, late_s=n / 1000) for n in range(101)]), 101)
    assert "sent 50.0 ms late (p50), 99.0 ms (p99), 100.0 ms at most" in first
    assert "1.0 ms late (p99)" in first
    late, prompt = ("\n".join(notes_of(played(*[sent(n, late_s=s) for n in range(9)]), 9)) for s in (0.2, 0.002))
    assert "couldn't keep up" in late
    assert "couldn't keep up" not in prompt


def test_what_is_not_told_is_not_known() -> None:
    """An engine tells no rank, and not every one what it had cached or how it counts."""
    untold: dict[str, Any] = {
        "prompt_tokens": None,
        "output_tokens": None,
        "cached_tokens": None,
        "prefill": "",
        "decode": "",
    }
    figures = result_of(played(sent(0, **untold)), trace(1), Places(), MEASURE).figures
    assert (figures.hit_rate, figures.prefill_imbalance, figures.decode_imbalance) == (None, None, None)
    assert round(figures.token_p50_s, 4) == round(0.1 / 9, 4)
    assert len(notes_of(played(sent(0, **untold)), 1)) == 1
    figures = result_of(played(sent(0, **untold)), trace(1), PLACES, MEASURE).figures
    assert figures.prefill_imbalance is None


def test_whoever_writes_alone_reads_too() -> None:
    """Where there is no pair, the prompt's work is on the rank that wrote."""
    result = result_of(played(sent(0, prefill=""), sent(1)), trace(2), PLACES, MEASURE)
    assert result.figures.prefill_imbalance == 1.5
    assert result.curves is not None
    assert sorted(map(sum, result.curves.prefill_work)) == [0, 55, 55]


def test_a_stopped_replay_stands_for_its_own_time() -> None:
    """Until the last request that ended."""
    result = result_of(played(sent(0), sent(4), cut=1), trace(100), PLACES, MEASURE)
    assert result.rate_per_s == 0.5


def test_nothing_but_failures() -> None:
    """Figures all the same."""
    figures = result_of(played(sent(0, problem="x", first_s=0.0)), trace(1), PLACES, MEASURE).figures
    assert (figures.attainment, figures.ttft_p99_s, figures.rejected) == (0.0, 0.0, 1)


def test_a_line_for_each_request(tmp_path: Path) -> None:
    """In the trace's order, in its time; what never came is empty."""
    write_requests(tmp_path / "r.csv", played(sent(1, late_s=0.002), sent(0, first_s=0.0, problem="x")), 2.0)
    with (tmp_path / "r.csv").open() as file:
        failed, answered = csv.DictReader(file)
    assert (failed["number"], failed["problem"]) == ("0", "x")
    assert (answered["ttft_s"], answered["end_to_end_s"], answered["late_s"]) == ("1.000000", "1.200000", "0.004000")
    assert (answered["prompt_tokens"], answered["prefill"], answered["problem"]) == ("110", "p:1; rank=1", "")
