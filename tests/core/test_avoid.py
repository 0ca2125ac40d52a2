"""Where a request has failed it isn't placed again while there is another place, whatever the policies (I8)."""

import random

import msgspec
import pytest

from pdrouter.core import events
from pdrouter.core.fleet import Endpoint
from pdrouter.core.ledger import UNASSIGNED, RankKey
from pdrouter.core.policies import ENGINE, POLICIES, RANK_POLICIES
from pdrouter.core.router import Router

from .builders import decide, decode, facts, make_options, make_router, prefill, prefill_of, regular

POLICY_NAMES = sorted(POLICIES)
RANK_NAMES = sorted([*RANK_POLICIES, ENGINE])


def make(fleet: list[Endpoint], policy: str, rank_policy: str) -> Router:
    """Return a router by a policy for all sides."""
    return make_router(fleet, make_options(policy=policy, rank_policy=rank_policy))


def failed(*places: tuple[str, int]) -> frozenset[RankKey]:
    """Return ranks where a request has failed."""
    return frozenset(RankKey(address, rank) for address, rank in places)


@pytest.mark.invariant("I8")
@pytest.mark.parametrize("rank_policy", RANK_NAMES)
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_each_retry_goes_elsewhere_until_all_were_tried(policy: str, rank_policy: str) -> None:
    """Both legs move on each time; when no rank is left any will do."""
    fleet = [make_one(f"{make_one.__name__}{n}", dp_size=2) for make_one in (prefill, decode) for n in range(3)]
    router = make(fleet, policy, rank_policy)
    avoid: frozenset[RankKey] = frozenset()
    tries = 3 if rank_policy == ENGINE else 6
    for number in range(tries + 2):
        placed = router.decide(facts(100, routing_key=7, client_key=7), number / 100, avoid)
        legs = {p.reservation.account.key for p in placed.placements}  # type: ignore[union-attr]
        assert len(legs - avoid) == (2 if number < tries else 0)
        avoid |= legs


@pytest.mark.invariant("I8")
def test_a_failed_rank_isnt_chosen_for_what_it_holds() -> None:
    """Though the prompt needn't be read there, it is read elsewhere; where there is no other rank, it is used again."""
    router = make([prefill("p"), prefill("q"), decode("d")], "least_work", "least_work")
    blocks = tuple(range(100))
    router.prefixes.insert(blocks, RankKey("p", 0))
    asked = facts(10_000, prefix_blocks=blocks, block_tokens=100.0)
    assert prefill_of(decide(router, asked, 0.0, failed(("p", 0)))).endpoint.address == "q"
    router.observe(events.EndpointLeft("q"), 1.0)
    assert prefill_of(decide(router, asked, 1.0, failed(("p", 0)))).endpoint.address == "p"


@pytest.mark.invariant("I8")
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_side_that_has_no_other_rank_doesnt_hold_the_other_one(policy: str) -> None:
    """The only decode rank is taken again, with another prefill rank; an endpoint as a whole can be avoided."""
    router = make([prefill("p", dp_size=2), prefill("q"), decode("d")], policy, "least_work")
    for avoid in (failed(("p", UNASSIGNED), ("d", 0)), failed(("p", 0), ("p", 1), ("d", UNASSIGNED))):
        for number in range(5):
            placed = decide(router, facts(), number / 100, avoid)
            assert (prefill_of(placed).endpoint.address, placed.decode.endpoint.address) == ("q", "d")


@pytest.mark.invariant("I8")
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_prefill_rank_is_chosen_for_its_partners_too(policy: str) -> None:
    """A group whose decode ranks have all failed is passed over, though its prefill ranks didn't."""
    fleet = [m(f"{m.__name__}-{g}{n}", group=g) for m in (prefill, decode) for g in "ab" for n in range(2)]
    router = make(fleet, policy, "least_work")
    avoid = failed(("decode-a0", 0), ("decode-a1", 0), ("prefill-b0", 0), ("decode-b1", 0))
    for number in range(5):
        placed = decide(router, facts(), number / 100, avoid)
        assert [p.endpoint.address for p in placed.placements] == ["prefill-b1", "decode-b0"]


@pytest.mark.invariant("I8")
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_another_way_is_taken_where_only_there_nothing_is_repeated(policy: str) -> None:
    """A regular endpoint serves when the only pair has failed, and the pair when the regular one has."""
    router = make([prefill("p"), decode("d"), regular("r")], policy, "least_work")
    placed = decide(router, facts(), 0.0, failed(("d", 0)))
    assert (placed.prefill, placed.decode.endpoint.address) == (None, "r")
    assert decide(router, facts(), 0.0, failed(("r", 0))).prefill is not None
    assert decide(router, facts(), 0.0, failed(("p", 0), ("d", 0), ("r", 0))).placements


@pytest.mark.invariant("I8")
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_regular_endpoint_that_failed_is_passed_over(policy: str) -> None:
    """As long as there is another one."""
    router = make([regular(f"r{n}") for n in range(3)], policy, "least_work")
    for number in range(10):
        placed = decide(router, facts(routing_key=7, client_key=7), number / 100, failed(("r0", 0), ("r2", 0)))
        assert placed.decode.endpoint.address == "r1"


@pytest.mark.invariant("I8")
def test_a_policy_that_chooses_pairs_gets_none_that_failed() -> None:
    """Neither side of one."""
    fleet = [make_one(f"{make_one.__name__}{n}") for make_one in (prefill, decode) for n in range(3)]
    options = make_options(policy="load_aware")
    options = msgspec.structs.replace(
        options, ancestors=msgspec.structs.replace(options.ancestors, load_aware_generation=2)
    )
    router = make_router(fleet, options)
    for number in range(10):
        placed = decide(router, facts(), number / 100, failed(("prefill0", 0), ("decode0", 0), ("decode2", 0)))
        assert (prefill_of(placed).endpoint.address != "prefill0", placed.decode.endpoint.address) == (True, "decode1")


@pytest.mark.invariant("I8")
def test_the_clients_rank_is_sought_on_other_endpoints() -> None:
    """The rank that a client asks for stays; where it failed on one endpoint, another's is taken, if one has it."""
    fleet = [prefill("p", dp_size=3), prefill("q", dp_size=3), decode("d", dp_size=3), decode("e"), regular("r")]
    router = make(fleet, "least_work", "least_work")
    placed = decide(router, facts(prefill_rank=2), 0.0, failed(("p", 2), ("q", 0)))
    assert (prefill_of(placed).endpoint.address, prefill_of(placed).rank) == ("q", 2)
    placed = decide(router, facts(decode_rank=2), 0.0, failed(("p", 0), ("d", 2)))
    assert (placed.decode.endpoint.address, placed.decode.rank) == ("d", 2)
    assert prefill_of(placed).endpoint.address == "q" or prefill_of(placed).rank != 0


@pytest.mark.invariant("I8")
def test_that_a_failed_rank_is_taken_again_is_said() -> None:
    """The seconds are those predicted, and the reason can be seen."""
    router = make([prefill("p"), decode("d", dp_size=2)], "least_work", "least_work")
    placed = decide(router, facts(), 0.0, failed(("p", 0), ("d", 1)))
    why = prefill_of(placed).endpoint_why
    assert why.is_notable
    assert "failed there" in why.rule
    assert 0 < why.values[0] < 1
    assert not placed.decode.endpoint_why.is_notable


@pytest.mark.invariant("I8")
def test_pools_without_a_fresh_rank_are_passed_over() -> None:
    """However far the fresh rank is down in order, and however loaded."""
    rng = random.Random(3)
    fleet = [m(f"{m.__name__}{g}", group=f"g{g}", dp_size=4) for m in (prefill, decode) for g in range(30)]
    router = make(fleet, "least_work", "least_work")
    for number in range(300):
        placed = decide(router, facts(rng.randrange(1, 3000)), number / 1000)
        if number % 3:
            router.observe(events.FirstTokenSeen(placed), number / 1000)
    everywhere = {RankKey(e.address, r) for e in fleet for r in range(4)}
    for number in range(30):
        fresh = {RankKey(f"{side}{number}", rng.randrange(4)) for side in ("prefill", "decode")}
        placed = decide(router, facts(), 0.3, frozenset(everywhere - fresh))
        assert {p.reservation.account.key for p in placed.placements} == fresh
