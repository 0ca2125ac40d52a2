"""Ranks that fail alone: who is blamed, who is taken out, where requests go meanwhile, and how a rank comes back."""

import itertools
from collections.abc import Sequence

import msgspec
import pytest

from pdrouter.core import events
from pdrouter.core.breaker import BreakerOptions, Phase
from pdrouter.core.decision import Decision, Rejection
from pdrouter.core.ejections import Name
from pdrouter.core.fleet import BREAKER, Endpoint, Role
from pdrouter.core.ledger import RankKey
from pdrouter.core.policies import ENGINE, POLICIES, RANK_POLICIES
from pdrouter.core.router import Router
from pdrouter.errors import ConnectFailed, InvalidRank, NoReadyPair, RouterError, UpstreamClosed

from .builders import NO_LIMIT, decide, decode, facts, make_options, make_router, prefill, regular, reject, report

OPEN_S = 10.0
RANK = RankKey("d", 1)
CLOSED = UpstreamClosed("it closed the connection")
BREAKER_OPTIONS = BreakerOptions(
    failure_threshold=2, success_threshold=1, open_s=OPEN_S, window_s=60.0, is_disabled=False
)


def guarded(*endpoints: Endpoint, policy: str = "minimum_tokens", rank_policy: str | None = None) -> Router:
    """Return a router whose breakers open by two failures and close by one success."""
    options = make_options(policy=policy, breaker=BREAKER_OPTIONS, ejections=NO_LIMIT)
    if rank_policy is not None:
        options = msgspec.structs.replace(options, rank_policy=rank_policy)
    return make_router(endpoints or (prefill("p"), decode("d", dp_size=3)), options)


def ranks_of(decision: Decision) -> list[RankKey]:
    """Return where a request runs."""
    return [placement.reservation.account.key for placement in decision.placements]


def on(router: Router, key: RankKey, now_s: float, tokens: int = 100) -> Decision:
    """Return a new request on a rank: it has failed on all others of that role."""
    role = next(e.role for e in router.fleet if e.address == key.endpoint)
    ranks = {RankKey(e.address, rank) for e in router.fleet if e.role is role for rank in range(e.dp_size)}
    decision = decide(router, facts(tokens), now_s, frozenset(ranks - {key}))
    assert key in ranks_of(decision)
    return decision


def fail(router: Router, decision: Decision, address: str, now_s: float, error: RouterError = CLOSED) -> None:
    """Let a request end by a fault of one of its engines."""
    (at_fault,) = [p for p in decision.placements if p.endpoint.address == address]
    assert router.settle(decision, now_s, error, [at_fault])


def opened(router: Router, key: RankKey, neighbour: int, now_s: float = 0.0) -> None:
    """Let a rank fail alone until it is taken out."""
    for _ in range(BREAKER_OPTIONS.failure_threshold):
        router.settle(on(router, RankKey(key.endpoint, neighbour), now_s), now_s)
        fail(router, on(router, key, now_s), key.endpoint, now_s)
    assert phase(router, key) is Phase.OPEN
    assert phase(router, key.endpoint) is Phase.CLOSED


def phase(router: Router, name: Name) -> Phase:
    """Return what a breaker lets through."""
    return router.outcomes.breakers.phase(name)


def watched(router: Router, address: str) -> list[int]:
    """Return an endpoint's ranks that have a breaker."""
    names = router.outcomes.breakers._breakers
    return sorted(name.rank for name in names if isinstance(name, RankKey) and name.endpoint == address)


# Whose fault it is


@pytest.mark.invariant("I6")
@pytest.mark.parametrize("rank_policy", RANK_POLICIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_fails_alone_is_out_alone(policy: str, rank_policy: str) -> None:
    """Under every policy: its neighbours go on, on both sides, and nothing is placed on it until its time."""
    fleet = [prefill("p", dp_size=2), prefill("q"), decode("d", dp_size=3), decode("e")]
    router = guarded(*fleet, policy=policy, rank_policy=rank_policy)
    bad = [RankKey("p", 0), RankKey("d", 1)]
    for now_s, key in enumerate(bad):
        opened(router, key, 1 - key.rank, now_s)
    seen = set()
    for number in range(60):
        decision = decide(router, facts(100, routing_key=number, client_key=number * 2**58), 2.0)
        seen |= set(ranks_of(decision))
        if number % 2:
            router.settle(decision, 2.0)
    assert not seen & set(bad)
    assert seen >= {RankKey("d", 0), RankKey("d", 2)}
    assert router.fleet.is_ready("d")
    cause = "breaker open (2 failures in a row: it closed the connection)"
    assert [router.fleet.why_out(key) for key in bad] == [cause, cause]
    assert router.fleet.why_out("d") is None


@pytest.mark.parametrize("policy", ["least_work", "minimum_tokens"])
def test_when_everything_fails_the_endpoint_is_out(policy: str) -> None:
    """As soon as it would be without ranks, and by its own breaker."""
    router = guarded(prefill("p"), decode("d", dp_size=4), policy=policy)
    for now_s in (0.0, 1.0):
        fail(router, decide(router, facts(), now_s), "d", now_s)
    assert phase(router, "d") is Phase.OPEN
    message = reject(router, facts(), 1.0).message
    assert "(1 known: d breaker open (2 failures in a row: it closed the connection))" in message
    assert router.fleet.ranks_out == {}


def test_one_rank_that_fails_without_neighbours_takes_its_endpoint_out_with_it() -> None:
    """Nothing tells then that it is the rank alone."""
    router = guarded()
    for now_s in (0.0, 1.0):
        fail(router, on(router, RANK, now_s), "d", now_s)
    assert (phase(router, RANK), phase(router, "d")) == (Phase.OPEN, Phase.OPEN)


def test_an_endpoint_that_cant_be_reached_tells_nothing_of_a_rank() -> None:
    """Nor does a probe that didn't get there: the next request is the probe."""
    router = guarded()
    for _ in range(3):
        router.settle(on(router, RankKey("d", 0), 0.0), 0.0)
        fail(router, on(router, RANK, 0.0), "d", 0.0, ConnectFailed("refused"))
    assert router.fleet.ranks_out == {}
    opened(router, RANK, 0)
    router.settle(on(router, RankKey("d", 0), 1.0), 1.0)
    fail(router, on(router, RANK, OPEN_S), "d", OPEN_S, ConnectFailed("refused"))
    assert phase(router, RANK) is Phase.HALF_OPEN
    router.settle(on(router, RANK, OPEN_S), OPEN_S)
    assert phase(router, RANK) is Phase.CLOSED
    assert router.outcomes.breakers.is_calm


def test_the_partners_rank_isnt_blamed() -> None:
    """Only the leg whose engine failed counts."""
    router = guarded(prefill("p", dp_size=2), decode("d", dp_size=2))
    for _ in range(4):
        router.settle(decide(router, facts(prefill_rank=1, decode_rank=0), 0.0), 0.0)
        fail(router, decide(router, facts(prefill_rank=0, decode_rank=1), 0.0), "d", 0.0)
        if phase(router, RANK) is Phase.OPEN:
            break
    assert router.fleet.ranks_out == {"d": [1]}
    assert phase(router, RankKey("p", 0)) is Phase.CLOSED


def test_late_blame_doesnt_reach_a_later_phase_of_a_rank() -> None:
    """It was placed before the rank opened, probed and closed."""
    router = guarded()
    old = [on(router, RANK, 0.0) for _ in range(3)]
    opened(router, RANK, 0)
    router.settle(on(router, RANK, OPEN_S), OPEN_S)
    for decision in old:
        router.settle(on(router, RankKey("d", 0), 11.0), 11.0)
        fail(router, decision, "d", 11.0)
    assert phase(router, RANK) is Phase.CLOSED


# Out and in again


@pytest.mark.parametrize("policy", ["least_work", "minimum_tokens", "round_robin"])
def test_a_rank_comes_back_by_one_request(policy: str) -> None:
    """While the probe runs the neighbours take the others; its first tokens let the rank in."""
    router = guarded(policy=policy, rank_policy="least_work" if policy == "least_work" else "minimum_tokens")
    opened(router, RANK, 0)
    placed = [decide(router, facts(), OPEN_S) for _ in range(9)]
    (probe,) = [decision for decision in placed if RANK in ranks_of(decision)]
    assert "probe under way" in str(router.fleet.why_out(RANK))
    router.observe(events.TokensGenerated(probe, 1), OPEN_S + 1)
    assert router.fleet.ranks_out == {}
    assert RANK in {key for _ in range(9) for key in ranks_of(decide(router, facts(), OPEN_S + 1))}


def test_a_probe_that_fails_keeps_the_rank_out() -> None:
    """For as long as before; it counts for the endpoint, too, which the neighbours' answers keep in."""
    router = guarded()
    opened(router, RANK, 0)
    router.settle(on(router, RankKey("d", 0), 1.0), 1.0)
    fail(router, on(router, RANK, OPEN_S), "d", OPEN_S + 1)
    assert router.fleet.ranks_out == {"d": [1]}
    assert phase(router, "d") is Phase.CLOSED
    router.settle(decide(router, facts(), 2 * OPEN_S), 2 * OPEN_S)
    assert phase(router, RANK) is Phase.OPEN
    on(router, RANK, 2 * OPEN_S + 1)


@pytest.mark.parametrize("policy", ["least_work", "minimum_tokens"])
def test_an_endpoint_without_ranks_is_out(policy: str) -> None:
    """Though its own breaker is closed, as late answers broke its row; whoever asks is told of each rank."""
    router = guarded(prefill("p"), decode("d", dp_size=2), policy=policy)
    late = [on(router, RANK, 0.0) for _ in range(2)]
    opened(router, RANK, 0)
    for decision in late:
        router.settle(decision, 1.0)
        fail(router, on(router, RankKey("d", 0), 1.0), "d", 1.0)
    assert phase(router, "d") is Phase.CLOSED
    assert not router.fleet.is_ready("d")
    message = reject(router, facts(), 3.0).message
    assert message.startswith("no decode endpoint is ready (1 known: d all its ranks are out: rank 0 breaker open (")
    assert "rank 1 breaker open (" in message
    decide(router, facts(), OPEN_S)


# Who asks for a rank


@pytest.mark.parametrize(
    ("fleet", "wanted", "key"),
    [
        ([prefill("p", dp_size=2), decode("d")], {"prefill_rank": 1}, RankKey("p", 1)),
        ([prefill("p"), decode("d", dp_size=2)], {"decode_rank": 1}, RankKey("d", 1)),
        ([regular("r", dp_size=2)], {"decode_rank": 1}, RankKey("r", 1)),
    ],
)
def test_whoever_asks_for_a_rank_that_is_out_is_told_so(
    fleet: list[Endpoint], wanted: dict[str, int], key: RankKey
) -> None:
    """It is another answer than for a rank that isn't there; where another endpoint has it, that one is taken."""
    router = guarded(*fleet)
    router._set_ready(key, "breaker open", BREAKER, 0.0)
    error = reject(router, facts(**wanted), 0.0)
    role = fleet[0].role if key.endpoint != "d" else Role.DECODE
    assert isinstance(error, NoReadyPair)
    assert error.message == f"rank 1 of no {role} endpoint is ready ({key.endpoint} breaker open)"
    assert isinstance(reject(router, facts(**dict.fromkeys(wanted, 7)), 0.0), InvalidRank)
    other = msgspec.structs.replace(next(e for e in fleet if e.address == key.endpoint), address="other")
    router.observe(events.EndpointJoined(other), 0.0)
    assert RankKey("other", 1) in ranks_of(decide(router, facts(**wanted), 0.0))


def test_a_prefill_is_chosen_whose_partner_has_the_rank_that_is_asked_for() -> None:
    """A partner whose rank is out hasn't."""
    fleet = [
        *(prefill(f"p{group}", group=group) for group in "ab"),
        *(decode(f"d{group}", group=group, dp_size=2) for group in "ab"),
    ]
    router = guarded(*fleet)
    router._set_ready(RankKey("da", 1), "out", BREAKER, 0.0)
    for _ in range(4):
        assert RankKey("db", 1) in ranks_of(decide(router, facts(decode_rank=1), 0.0))
    router.observe(events.EndpointJoined(decode("da2", group="a", dp_size=2)), 0.0)
    avoid = frozenset({RankKey("da2", 1)})
    for _ in range(4):
        assert RankKey("db", 1) in ranks_of(decide(router, facts(decode_rank=1), 0.0, avoid))


@pytest.mark.invariant("I8")
@pytest.mark.parametrize("policy", ["minimum_tokens", "round_robin"])
def test_a_rank_that_failed_is_repeated_only_where_its_neighbours_are_out(policy: str) -> None:
    """An endpoint whose other ranks are out is one to avoid; another way that has the rank out is no way."""
    fleet = [prefill("p", dp_size=2), prefill("q"), decode("d"), regular("r", dp_size=2)]
    router = guarded(*fleet, policy=policy)
    router._set_ready(RankKey("p", 1), "out", BREAKER, 0.0)
    avoid = frozenset({RankKey("p", 0)})
    for _ in range(4):
        assert RankKey("q", 0) in ranks_of(decide(router, facts(), 0.0, avoid))
    router.observe(events.EndpointLeft("q"), 0.0)
    assert decide(router, facts(), 0.0, avoid).prefill is None
    router._set_ready(RankKey("r", 0), "out", BREAKER, 0.0)
    assert RankKey("p", 0) in ranks_of(decide(router, facts(prefill_rank=0), 0.0, avoid))


# What an endpoint is worth


@pytest.mark.parametrize("policy", ["minimum_tokens", "dynamo", "least_work"])
def test_an_idle_rank_that_is_out_doesnt_draw_requests_to_its_neighbours(policy: str) -> None:
    """An endpoint is worth the best of the ranks that it has."""
    fleet = [prefill("p"), decode("d", dp_size=2), decode("e", dp_size=2)]
    router = guarded(*fleet, policy=policy, rank_policy="minimum_tokens")
    for key in (RankKey("d", 0), RankKey("e", 0), RankKey("e", 1)):
        on(router, key, 0.0, tokens=1000 if key.endpoint == "d" else 500)
    router._set_ready(RankKey("d", 1), "out", BREAKER, 0.0)
    assert decide(router, facts(10), 0.0).decode.endpoint.address == "e"


def test_reports_of_a_rank_that_is_out_are_believed_when_it_is_back() -> None:
    """They go to the rank, whatever is chosen from meanwhile; and it isn't the only one that is ready."""
    router = guarded(prefill("p"), decode("d", dp_size=2))
    router._set_ready(RankKey("d", 0), "out", BREAKER, 0.0)
    decision = decide(router, facts(), 0.0)
    assert ranks_of(decision)[1] == RankKey("d", 1)
    assert decision.decode.rank_why.rule == "the only rank that is ready"
    report(router, "d", [5000.0, 10.0], 1.0)
    router._set_ready(RankKey("d", 0), None, BREAKER, 1.0)
    assert [rank.effective_tokens for rank in router.load.endpoints["d"].ranks] == [5000.0, 10.0]
    assert ranks_of(decide(router, facts(), 1.0))[1] == RankKey("d", 1)


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_rank_that_is_out_makes_its_neighbours_steps_no_shorter(is_ready: bool) -> None:
    """Where ranks step together, what it still writes counts, and counts no more once it has ended."""
    router = guarded(prefill("p"), decode("d", dp_size=2), policy="least_work")
    site = router.work.sites["d"]
    long = on(router, RankKey("d", 0), 0.0)
    router._set_ready(RankKey("d", 0), None if is_ready else "out", BREAKER, 0.0)
    router.observe(events.TokensGenerated(long, 500), 1.0)
    before_s = site.slowest_share_s()
    router.observe(events.TokensGenerated(long, 500), 1.0)
    assert site.slowest_share_s() > before_s
    router.settle(long, 2.0)
    assert site.slowest_share_s() == 0.0


# Who has breakers


def test_ranks_have_breakers_as_their_endpoint_describes_them() -> None:
    """More come, others go with what was held against them; an endpoint with one rank has its own alone."""
    router = guarded()
    first, last = RankKey("d", 0), RankKey("d", 2)
    assert watched(router, "p") == []
    opened(router, first, 1)
    opened(router, last, 1)
    for dp_size, out in ((5, [0, 2]), (2, [0]), (3, [0])):
        router.observe(events.EndpointDescribed(decode("d", dp_size=dp_size)), 1.0)
        assert watched(router, "d") == list(range(dp_size))
        assert router.fleet.ranks_out == {"d": out}
    router.observe(events.EndpointDescribed(decode("d")), 1.0)
    assert watched(router, "d") == []
    assert router.fleet.ranks_out == {}
    decide(router, facts(), 1.0)
    router.observe(events.EndpointDescribed(decode("d", dp_size=2)), 1.0)
    assert phase(router, first) is Phase.CLOSED
    assert {ranks_of(decide(router, facts(), 1.0))[1].rank for _ in range(4)} == {0, 1}
    router._set_ready(RANK, "out", BREAKER, 1.0)
    router.observe(events.EndpointLeft("d"), 1.0)
    assert (watched(router, "d"), router.fleet.ranks_out) == ([], {})
    router._set_ready(RANK, "out", BREAKER, 1.0)
    assert router.fleet.why_out(RANK) is None


@pytest.mark.parametrize("rank_policy", [ENGINE, "minimum_tokens"])
def test_ranks_that_requests_dont_name_have_no_breakers(rank_policy: str) -> None:
    """The engine chooses, by its kind or by the settings: failures are the endpoint's."""
    endpoint = decode("d", dp_size=2, takes_ranks=rank_policy == ENGINE)
    router = guarded(prefill("p"), endpoint, rank_policy=rank_policy)
    assert watched(router, "d") == []
    for now_s in (0.0, 1.0):
        fail(router, decide(router, facts(), now_s), "d", now_s)
    assert (phase(router, "d"), router.fleet.ranks_out) == (Phase.OPEN, {})


def test_nothing_is_chosen_that_is_out() -> None:
    """A policy's mistake is found before anything is reserved."""
    router = guarded()
    router._set_ready(RANK, "out", BREAKER, 0.0)
    router.load.leave_out("d", [])
    answers: Sequence[object] = [router.decide(facts(decode_rank=1), 0.0), router.decide(facts(decode_rank=0), 0.0)]
    assert isinstance(answers[0], Rejection)
    assert "rank 1 of d was chosen though it isn't ready" in answers[0].error.message
    assert isinstance(answers[1], Decision)


def test_many_ranks_that_are_out_arent_all_named() -> None:
    """Four are."""
    router = guarded(regular("r", dp_size=7))
    for rank, source in itertools.product(range(7), (BREAKER, "health")):
        router.fleet.set_ready(RankKey("r", rank), f"{source} says so", source)
    cause = ", ".join(f"rank {rank} breaker says so; health says so" for rank in range(4))
    assert router.fleet.why_out("r") == f"all its ranks are out: {cause} and 3 more"
