"""Why nobody can serve a request, in words."""

import pytest

from pdrouter.core.fleet import BREAKER, DRAIN, HEALTH, Disaggregation, Endpoint, Fleet
from pdrouter.core.reasons import why_nobody
from tests.core.builders import decode, prefill, regular


def fleet_of(*endpoints: Endpoint) -> Fleet:
    """Return a fleet of these."""
    fleet = Fleet(Disaggregation.AUTO, takes_any=True)
    for endpoint in endpoints:
        fleet.put(endpoint)
    return fleet


def test_each_with_its_own_cause() -> None:
    """Of the role that lacks only: a breaker, a drain, both."""
    fleet = fleet_of(*(prefill(name, model="m") for name in "abc"), decode("d", model="m"), prefill("x", model="n"))
    fleet.set_ready("a", "breaker open (10 failures in a row)", BREAKER)
    fleet.set_ready("b", "draining", DRAIN)
    fleet.set_ready("c", "3 health checks failed in a row", HEALTH)
    fleet.set_ready("c", "draining", DRAIN)
    assert why_nobody(fleet, "m") == (
        "no prefill endpoint of model 'm' is ready (3 known: a breaker open (10 failures in a row); b draining; "
        "c 3 health checks failed in a row; draining)"
    )


@pytest.mark.parametrize(
    ("endpoints", "words"),
    [
        ([], "no endpoint of model 'm' is known"),
        ([prefill("p", model="other")], "no endpoint of model 'm' is known"),
        ([decode("d")], "no prefill endpoint of model 'm' is known"),
        ([regular("w")], "no ready endpoint of model 'm' can do this (1 known)"),
    ],
)
def test_whoever_isnt_there(endpoints: list[Endpoint], words: str) -> None:
    """Is named as such."""
    assert why_nobody(fleet_of(*endpoints), "m") == words
