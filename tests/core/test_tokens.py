"""The token estimator: a rate for each model, learned from what engines count."""

import pytest

from pdrouter.core.tokens import TokenEstimator


def make_estimator() -> TokenEstimator:
    """Return an estimator of 4 bytes a token for at most two models."""
    return TokenEstimator(4.0, 2)


@pytest.mark.parametrize(("prompt_bytes", "tokens"), [(0, 1), (1, 1), (400, 100), (402, 100)])
def test_an_estimate_before_anything_is_known(prompt_bytes: int, tokens: int) -> None:
    """The configured rate, and at least one token."""
    assert make_estimator().estimate("m", prompt_bytes) == tokens


def test_a_rate_is_learned_by_model() -> None:
    """The mean weighs tokens, so that one long prompt outweighs many short ones."""
    estimator = make_estimator()
    estimator.learn("m", 30_000, 10_000)
    for _ in range(10):
        estimator.learn("m", 60, 10)
    assert estimator.bytes_per_token("m") == pytest.approx(3.03, abs=0.01)
    assert estimator.bytes_per_token("other") == 4.0


def test_the_mean_runs() -> None:
    """A change of language shows within some tens of long prompts."""
    estimator = make_estimator()
    for _ in range(50):
        estimator.learn("m", 40_000, 10_000)
    for _ in range(50):
        estimator.learn("m", 10_000, 10_000)
    assert estimator.bytes_per_token("m") == pytest.approx(1.0, abs=0.3)
    estimator.learn("m", 900_000, 300_000)
    assert estimator.bytes_per_token("m") == 3.0


@pytest.mark.parametrize(("prompt_bytes", "tokens"), [(100, 0), (100, -5), (100, 1), (10, 100), (0, 7)])
def test_a_count_beyond_belief_is_left_out(prompt_bytes: int, tokens: int) -> None:
    """Engines that count nothing or something else don't spoil the rate."""
    estimator = make_estimator()
    estimator.learn("m", prompt_bytes, tokens)
    assert estimator.bytes_per_token("m") == 4.0


def test_tokens_of_an_event_are_learned_slowly() -> None:
    """Engines may send several tokens at once."""
    estimator = make_estimator()
    assert estimator.event_tokens("m") == 1.0
    for _ in range(100):
        estimator.learn_event_tokens("m", 10, 40)
    assert estimator.event_tokens("m") == pytest.approx(4.0, abs=0.01)
    for events, tokens in ((0, 40), (-1, 40), (10, 9)):
        estimator.learn_event_tokens("m", events, tokens)
    assert estimator.event_tokens("m") == pytest.approx(4.0, abs=0.01)


@pytest.mark.invariant("I9")
def test_models_are_bounded() -> None:
    """Further ones are estimated with what is configured."""
    estimator = make_estimator()
    for model in ("a", "b", "c"):
        estimator.learn(model, 200, 100)
        estimator.learn_event_tokens(model, 10, 110)
    assert [estimator.bytes_per_token(m) for m in "abc"] == pytest.approx([2.78, 2.78, 4.0], abs=0.01)
    assert [estimator.event_tokens(m) for m in "abc"] == [2.0, 2.0, 1.0]


def test_one_short_prompt_doesnt_make_the_rate() -> None:
    """What was configured weighs like 64 tokens."""
    estimator = make_estimator()
    estimator.learn("m", 10, 10)
    assert 3.5 < estimator.bytes_per_token("m") < 4.0
