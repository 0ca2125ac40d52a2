"""What ranks have still to do: projections, places in the heaps, what stays over descriptions."""

import msgspec
import pytest

from pdrouter.core import events
from pdrouter.core.cost import NEUTRAL, prefill_s
from pdrouter.core.ledger import RankKey
from pdrouter.core.load import RankReport
from pdrouter.core.places import Worker
from pdrouter.core.router import Router

from .builders import decide, decode, facts, make_options, make_router, prefill, prefill_of, regular

READ_S = prefill_s(NEUTRAL, 1000, 0)
TOKEN_S = 5e-5
PROFILES = {
    "slow": msgspec.structs.replace(NEUTRAL, step_base_s=0.1),
    "together": msgspec.structs.replace(
        NEUTRAL, steps_together=True, prefill_token_s=TOKEN_S, prefill_pair_s=TOKEN_S / 1000
    ),
}


def make_least() -> Router:
    """Return a router over one prefill rank and one decode rank, by least work."""
    return make_router([prefill("p"), decode("d")], make_options(policy="least_work", profiles=PROFILES))


def make_together() -> Router:
    """Return a router over four prefill ranks of one endpoint that read in step, and one decode rank."""
    fleet = [prefill("p", dp_size=4, profile="together"), decode("d")]
    return make_router(fleet, make_options(policy="least_work", profiles=PROFILES))


def worker_of(router: Router, address: str = "p", rank: int = 0) -> Worker:
    """Return one rank."""
    return router.work.workers[RankKey(address, rank)]


def test_a_queue_is_projected() -> None:
    """Each prompt takes its time behind those before it, from when the rank is there for it."""
    router = make_least()
    first = decide(router, facts(1000), 10.0)
    assert worker_of(router).free_at_s == pytest.approx(10 + READ_S)
    decide(router, facts(1000), 10.01)
    assert worker_of(router).free_at_s == pytest.approx(10 + 2 * READ_S)
    router.observe(events.FirstTokenSeen(first), 10.03)
    assert worker_of(router).free_at_s == pytest.approx(10.03 + READ_S)


def test_a_report_doesnt_begin_the_work_anew() -> None:
    """What a rank has been reading for a while is partly done; a rank that is late is free now at the earliest."""
    router = make_least()
    decide(router, facts(1000), 10.0)
    for now_s, free_at_s in ((10.02, 10 + READ_S), (11.0, 11.0)):
        router.observe(events.LoadReported("p", [RankReport(0, 1000.0, 1.0)], now_s - 0.01), now_s)
        assert worker_of(router).free_at_s == pytest.approx(free_at_s)


def test_a_late_prompt_holds_up_those_behind_it() -> None:
    """While the first hasn't ended none behind it is begun, however long it takes; whoever ends out of turn is done."""
    router = make_least()
    first = decide(router, facts(1000), 10.0)
    second = decide(router, facts(1000), 10.0)
    decide(router, facts(1000), 20.0)
    assert worker_of(router).free_at_s == pytest.approx(20 + 2 * READ_S)
    router.observe(events.LoadReported("p", [RankReport(0, 3000.0, 3.0)], 29.9), 30.0)
    assert worker_of(router).free_at_s == pytest.approx(30 + 2 * READ_S)
    router.observe(events.FirstTokenSeen(second), 31.0)
    assert worker_of(router).free_at_s == pytest.approx(31 + READ_S)
    router.observe(events.FirstTokenSeen(first), 32.0)
    assert worker_of(router).free_at_s == pytest.approx(32 + READ_S)


def test_an_answer_that_grows_makes_steps_longer() -> None:
    """Its rank's share follows each token, and is gone with it."""
    router = make_least()
    placed = decide(router, facts(1000), 10.0)
    router.observe(events.TokensGenerated(placed, 500), 11.0)
    share_s = NEUTRAL.step_request_s + 1500 * NEUTRAL.step_kv_token_s
    assert worker_of(router, "d").share_s == pytest.approx(share_s)
    router.settle(placed, 12.0)
    assert worker_of(router, "d").share_s == 0.0


def test_a_prompt_that_is_given_up_needs_no_time() -> None:
    """Its rank goes on with the next; what it is reading isn't begun anew."""
    router = make_least()
    decide(router, facts(1000), 10.0)
    second = decide(router, facts(1000), 10.0)
    router.settle(second, 10.01)
    assert worker_of(router).free_at_s == pytest.approx(10 + READ_S)


def test_work_of_others_is_waited_for_until_its_report_is_old() -> None:
    """It is added to ours, and forgotten with the report."""
    router = make_least()
    router.observe(events.LoadReported("p", [RankReport(0, 5e6, 5.0)], 1.0), 1.0)
    assert worker_of(router).free_at_s > 200.0
    decide(router, facts(10), 100.0)
    assert worker_of(router).free_at_s < 100.1


def test_a_description_keeps_queue_and_speed() -> None:
    """An endpoint that tells more of itself has the same work to do; one with another profile is learned anew."""
    router = make_least()
    decide(router, facts(1000), 10.0)
    speed = router.work.sites["p"].speed
    router.observe(events.EndpointDescribed(prefill("p", dp_size=3, version="1")), 10.0)
    assert worker_of(router).free_at_s == pytest.approx(10 + READ_S)
    assert worker_of(router, rank=2).free_at_s == 0.0
    assert router.work.sites["p"].speed is speed
    router.observe(events.EndpointDescribed(prefill("p", dp_size=3, profile="slow")), 10.0)
    assert router.work.sites["p"].speed is not speed


def test_endpoints_come_and_go() -> None:
    """Those that are out aren't found, those that left aren't kept, and legs that still run on them end quietly."""
    router = make_least()
    placed = decide(router, facts(3000), 0.0)
    router.observe(events.ReadinessChanged("p", "out"), 0.0)
    assert worker_of(router).prefill is None
    assert [kind.readers for kind in router.work.sites["p"].domain.kinds] == [()]
    router.observe(events.ReadinessChanged("p", None), 0.0)
    assert worker_of(router).prefill is not None
    for address in ("p", "d", "never"):
        router.observe(events.EndpointLeft(address), 0.0)
        router.observe(events.ReadinessChanged(address, None), 0.0)
    assert not router.work.workers
    assert not list(router.work.domains(None, regular=False))
    router.observe(events.FirstTokenSeen(placed), 1.0)
    router.observe(events.TokensGenerated(placed, 5), 1.0)
    router.observe(events.UsageSeen(placed, 3000, 100, 100), 2.0)
    router.settle(placed, 2.0)
    router.observe(events.LoadReported("p", [RankReport(0, 1.0, 1.0)], 2.0), 2.0)


def test_models_stand_apart() -> None:
    """A request for a model is placed on its ranks; without a model all are looked at."""
    fleet = [make(f"{make.__name__}-{m}", model=m) for make in (prefill, decode, regular) for m in "ab"]
    router = make_router(fleet, make_options(policy="least_work"))
    for model in "ab":
        placed = decide(router, facts(model=model), 0.0)
        assert placed.prefill is not None
        assert placed.prefill.endpoint.model == placed.decode.endpoint.model == model
    assert len(list(router.work.domains(None, regular=True))) == 2
    assert not list(router.work.domains("c", regular=True))
    decide(router, facts(), 0.0)


def test_answers_teach_the_pace_of_steps() -> None:
    """A rank whose steps take three times what its profile says gets into another tier; short answers teach nothing."""
    router = make_least()
    for tokens, seconds in ((4, 9.0), *[(101, 100 * 0.03)] * 60):
        placed = decide(router, facts(100), 0.0)
        router.observe(events.FirstTokenSeen(placed), 0.0)
        router.observe(events.UsageSeen(placed, 100, tokens, tokens), seconds)
        router.settle(placed, seconds)
    assert router.work.sites["d"].speed.decode_factor == pytest.approx(3, rel=0.1)
    tier = worker_of(router, "d").decode_tier
    assert tier is not None
    assert 2.4 < tier.pace.factor < 3.6
    site = router.work.sites["d"]
    assert list(site.pool.decode.values()) == [tier]
    assert [kind.writers for kind in site.domain.kinds] == [(tier.pace,)]


def test_peers_are_those_of_one_profile() -> None:
    """What one endpoint shows is expected of others of its profile that nobody has tried, and of no others."""
    named = {name: msgspec.structs.replace(NEUTRAL, step_base_s=s) for name, s in (("a", 0.01), ("b", 0.02))}
    fleet = [prefill("p"), *(decode(name, profile=name[0]) for name in ("a1", "a2", "b1", "b2"))]
    router = make_router(fleet, make_options(policy="least_work", profiles=named))
    for address in ("a2", "b1", "b2"):
        router.observe(events.ReadinessChanged(address, "out"), 0.0)
    for second in range(40):
        placed = decide(router, facts(100), second)
        router.observe(events.FirstTokenSeen(placed), second)
        router.observe(events.UsageSeen(placed, 100, 101, 101), second + 100 * 0.05)
        router.settle(placed, second + 5.0)
    factors = {address: site.speed.decode_factor for address, site in router.work.sites.items()}
    assert factors["a1"] > 3
    assert factors["a2"] == pytest.approx(factors["a1"], rel=0.1)
    assert factors["b1"] == factors["b2"] == 1.0
    for address in ("a2", "b1", "b2"):
        router.observe(events.ReadinessChanged(address, None), 50.0)
    tiers = [worker_of(router, address).decode_tier for address in ("a1", "a2", "b1", "b2")]
    assert tiers[0] is tiers[1] is not tiers[2] is tiers[3]


def test_long_prompts_alone_teach_the_pace_of_prefill() -> None:
    """Short ones and queued ones don't: what stands around them is most of their time."""
    router = make_least()
    placed = [decide(router, facts(tokens), 0.0) for tokens in (100, 4000)]
    for decision in placed:
        router.observe(events.FirstTokenSeen(decision), 50.0)
        router.settle(decision, 50.0)
    assert router.work.sites["p"].speed.prefill_factor == 1.0
    for number in range(60):
        now_s = 100.0 + number
        decision = decide(router, facts(4000), now_s)
        router.observe(events.FirstTokenSeen(decision), now_s + 2 * prefill_s(NEUTRAL, 4000, 0))
        router.settle(decision, now_s + 0.6)
    assert router.work.sites["p"].speed.prefill_factor == pytest.approx(2, rel=0.05)
    tier = worker_of(router).prefill_tier
    assert tier is not None
    assert 1.8 < tier.pace.factor < 2.2


def test_a_prompt_that_was_begun_before_its_endpoint_left() -> None:
    """The rank that came back under the same name knows nothing of it: its end frees nothing there."""
    router = make_router([prefill("p"), decode("d")], make_options(policy="least_work"))
    old = decide(router, facts(5000), 0.0)
    router.observe(events.EndpointLeft("p"), 0.1)
    router.observe(events.EndpointJoined(prefill("p")), 0.2)
    decide(router, facts(8000), 0.3)
    (worker,) = router.work.sites["p"].workers
    queued_s, free_at_s = worker.queued_s, worker.free_at_s
    router.observe(events.FirstTokenSeen(old), 0.3)
    assert (worker.queued_s, worker.free_at_s) == (queued_s, free_at_s)
    router.settle(old, 0.4)
    assert worker.queued_s == queued_s


def test_ranks_in_step_wait_for_the_deepest_prompt() -> None:
    """What is queued on each takes as much longer as a token of the deepest one does, and no more when that is read."""
    router = make_together()
    deep = decide(router, facts(8000), 0.0)
    placed = [decide(router, facts(2000), 0.0) for _ in range(3)]
    workers = [router.work.workers[prefill_of(d).reservation.account.key] for d in placed]
    assert [w.free_at_s for w in workers] == [pytest.approx(2000 * TOKEN_S)] * 3
    router.observe(events.LoadReported("p", [RankReport(r, 0.0, 0.0) for r in range(4)], 0.05), 0.05)
    assert [w.free_at_s for w in workers] == [pytest.approx(0.05 + 2 * 1000 * TOKEN_S)] * 3  # 1,000 tokens deep
    router.settle(deep, 0.05)
    assert [w.free_at_s for w in workers] == [pytest.approx(0.05 + 2 * 1000 * TOKEN_S)] * 3
    router.settle(placed[0], 0.06)
    router.settle(placed[1], 0.06)
    assert workers[0].free_at_s == workers[1].free_at_s == 0.06
    stretch = 1 + (1000 + 0.01 / TOKEN_S / 2) / 1000
    assert workers[2].free_at_s == pytest.approx(0.06 + stretch * (1000 - 0.01 / TOKEN_S / 2) * TOKEN_S, rel=0.1)


def test_neighbours_are_told_when_the_pace_changes() -> None:
    """By whatever happens on one of them."""
    router = make_together()
    decide(router, facts(8000), 0.0)
    second = decide(router, facts(2000), 0.0)
    worker = router.work.workers[prefill_of(second).reservation.account.key]
    third = decide(router, facts(10), 0.05)
    assert prefill_of(third).reservation.account is not worker.load.account
    assert worker.free_at_s == pytest.approx(0.05 + 2 * 1000 * TOKEN_S)


def test_a_late_prompt_in_step_holds_up_those_behind_it() -> None:
    """What it was to take is over, what stands behind it isn't begun."""
    router = make_router(
        [prefill("p", profile="together"), decode("d")], make_options(policy="least_work", profiles=PROFILES)
    )
    decide(router, facts(100), 0.0)
    decide(router, facts(300), 0.0)
    router.observe(events.LoadReported("p", [RankReport(0, 400.0, 2.0)], 9.0), 9.0)
    together = router.work.sites["p"].together
    assert together is not None
    assert worker_of(router).free_at_s == pytest.approx(9.0 + 300 * TOKEN_S * together.stretch)


def test_prompts_teach_the_pace_of_steps_together() -> None:
    """Endpoints that take twice as long as their profile says have a clock that goes half as fast; short ones don't."""
    router = make_together()
    for tokens in (500, *[4000] * 40):
        now_s = 10.0 * router.decided
        decision = decide(router, facts(tokens), now_s)
        router.observe(events.FirstTokenSeen(decision), now_s + 2 * tokens * TOKEN_S)
        router.settle(decision, now_s + 5.0)
    assert router.work.sites["p"].speed.together_factor == pytest.approx(2, rel=0.05)


def test_a_description_keeps_what_is_queued_whatever_it_says_of_steps() -> None:
    """The clock goes on; where ranks turn out to read in step, or not to, what is queued is told anew."""
    router = make_together()
    decide(router, facts(2000), 0.0)
    decide(
        router,
        facts(2000),
        0.0,
    )
    workers = router.work.sites["p"].workers
    busy = next(w.load.key.rank for w in workers if w.legs)
    router.observe(events.EndpointDescribed(prefill("p", dp_size=4, profile="together", version="1")), 0.05)
    assert worker_of(router, rank=busy).free_at_s == pytest.approx(2000 * TOKEN_S)
    router.observe(events.EndpointDescribed(prefill("p", dp_size=4)), 0.05)
    assert worker_of(router, rank=busy).free_at_s == pytest.approx(0.05 + prefill_s(NEUTRAL, 2000, 0))
    router.observe(events.EndpointDescribed(prefill("p", dp_size=4, profile="together")), 0.06)
    assert worker_of(router, rank=busy).free_at_s == pytest.approx(0.06 + 2000 * TOKEN_S)


def test_a_prompt_in_step_that_was_begun_before_its_endpoint_left() -> None:
    """Its end teaches nothing."""
    router = make_together()
    old = decide(router, facts(5000), 0.0)
    router.observe(events.EndpointLeft("p"), 0.1)
    router.observe(events.EndpointJoined(prefill("p", dp_size=4, profile="together")), 0.2)
    router.observe(events.FirstTokenSeen(old), 0.3)
    assert router.work.sites["p"].speed.together_factor == 1.0
