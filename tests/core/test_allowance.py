"""What may be taken at once, and over time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.core.allowance import Allowance

INFINITY = float("inf")


def test_it_starts_full_and_refills() -> None:
    """As many as it holds at once, then one for each that time brings."""
    allowance = Allowance(3, 2)
    assert [allowance.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert allowance.ready_at_s(10.0) == 10.5
    assert not allowance.take(10.4)
    assert allowance.take(10.5)
    assert allowance.left(100.0) == 3


def test_shares_add_up() -> None:
    """Five fifths are one; it holds no more than it may."""
    allowance = Allowance(1, 0)
    assert allowance.take(0.0)
    assert allowance.ready_at_s(0.0) == INFINITY
    for _ in range(5):
        assert not allowance.take(1.0)
        allowance.add(0.2, 1.0)
    assert allowance.ready_at_s(1.0) == 1.0
    allowance.add(5, 1.0)
    assert [allowance.take(1.0), allowance.take(1.0)] == [True, False]


def test_time_that_goes_back_brings_nothing() -> None:
    """A moment before the last one is taken as the last one."""
    allowance = Allowance(1, 1)
    assert allowance.take(5.0)
    assert allowance.left(4.0) == 0
    assert allowance.left(5.5) == pytest.approx(0.5)


def test_less_than_one_is_never_ready() -> None:
    """One that can't hold one says so."""
    assert Allowance(0.5, 1).ready_at_s(0.0) == INFINITY


@pytest.mark.parametrize("now_s", [0.1, 1e6, 1e9])
def test_rounding_gives_nothing_away(now_s: float) -> None:
    """At the moment that it names one is there, and only one, however late it is."""
    allowance = Allowance(1, 1234.5)
    assert allowance.take(now_s)
    for _ in range(1000):
        ready_s = allowance.ready_at_s(now_s)
        assert ready_s > now_s
        now_s = ready_s
        assert allowance.take(now_s)


@given(
    most=st.integers(1, 20),
    per_s=st.floats(0.01, 10),
    gaps_s=st.lists(st.floats(0, 3), min_size=1, max_size=50),
)
def test_never_more_than_its_rate(most: int, per_s: float, gaps_s: list[float]) -> None:
    """Over any time: what it holds and what that time brings; and at the moment it names, one is there."""
    allowance = Allowance(most, per_s)
    now_s, taken = 0.0, 0
    for gap_s in gaps_s:
        now_s += gap_s
        while allowance.take(now_s):
            taken += 1
        assert taken <= most + per_s * now_s + 1e-6
        assert 0 <= allowance.left(now_s) < 1
        ready_s = allowance.ready_at_s(now_s)
        assert ready_s > now_s
    assert allowance.take(allowance.ready_at_s(now_s))
