"""How much of a role breakers take out: a share, and nothing in panic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.core import events
from pdrouter.core.breaker import BreakerOptions
from pdrouter.core.ejections import EjectionOptions, Ejections, Name
from pdrouter.core.fleet import BREAKER, DRAIN, HEALTH, Disaggregation, Endpoint, Fleet
from pdrouter.core.ledger import RankKey
from pdrouter.core.router import Router
from pdrouter.errors import UpstreamClosed

from .builders import decide, decode, facts, make_options, make_router, prefill, regular

HALF = EjectionOptions(most=0.5, panic=0.5)
QUICK = BreakerOptions(failure_threshold=2, success_threshold=1, open_s=10.0, window_s=60.0, is_disabled=False)


def fleet_of(*endpoints: Endpoint, options: EjectionOptions = HALF) -> tuple[Fleet, Ejections]:
    """Return a fleet, all of it ready, and what its breakers may take out."""
    fleet = Fleet(Disaggregation.AUTO, takes_any=True)
    for endpoint in endpoints:
        fleet.put(endpoint)
    return fleet, Ejections(options, fleet)


def wish(fleet: Fleet, ejections: Ejections, name: Name, out: str | None = "open") -> None:
    """Let a breaker want something, and do what follows."""
    for changed, reason in list(ejections.wish(name, out)):
        fleet.set_ready(changed, reason, BREAKER)


def judge(fleet: Fleet, ejections: Ejections) -> None:
    """Do what follows from a change of the fleet."""
    for changed, reason in list(ejections.judge()):
        fleet.set_ready(changed, reason, BREAKER)


def out(fleet: Fleet) -> str:
    """Return the letters of the endpoints that aren't ready."""
    return "".join(endpoint.address for endpoint in fleet if not fleet.is_ready(endpoint.address))


@pytest.mark.parametrize(
    ("count", "most", "expected"), [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 1), (4, 0.5, 2), (10, 0.1, 1), (10, 1.0, 10)]
)
def test_a_share_is_taken_out_and_one_at_least(count: int, most: float, expected: int) -> None:
    """The first that asked; the others are counted, each once."""
    letters = "abcdefghij"[:count]
    fleet, ejections = fleet_of(*map(regular, letters), options=EjectionOptions(most, 0.0))
    for letter in letters:
        wish(fleet, ejections, letter)
        wish(fleet, ejections, letter, "open, still")
    assert out(fleet) == letters[:expected]
    assert ejections.counts["overflow"] == count - expected
    assert fleet.why_out("a") == "open, still"


def test_one_that_comes_in_makes_room_for_another() -> None:
    """The one that has asked for longest."""
    fleet, ejections = fleet_of(*map(regular, "abcd"))
    for letter in "abc":
        wish(fleet, ejections, letter)
    assert out(fleet) == "ab"
    wish(fleet, ejections, "a", None)
    assert out(fleet) == "bc"
    wish(fleet, ejections, "b", None)
    wish(fleet, ejections, "c", None)
    assert out(fleet) == ""
    assert ejections.is_idle


def test_roles_and_models_are_apart() -> None:
    """One that has lost its share leaves the others theirs."""
    fleet, ejections = fleet_of(
        *(prefill(f"p{n}", model="m") for n in range(2)),
        *(decode(f"d{n}", model="m") for n in range(2)),
        *(decode(f"e{n}", model="n") for n in range(2)),
    )
    for address in ("p0", "p1", "d0", "d1", "e0", "e1"):
        wish(fleet, ejections, address)
    assert out(fleet) == "p0d0e0"


def test_ranks_weigh_what_they_are_of_their_endpoint() -> None:
    """Of two endpoints of four ranks, four ranks may be out."""
    fleet, ejections = fleet_of(regular("a", dp_size=4), regular("b", dp_size=4))
    for rank in range(3):
        for address in "ab":
            wish(fleet, ejections, RankKey(address, rank))
    assert (list(fleet.ranks_out["a"]), list(fleet.ranks_out["b"])) == ([0, 1], [0, 1])
    assert ejections.counts["overflow"] == 2
    wish(fleet, ejections, RankKey("a", 0), None)
    assert (list(fleet.ranks_out["a"]), list(fleet.ranks_out["b"])) == ([1, 2], [0, 1])


@pytest.mark.parametrize("is_endpoint_first", [True, False])
def test_an_endpoint_that_is_out_with_its_ranks_is_out_once(is_endpoint_first: bool) -> None:
    """Of two endpoints, both may be out with all their ranks, in whatever order their breakers ask."""
    fleet, ejections = fleet_of(regular("a", dp_size=2), regular("b", dp_size=2), options=EjectionOptions(1.0, 0.0))
    names: list[Name] = [name for a in "ab" for name in (a, RankKey(a, 0), RankKey(a, 1))]
    for name in names if is_endpoint_first else reversed(names):
        wish(fleet, ejections, name)
    assert out(fleet) == "ab"
    assert (list(fleet.ranks_out["a"]), list(fleet.ranks_out["b"])) in [([0, 1], [0, 1]), ([1, 0], [1, 0])]
    assert ejections.counts["overflow"] == 0


@pytest.mark.parametrize("source", [HEALTH, DRAIN])
def test_in_panic_all_that_others_leave_in_are_tried(source: str) -> None:
    """While fewer than the threshold would be left; it ends when enough are there again."""
    fleet, ejections = fleet_of(*map(regular, "abcd"))
    wish(fleet, ejections, "a")
    assert out(fleet) == "a"
    fleet.set_ready("b", "gone", source)
    judge(fleet, ejections)
    assert out(fleet) == "ab"
    fleet.set_ready("c", "gone", source)
    judge(fleet, ejections)
    judge(fleet, ejections)
    assert out(fleet) == "bc"
    assert ejections.counts["panic"] == 1
    fleet.set_ready("b", None, source)
    judge(fleet, ejections)
    assert out(fleet) == "ac"


def test_the_only_endpoint_is_always_tried() -> None:
    """Unless the settings say otherwise."""
    fleet, ejections = fleet_of(regular("a"))
    wish(fleet, ejections, "a")
    assert out(fleet) == ""
    fleet, ejections = fleet_of(regular("a"), options=EjectionOptions(0.5, 0.0))
    wish(fleet, ejections, "a")
    assert out(fleet) == "a"


def test_one_that_health_checks_take_out_isnt_counted_twice() -> None:
    """Its breaker's word takes nothing of what is left."""
    fleet, ejections = fleet_of(*map(regular, "ab"))
    fleet.set_ready("a", "gone", HEALTH)
    wish(fleet, ejections, "a")
    assert ejections.counts["panic"] == 0
    assert out(fleet) == "a"


def test_nothing_stays_of_those_that_left() -> None:
    """Endpoints, and ranks that aren't there any more."""
    fleet, ejections = fleet_of(regular("a", dp_size=4), regular("b"), regular("c"))
    wish(fleet, ejections, RankKey("a", 3))
    wish(fleet, ejections, "b")
    fleet.remove("b")
    fleet.put(regular("a", dp_size=2))
    judge(fleet, ejections)
    assert ejections.is_idle
    assert out(fleet) == ""


def fail(router: Router, address: str, now_s: float) -> None:
    """Let a request fail at an endpoint."""
    others = frozenset(RankKey(e.address, -1) for e in router.fleet if e.address != address)
    decision = decide(router, facts(), now_s, avoid=others)
    assert decision.decode.endpoint.address == address
    router.settle(decision, now_s, UpstreamClosed("closed"), [decision.decode])


def test_the_router_follows() -> None:
    """Breakers that open, health that changes and endpoints that come and go."""
    router = make_router(map(regular, "abcd"), make_options(breaker=QUICK, ejections=HALF, policy="least_work"))
    for letter in "abcd":
        for _ in range(2):
            fail(router, letter, 1.0)
    assert out(router.fleet) == "ab"
    assert {decide(router, facts(), 2.0).decode.endpoint.address for _ in range(8)} == {"c", "d"}
    router.observe(events.ReadinessChanged("c", "gone"), 3.0)
    assert out(router.fleet) == "c"
    assert {decide(router, facts(), 4.0).decode.endpoint.address for _ in range(8)} == {"a", "b", "d"}
    router.observe(events.EndpointLeft("c"), 5.0)
    assert out(router.fleet) == "a"
    decide(router, facts(), 11.5)  # those that were out for their time are half-open
    assert "open (2 failures" not in str(router.fleet.why_out("a"))
    router.validate()


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["wish", "health", "drain"]), st.integers(0, 5), st.booleans()), max_size=40),
    st.sampled_from([(0.1, 0.5), (0.5, 0.5), (0.5, 0.0), (1.0, 0.3), (0.0, 1.0)]),
)
def test_the_limits_hold(count: int, actions: list[tuple[str, int, bool]], limits: tuple[float, float]) -> None:
    """Whatever breakers, health checks and drains say, in whatever order."""
    options = EjectionOptions(*limits)
    fleet, ejections = fleet_of(*(regular(str(n)) for n in range(count)), options=options)
    for kind, number, is_out in actions:
        name, reason = str(number % count), "out" if is_out else None
        if kind == "wish":
            wish(fleet, ejections, name, reason)
        else:
            fleet.set_ready(name, reason, HEALTH if kind == "health" else DRAIN)
            judge(fleet, ejections)
        ejected = [e.address for e in fleet if fleet.why_out(e.address, BREAKER)]
        assert len(ejected) <= max(1, count * options.most + 1e-9)
        left = count - len(out(fleet))
        assert not ejected or left >= options.panic * count - 1e-9
