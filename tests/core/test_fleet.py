"""The fleet: identity by address, readiness with reasons, and who may be paired with whom."""

import pytest

from pdrouter.core.fleet import Disaggregation, Endpoint, Fleet, Role
from pdrouter.errors import InvariantViolation

from .builders import decode, prefill, regular


def make_fleet(*endpoints: Endpoint) -> Fleet:
    """Return a fleet, all of it ready."""
    fleet = Fleet(Disaggregation.AUTO, takes_any=True)
    for endpoint in endpoints:
        fleet.put(endpoint)
    return fleet


def ready(fleet: Fleet, role: Role, model: str | None = None) -> list[str]:
    """Return the addresses of those ready."""
    return [e.address for e in fleet.ready(role, model)]


def test_an_endpoint_is_its_address() -> None:
    """Described anew it stays one endpoint, in its place; hosts with the same port are two."""
    fleet = make_fleet(prefill("ns1/p:1"), decode("d"), prefill("ns2/p:1"))
    fleet.put(prefill("ns1/p:1", dp_size=8))
    assert [e.address for e in fleet] == ["ns1/p:1", "d", "ns2/p:1"]
    assert len(fleet) == 3
    found = fleet.get("ns1/p:1")
    assert found is not None
    assert found.dp_size == 8
    assert fleet.get("gone") is None
    assert prefill("h:7").url == "http://h:7"


def test_readiness_has_a_reason() -> None:
    """An endpoint joins in or out, goes out and comes back, and a new description changes neither."""
    fleet = make_fleet(regular("w"))
    fleet.put(regular("slow"), out="starting")
    assert ready(fleet, Role.REGULAR) == ["w"]
    assert fleet.why_out("slow") == "starting"
    fleet.set_ready("slow", None)
    fleet.set_ready("w", "unhealthy")
    fleet.put(regular("w", dp_size=2))
    fleet.put(regular("slow"), out="starting")
    assert ready(fleet, Role.REGULAR) == ["slow"]
    assert (fleet.why_out("w"), fleet.why_out("slow")) == ("unhealthy", None)
    assert not fleet.is_ready("w")


def test_what_is_not_known_is_neither_ready_nor_out() -> None:
    """News of an endpoint that left changes nothing; one that comes back starts afresh."""
    fleet = make_fleet(regular("w"))
    fleet.set_ready("gone", "unhealthy")
    fleet.remove("gone")
    assert not fleet.is_ready("gone")
    assert fleet.why_out("gone") is None
    fleet.set_ready("w", "unhealthy")
    fleet.remove("w")
    fleet.put(regular("w"))
    assert ready(fleet, Role.REGULAR) == ["w"]


PAIRS = [
    ({}, {}, True),
    ({"group": "g"}, {"group": "g"}, True),
    ({"group": "g"}, {"group": "h"}, False),
    ({"group": "g"}, {}, False),
    ({"engine": "vllm"}, {}, False),
    ({"kv_transport": "nixl"}, {}, False),
    ({"model": "m"}, {"model": "m"}, True),
    ({"model": "m"}, {"model": "n"}, False),
    ({"model": "m"}, {}, True),
    ({}, {"model": "m"}, True),
]


@pytest.mark.invariant("I6")
@pytest.mark.parametrize(("left", "right", "is_pair"), PAIRS)
def test_pairs_agree_in_engine_transport_group_and_model(
    left: dict[str, object], right: dict[str, object], is_pair: bool
) -> None:
    """Nothing else is offered as a partner, counts as ready for prefill, or passes the last check."""
    p, d = prefill("p", dp_size=1, **left), decode("d", dp_size=1, **right)
    fleet = make_fleet(p, d)
    assert p.pairs_with(d) is is_pair
    assert fleet.partners(p, None) == ((d,) if is_pair else ())
    assert ready(fleet, Role.PREFILL) == (["p"] if is_pair else [])
    if is_pair:
        fleet.check_pair(p, d, None)
    else:
        with pytest.raises(InvariantViolation, match="can't be paired"):
            fleet.check_pair(p, d, None)


@pytest.mark.invariant("I6")
def test_only_ready_endpoints_pass_the_last_check() -> None:
    """Whichever of the two is out, and whether it is a pair or one endpoint for both."""
    p, d, w = prefill("p"), decode("d"), regular("w")
    fleet = make_fleet(p, d, w)
    fleet.check_pair(w, w, None)
    for address in ("p", "d", "w"):
        fleet.set_ready(address, "unhealthy")
        pair = (w, w) if address == "w" else (p, d)
        with pytest.raises(InvariantViolation, match=f"{address} was chosen"):
            fleet.check_pair(*pair, None)
        fleet.set_ready(address, None)


def test_pools_follow_every_change() -> None:
    """A prefill endpoint takes part only while a partner does."""
    fleet = make_fleet(prefill("p", group="g"), decode("d", group="g"), decode("other"))
    assert ready(fleet, Role.PREFILL) == ["p"]
    assert [e.address for e in fleet.partners(prefill("p", group="g"), None)] == ["d"]
    fleet.set_ready("d", "unhealthy")
    assert ready(fleet, Role.PREFILL) == []
    fleet.put(decode("d2", group="g"))
    assert ready(fleet, Role.PREFILL) == ["p"]
    fleet.remove("d2")
    assert ready(fleet, Role.PREFILL) == []


def test_models_separate() -> None:
    """A request for a model goes where it is served, or where the engine hasn't told yet."""
    fleet = make_fleet(regular("a", model="m"), regular("b", model="n"), regular("c"))
    assert set(fleet.names.bases) == {"m", "n"}
    assert ready(fleet, Role.REGULAR, "m") == ["a", "c"]
    assert ready(fleet, Role.REGULAR, None) == ["a", "b", "c"]
    fleet.remove("b")
    assert set(fleet.names.bases) == {"m"}
