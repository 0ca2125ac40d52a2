"""Decisions explain themselves, briefly."""

import pytest

from pdrouter.core.decision import MAX_SHOWN, Why
from pdrouter.core.load import LoadView
from pdrouter.core.policies import POLICIES
from pdrouter.core.policies.base import Question

from .builders import make_policy_options, prefill


@pytest.mark.parametrize(
    ("why", "words"),
    [
        (Why("random", "uniform choice"), "random: uniform choice"),
        (Why("client", "the client's own rank", is_notable=True), "client: the client's own rank"),
    ],
)
def test_a_reason_is_a_sentence(why: Why, words: str) -> None:
    """The policy and its rule."""
    assert why.sentence() == words


def make_view(endpoints: int) -> LoadView:
    """Return a view of so many prefill endpoints."""
    view = LoadView(report_max_age_s=10.0, visible_delay_s=0.0, history_events=16)
    for number in range(endpoints):
        view.add(prefill(f"p{number}", dp_size=2))
    return view


def test_a_reason_names_what_was_seen() -> None:
    """Endpoints by address, ranks by number, each with its value in the policy's unit."""
    pool = list(make_view(2).endpoints.values())
    assert Why("x", "y", pool, [1.5, 20.0]).sentence() == "x: y (p0=1.5, p1=20)"
    assert Why("x", "y", pool[0].ranks, [1.5, 20.0]).sentence() == "x: y (rank 0=1.5, rank 1=20)"


@pytest.mark.invariant("I9")
def test_a_reason_is_bounded() -> None:
    """Of a large fleet it names the first few and says how many more there were."""
    pool = list(make_view(MAX_SHOWN + 5).endpoints.values())
    question = Question(("x",), pool[0].endpoint.role, 100, {}, 50.0, 0.0)
    sentence = POLICIES["least_request"](make_policy_options(1)).choose(question, pool).why.sentence()
    assert sentence.count("=") == MAX_SHOWN
    assert sentence.endswith(", 5 more)")


def test_a_reason_outlives_its_candidates() -> None:
    """What was seen stays said after the endpoints are gone."""
    view = make_view(1)
    why = Why("x", "y", list(view.endpoints.values()), [3.0])
    view.remove("p0")
    assert why.sentence() == "x: y (p0=3)"
