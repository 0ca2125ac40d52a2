"""Aims: which figures are compared, and when one is met."""

from typing import Any

from tests.sim.study.builders import make_found

from pdrouter.sim.study.aims import AIMS, BEST_AIMS, LEAST_GOODPUT, lines_of
from pdrouter.sim.study.scenes import OURS, QUICK


def found_with(ours: dict[str, Any]) -> list[bool]:
    """Return which aims are met if peers have 10 s and one good answer in a second, and we have this."""
    theirs = {"ttft_p50_s": 10.0, "ttft_p90_s": 10.0, "ttft_p99_s": 10.0, "goodput_per_s": 1.0}
    found = make_found(QUICK, lambda policy: theirs | (ours if policy == OURS else {}))
    return [line.is_met for line in lines_of(found)]


def test_each_aim_has_a_line() -> None:
    """One for each ratio of times, to one peer and to the best, one for good answers."""
    assert len(found_with({})) == len(AIMS) + len(BEST_AIMS) + 1


def test_an_aim_is_met_at_its_ratio_and_not_above() -> None:
    """A share of 0.66 meets what allows 0.67 or more; good answers count the other way."""
    met = found_with({"ttft_p90_s": 6.6, "ttft_p99_s": 10.0, "goodput_per_s": LEAST_GOODPUT})
    assert met == [aim.most >= 0.66 for aim in AIMS] + [True] * (len(BEST_AIMS) + 1)
    met = found_with({"ttft_p90_s": 1.0, "ttft_p99_s": 10.6, "goodput_per_s": LEAST_GOODPUT - 0.01})
    assert met == [True] * len(AIMS) + [aim.percent != 99 or aim.most > 1.06 for aim in BEST_AIMS] + [False]


def test_tails_and_goodput_are_held_against_the_best_peer() -> None:
    """One peer that is better than the others is the one that counts."""

    def figures(policy: str) -> dict[str, Any]:
        return {"ttft_p99_s": 2.0 if policy == "dynamo" else 5.0, "goodput_per_s": 3.0 if policy == "llm_d_pd" else 2.0}

    words = [str(line) for line in lines_of(make_found(QUICK, figures))]
    assert "90 %, TTFT p99, the best peer (dynamo): 5.00 / 2.00 = 2.50, at most 1.1: short" in words[-2]
    assert "the best peer (llm_d_pd): 2.00 / 3.00 = 0.67, at least 1.15: short" in words[-1]
