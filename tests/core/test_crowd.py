"""Who has to go where no more may wait."""

from collections import Counter

from pdrouter.core.crowd import Crowd
from pdrouter.core.line import Line, Place, Waiting

from .waiting import waiting


def crowd_of(*ones: Waiting[str]) -> tuple[Crowd[str], list[Place[str]]]:
    """Return a crowd of requests that came one after another, and their places."""
    crowd: Crowd[str] = Crowd()
    line: Line[str] = Line(0.1, Counter())
    places = [line.join(one, float(now_s)) for now_s, one in enumerate(ones)]
    for place in places:
        crowd.join(place)
    return crowd, places


def goes(crowd: Crowd[str], arrival: Waiting[str]) -> str | None:
    """Return who has to go for an arrival."""
    place = crowd.least_deserving(arrival)
    return None if place is None else place.waiting.request


def test_the_youngest_of_the_lowest_priority_goes() -> None:
    """For an arrival of a higher one, whatever the work."""
    crowd, _ = crowd_of(waiting("a", 9.0, priority=1), waiting("b", 1.0, priority=1), waiting("c", 5.0, priority=2))
    assert goes(crowd, waiting("new", priority=2)) == "b"
    assert goes(crowd, waiting("new", priority=1)) is None
    assert goes(crowd, waiting("new", priority=0)) is None


def test_the_tenant_with_the_most_goes() -> None:
    """For one that has fewer, of the same priority; never back and forth."""
    ones = [waiting("a", tenant="a"), *(waiting(f"b{n}", tenant="b") for n in range(3))]
    crowd, places = crowd_of(*ones)
    assert goes(crowd, waiting("new", tenant="new")) == "b2"
    assert goes(crowd, waiting("new", tenant="a")) == "b2"
    assert goes(crowd, waiting("new", tenant="b")) is None
    crowd.leave(places[3])
    assert goes(crowd, waiting("new", tenant="a")) is None


def test_most_is_by_weight() -> None:
    """A tenant with four times the weight may have four times as many."""
    ones = [*(waiting(f"a{n}", tenant="a", weight=4.0) for n in range(4)), *(waiting(f"b{n}") for n in range(2))]
    crowd, _ = crowd_of(*ones)
    assert goes(crowd, waiting("new", tenant="new")) == "b1"
    assert goes(crowd, waiting("new", tenant="a", weight=4.0)) == "b1"


def test_nobody_is_there() -> None:
    """Then it is the arrival that can't stay; who has left isn't counted."""
    crowd, places = crowd_of(waiting("a", priority=-5))
    crowd.leave(places[0])
    assert goes(crowd, waiting("new", priority=99)) is None
