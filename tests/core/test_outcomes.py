"""How requests end, as the breakers hear of it: who is taken out, who is tried again, what is kept of it."""

from collections.abc import Sequence

import pytest

from pdrouter.core import events
from pdrouter.core.breaker import BreakerOptions, Phase
from pdrouter.core.decision import Decision
from pdrouter.core.fleet import Endpoint
from pdrouter.core.outcomes import suspects
from pdrouter.core.router import Router
from pdrouter.errors import ClientGone, InvalidRequest, NoReadyPair, RouterError, UpstreamClosed, UpstreamTimeout

from .builders import NO_LIMIT, decide, decode, facts, make_options, make_router, prefill, prefill_of, regular, reject

OPEN_S = 10.0
PAIR = (prefill("p"), decode("d"))
CLOSED = UpstreamClosed("it closed the connection")


def guarded(*endpoints: Endpoint, policy: str = "minimum_tokens", successes: int = 1) -> Router:
    """Return a router whose breakers open by two failures and close by so many successes."""
    breaker = BreakerOptions(
        failure_threshold=2, success_threshold=successes, open_s=OPEN_S, window_s=60.0, is_disabled=False
    )
    return make_router(endpoints or PAIR, make_options(policy=policy, breaker=breaker, ejections=NO_LIMIT))


def fail(router: Router, decision: Decision, address: str, now_s: float, error: RouterError = CLOSED) -> None:
    """Let a request end by a fault of one of its engines."""
    (at_fault,) = [p for p in decision.placements if p.endpoint.address == address]
    assert router.settle(decision, now_s, error, [at_fault])


def opened(router: Router, address: str = "d") -> None:
    """Let an endpoint be taken out at 1."""
    for now_s in (0.0, 1.0):
        fail(router, decide(router, facts(), now_s), address, now_s)
    assert phase(router, address) is Phase.OPEN


def phase(router: Router, address: str) -> Phase:
    """Return what an endpoint's breaker lets through."""
    return router.outcomes.breakers.phase(address)


def kept(router: Router) -> Sequence[int]:
    """Return the decisions of which something is kept for the breakers."""
    return list(router.outcomes._attempts)


@pytest.mark.invariant("I6")
def test_failures_in_a_row_take_an_endpoint_out() -> None:
    """From that moment on nothing is placed there, and whoever asks is told why and until when."""
    router = guarded(*PAIR, decode("e"))
    while phase(router, "d") is Phase.CLOSED:
        decision = decide(router, facts(), 1.0)
        if decision.decode.endpoint.address == "d":
            fail(router, decision, "d", 1.0)
    assert {decide(router, facts(), 2.0).decode.endpoint.address for _ in range(6)} == {"e"}
    router.observe(events.ReadinessChanged("e", "down"), 2.0)
    assert "breaker open (2 failures in a row: it closed the connection)" in reject(router, facts(), 2.0).message
    assert router.outcomes.breakers.why_out("d", 2.0) == (
        "breaker open (2 failures in a row: it closed the connection), next try in 9 s"
    )


@pytest.mark.parametrize("address", ["p", "d"])
def test_the_partner_isnt_blamed(address: str) -> None:
    """Only the leg whose engine failed counts."""
    router = guarded()
    opened(router, address)
    (partner,) = {"p", "d"} - {address}
    assert phase(router, partner) is Phase.CLOSED
    assert router.fleet.is_ready(partner)
    assert router.outcomes.breakers.counts["opened"] == 1


@pytest.mark.parametrize("error", [ClientGone("gone"), InvalidRequest("bad"), UpstreamTimeout("nobody's fault")])
def test_what_no_engine_is_to_blame_for_never_counts(error: RouterError) -> None:
    """Clients that leave and wrong requests, however many: neither a failure nor a success."""
    router = guarded()
    for _ in range(20):
        router.settle(decide(router, facts(), 0.0), 0.0, error)
    assert router.outcomes.breakers.is_calm
    fail(router, decide(router, facts(), 1.0), "d", 1.0)
    for _ in range(20):
        router.settle(decide(router, facts(), 1.0), 1.0, error)
    assert phase(router, "d") is Phase.CLOSED
    fail(router, decide(router, facts(), 2.0), "d", 2.0)
    assert phase(router, "d") is Phase.OPEN


def test_an_answer_breaks_the_row() -> None:
    """Failures with answers in between never open, and all is calm again."""
    router = guarded()
    for second in range(10):
        fail(router, decide(router, facts(), second), "d", second)
        assert not router.outcomes.breakers.is_calm
        router.settle(decide(router, facts(), second), second)
        assert router.outcomes.breakers.is_calm
    assert router.outcomes.breakers.counts["opened"] == 0


def test_the_first_token_breaks_the_row_of_the_prefill_side() -> None:
    """Its work is done: it needn't wait for the end of a long answer, nor is it abandoned with a broken one."""
    router = guarded()
    fail(router, decide(router, facts(), 0.0), "p", 0.0)
    long = decide(router, facts(), 0.0)
    router.observe(events.FirstTokenSeen(long), 0.0)
    assert router.outcomes.breakers.is_calm
    fail(router, decide(router, facts(), 0.0), "p", 0.0)
    assert phase(router, "p") is Phase.CLOSED
    router.settle(long, 0.0)


@pytest.mark.parametrize("address", ["d", "r"])
def test_streams_that_always_break(address: str) -> None:
    """Tokens aren't an answer: an engine whose streams break one after the other goes out."""
    router = guarded(*(PAIR if address == "d" else (regular("r"),)))
    for _ in range(2):
        assert phase(router, address) is Phase.CLOSED
        broken = decide(router, facts(), 0.0)
        router.observe(events.FirstTokenSeen(broken), 0.0)
        router.observe(events.TokensGenerated(broken, 1), 0.0)
        fail(router, broken, address, 0.0)
    assert phase(router, address) is Phase.OPEN


def test_whom_both_legs_wait_for() -> None:
    """It isn't the one who has answered others meanwhile; where that doesn't tell, it may be either."""
    router = guarded(*PAIR, prefill("p2"), decode("d2"), policy="round_robin")
    first, other, again = (decide(router, facts(), 0.0) for _ in range(3))
    assert list(suspects(first)) == list(first.placements)
    router.settle(other, 1.0)
    assert list(suspects(first)) == list(first.placements)
    router.observe(events.FirstTokenSeen(again), 1.0)
    assert (again.prefill.endpoint if again.prefill else None, again.decode.endpoint) == (
        first.prefill.endpoint if first.prefill else None,
        first.decode.endpoint,
    )
    assert [place.endpoint.address for place in suspects(first)] == ["d"]
    router.observe(events.TokensGenerated(again, 1), 1.0)
    assert list(suspects(first)) == list(first.placements)
    late = decide(router, facts(), 2.0)
    assert list(suspects(late)) == list(late.placements)
    for each in (first, again):
        router.settle(each, 3.0, CLOSED, suspects(each))
    assert [phase(router, address) for address in ("p", "d", "p2", "d2")] == [Phase.OPEN] * 2 + [Phase.CLOSED] * 2


@pytest.mark.parametrize("policy", ["least_work", "minimum_tokens", "load_aware"])
def test_after_its_time_one_probe_at_a_time(policy: str) -> None:
    """It is let in at the moment that was named; until the probe has ended, the others go elsewhere or nowhere."""
    router = guarded(policy=policy)
    opened(router)
    reject(router, facts(), OPEN_S + 0.9)
    probe = decide(router, facts(), OPEN_S + 1.0)
    assert isinstance(reject(router, facts(), OPEN_S + 1.0), NoReadyPair)
    assert "probe under way" in str(router.fleet.why_out("d"))
    router.settle(probe, 12.0)
    assert phase(router, "d") is Phase.CLOSED
    assert len({decide(router, facts(), 12.0).number for _ in range(5)}) == 5


def test_a_probe_that_fails_opens_again() -> None:
    """For as long as before; its partner takes requests all the while."""
    router = guarded(*PAIR, decode("e"))
    router.observe(events.ReadinessChanged("e", "down"), 0.0)
    opened(router)
    fail(router, decide(router, facts(), 11.0), "d", 11.5)
    assert phase(router, "d") is Phase.OPEN
    router.observe(events.ReadinessChanged("e", None), 12.0)
    assert {decide(router, facts(), 21.0).decode.endpoint.address for _ in range(3)} == {"e"}
    assert "d" in {decide(router, facts(), 21.5).decode.endpoint.address for _ in range(3)}


@pytest.mark.parametrize("at_fault", [None, "p"])
def test_a_probe_that_tells_nothing_makes_way(at_fault: str | None) -> None:
    """Its client has left or its partner has failed: the next request is the probe."""
    router = guarded()
    opened(router)
    probe = decide(router, facts(), 11.0)
    if at_fault is None:
        router.settle(probe, 11.0, ClientGone("gone"))
    else:
        fail(router, probe, at_fault, 11.0)
    assert phase(router, "d") is Phase.HALF_OPEN
    assert router.outcomes.breakers.counts["probes"] == 1
    decide(router, facts(), 11.0)
    assert router.outcomes.breakers.counts["probes"] == 2


def test_a_probe_counts_once() -> None:
    """Told by its first tokens, its end is no second success."""
    router = guarded(successes=2)
    opened(router)
    probe = decide(router, facts(), 11.0)
    router.observe(events.TokensGenerated(probe, 1), 11.0)
    router.observe(events.TokensGenerated(probe, 1), 11.1)
    assert router.fleet.is_ready("d")
    router.settle(probe, 12.0)
    assert phase(router, "d") is Phase.HALF_OPEN
    router.settle(decide(router, facts(), 12.0), 12.0)
    assert phase(router, "d") is Phase.CLOSED


def test_what_was_placed_before_it_opened_says_nothing_after() -> None:
    """Neither answers nor failures of before change what a probe will tell."""
    router = guarded()
    before = [decide(router, facts(), 0.0) for _ in range(3)]
    opened(router)
    router.settle(before[0], 2.0)
    fail(router, before[1], "d", 3.0)
    assert phase(router, "d") is Phase.OPEN
    probe = decide(router, facts(), 11.0)
    fail(router, before[2], "d", 11.0)
    assert phase(router, "d") is Phase.HALF_OPEN
    router.settle(probe, 12.0)
    assert phase(router, "d") is Phase.CLOSED


@pytest.mark.invariant("I9")
def test_nothing_is_kept_while_all_is_calm() -> None:
    """And after a failure only of what lives."""
    router = guarded()
    calm = [decide(router, facts(), 0.0) for _ in range(3)]
    assert kept(router) == []
    fail(router, calm[0], "d", 0.0)
    uneasy = decide(router, facts(), 0.0)
    assert kept(router) == [uneasy.number]
    router.settle(uneasy, 0.0, ClientGone("gone"))
    for decision in calm[1:]:
        router.settle(decision, 0.0)
    assert kept(router) == []
    assert router.outcomes.breakers.is_calm


def test_a_regular_endpoint_has_one_breaker() -> None:
    """Its first token is its success."""
    router = guarded(regular("r"))
    opened(router, "r")
    probe = decide(router, facts(), 11.0)
    assert probe.prefill is None
    router.observe(events.FirstTokenSeen(probe), 11.0)
    assert phase(router, "r") is Phase.CLOSED


def test_health_and_breaker_dont_speak_for_each_other() -> None:
    """A good health check doesn't let in whom a breaker took out, nor does a breaker whom the checks took out."""
    router = guarded()
    opened(router)
    router.observe(events.ReadinessChanged("d", None), 2.0)
    assert not router.fleet.is_ready("d")
    router.observe(events.ReadinessChanged("d", "down"), 3.0)
    assert "down" in reject(router, facts(), 20.0).message
    router.observe(events.ReadinessChanged("d", None), 21.0)
    decide(router, facts(), 21.0)


def test_one_that_comes_back_is_new() -> None:
    """It left while it was out, and while its probe was under way."""
    router = guarded()
    opened(router)
    probe = decide(router, facts(), 11.0)
    router.observe(events.EndpointLeft("d"), 11.0)
    router.observe(events.EndpointJoined(decode("d")), 11.0)
    fail(router, probe, "d", 12.0)
    assert router.outcomes.breakers.is_calm
    assert prefill_of(decide(router, facts(), 12.0)).endpoint.address == "p"
    assert len(kept(router)) == 0


def test_late_blame_doesnt_reach_one_that_came_back() -> None:
    """What was placed while all was calm, too, counts for the endpoint of then alone."""
    router = guarded()
    old = [decide(router, facts(), 0.0) for _ in range(3)]
    router.observe(events.EndpointLeft("d"), 1.0)
    router.observe(events.EndpointJoined(decode("d")), 1.0)
    for decision in old:
        fail(router, decision, "d", 2.0)
    assert router.outcomes.breakers.is_calm
    fail(router, decide(router, facts(), 3.0), "d", 3.0)
    assert not router.outcomes.breakers.is_calm


def test_late_blame_doesnt_reach_a_later_phase() -> None:
    """The breaker has opened and closed since it was placed, while all was calm."""
    router = guarded()
    old = [decide(router, facts(), 0.0) for _ in range(3)]
    opened(router)
    router.settle(decide(router, facts(), 11.0), 11.0)
    assert phase(router, "d") is Phase.CLOSED
    for decision in old:
        fail(router, decision, "d", 12.0)
    assert router.outcomes.breakers.is_calm


def test_a_restart_forgives_nothing() -> None:
    """An engine that dies of each request and comes back is taken out all the same."""
    router = guarded(prefill("p"), decode("d", dp_size=2))
    for now_s in (0.0, 1.0):
        fail(router, decide(router, facts(), now_s), "d", now_s)
        router.observe(events.EndpointRestarted("d"), now_s)
    assert phase(router, "d") is Phase.OPEN


def test_a_long_cause_is_cut() -> None:
    """What an engine says doesn't fill the logs."""
    router = guarded()
    for _ in range(2):
        fail(router, decide(router, facts(), 0.0), "d", 0.0, UpstreamClosed("x" * 10_000))
    assert len(str(router.fleet.why_out("d"))) < 300
