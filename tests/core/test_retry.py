"""How often and how soon a request may be tried again."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.core.retry import RetryBudget, RetryOptions, backoff_s

OPTIONS = RetryOptions(
    initial_backoff_s=0.05,
    max_backoff_s=30.0,
    backoff_multiplier=1.5,
    jitter=0.2,
    budget_share=0.2,
    budget_per_s=0.0,
    budget_most=10.0,
)


@pytest.mark.parametrize(
    ("failures", "chance", "expected_s"),
    [
        (1, 0.5, 0.05),
        (2, 0.5, 0.075),
        (3, 0.5, 0.1125),
        (1, 0.0, 0.04),
        (1, 1.0, 0.06),
        (100, 0.5, 30.0),
        (100, 0.0, 24.0),
        (100_000, 0.5, 30.0),
    ],
)
def test_delays_grow_and_spread(failures: int, chance: float, expected_s: float) -> None:
    """Each half as long again as the one before, at most half a minute, a fifth either way."""
    assert backoff_s(OPTIONS, failures, chance) == pytest.approx(expected_s)


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_a_delay_is_within_bounds(failures: int, chance: float) -> None:
    """Never negative, never more than the longest and its jitter."""
    assert 0 < backoff_s(OPTIONS, failures, chance) <= 36.0


@pytest.mark.invariant("I9")
def test_retries_are_a_share_of_requests() -> None:
    """When everything fails, a fifth of the requests is tried again, apart from what was saved up."""
    budget = RetryBudget(OPTIONS)
    for _ in range(1000):
        budget.earn(1.0, 1)
        budget.spend(1.0)
    assert 200 <= budget.spent <= 210
    assert budget.spent + budget.refused == 1000


def test_a_lonely_request_may_be_tried_again() -> None:
    """Time alone brings a few, so that a quiet router isn't without any."""
    budget = RetryBudget(msgspec.structs.replace(OPTIONS, budget_share=0.0, budget_per_s=2.0, budget_most=2.0))
    assert [budget.spend(0.0) for _ in range(3)] == [True, True, False]
    assert budget.spend(0.5)
    assert not budget.spend(0.5)
