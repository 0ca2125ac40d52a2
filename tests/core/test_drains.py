"""The drain rate of endpoints."""

import pytest

from pdrouter.core.drains import WINDOW_S, DrainRates


def test_the_rate_is_of_the_last_minute() -> None:
    """What is older has gone."""
    drains = DrainRates()
    drains.add("e")
    for now_s in (0.0, 0.9, 30.0):
        drains.ended("e", now_s)
    assert [drains.rate_per_s("e", now_s) * WINDOW_S for now_s in (30.0, 59.9, 60.0, 89.9, 90.0)] == [3, 3, 1, 1, 0]


def test_unknown_endpoints_are_not_counted() -> None:
    """What ends on one that has left leaves nothing behind; one that is described anew goes on."""
    drains = DrainRates()
    drains.ended("e", 0.0)
    assert drains.rate_per_s("e", 0.0) == 0
    drains.add("e")
    drains.ended("e", 0.0)
    drains.add("e")
    assert drains.rate_per_s("e", 0.0) == 1 / WINDOW_S
    drains.remove("e")
    drains.remove("e")
    drains.ended("e", 0.0)
    assert drains.rate_per_s("e", 0.0) == 0


@pytest.mark.invariant("I9")
def test_a_minute_has_sixty_seconds() -> None:
    """However many end for however long."""
    drains = DrainRates()
    drains.add("e")
    for tenth in range(5000):
        drains.ended("e", tenth / 10)
    assert len(drains._endpoints["e"]._counts) == WINDOW_S
    assert drains.rate_per_s("e", 499.9) == 10
