"""Expected lengths of answers."""

import pytest

from pdrouter.core.outputs import OutputEstimator

from .builders import facts


def test_a_mean_that_a_limit_bounds() -> None:
    """The mean of a model's answers, at most what the request allows, for each of its prompts."""
    outputs = OutputEstimator(100.0, 4)
    assert outputs.expected_tokens("m", facts()) == 100.0
    for _ in range(400):
        outputs.learn("m", 300)
    assert outputs.expected_tokens("m", facts()) == pytest.approx(300, rel=0.01)
    assert outputs.expected_tokens("m", facts(max_output_tokens=20)) == 20.0
    assert outputs.expected_tokens("m", facts(max_output_tokens=20, prompts=3)) == 60.0
    assert outputs.expected_tokens("m", facts(max_output_tokens=0)) == 1.0
    assert outputs.expected_tokens("other", facts()) == 100.0


@pytest.mark.invariant("I9")
def test_models_are_bounded() -> None:
    """Further ones are counted and expected to answer as configured; an answer without tokens teaches nothing."""
    outputs = OutputEstimator(100.0, 1)
    outputs.learn("a", 50)
    outputs.learn("a", 0)
    outputs.learn("b", 50)
    assert outputs.expected_tokens("a", facts()) == 99.0
    assert outputs.expected_tokens("b", facts()) == 100.0
    assert outputs.overflows == 1
